"""A schedule as steps that all ranks take together: what a compiled program of permutes needs."""
