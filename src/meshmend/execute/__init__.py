"""Do it: run a schedule on real arrays."""
