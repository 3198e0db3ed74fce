"""Logical shapes on a mesh: rings, pairs of rows, and packings of spanning trees."""
