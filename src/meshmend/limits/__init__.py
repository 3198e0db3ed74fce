"""Lower bounds: the packing number of a mesh, and the time that no allreduce beats."""
