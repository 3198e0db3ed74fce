"""Is it right: counts every contribution, and walks every hop."""
