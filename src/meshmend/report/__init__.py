"""Show it: SVG pictures of meshes, rings, routes and loads, and the figures of the paper."""
