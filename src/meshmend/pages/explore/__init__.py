"""The explorer: a local page on which one breaks a mesh and sees plan, price and limit."""
