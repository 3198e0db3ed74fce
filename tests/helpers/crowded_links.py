"""What the links of a forest need, counted by rank and tree (`trees/tree_gaps.py`)."""

import numpy as np

from meshmend.topology.mesh import Mesh
from meshmend.trees.tree_forest import PORT, Forest


def needed_by_links(mesh: Mesh, forest: Forest, goal: float, gap: float) -> list[float]:
    """The pace that each link needs."""
    ports = forest.state[:, :, PORT]
    parents = np.where(ports >= 0, np.take_along_axis(mesh.neighbor_ranks, ports, axis=1), -1)
    needed = []
    for a, b in mesh.links.tolist():
        pace = 0.0
        for child, parent in ((a, b), (b, a)):
            trees = np.flatnonzero(parents[child] == parent)
            leaves = [tree for tree in trees if not np.any(parents[:, tree] == child)]
            pace += len(trees) - min(len(leaves), max(0.0, gap * (goal - len(trees))))
        needed.append(pace)
    return needed
