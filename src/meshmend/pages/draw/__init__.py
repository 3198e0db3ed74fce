"""SVG pictures of meshes, rings, trees, routes and loads, and what HTML pages are made of."""
