"""Benchmarks of allreduce on real processes: meshmend, Gloo and OpenMPI side by side."""
