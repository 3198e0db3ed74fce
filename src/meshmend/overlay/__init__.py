"""The logical shapes laid over a mesh: rings, row pairs, blue and yellow rings."""
