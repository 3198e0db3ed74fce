"""Trees whose last messages to the farthest ranks pass chips without stopping.

The last hops to the farthest ranks are what all trees wait for, and each waits for a message to be
whole. A message may pass a chip without stopping, but then the chip must get its data from
elsewhere. At the end of a branch that is possible. The message stops beyond the chip, and the
next one goes back to it: over the other direction of the link, which has nothing to send any more.

    parents before   root ... a <- b <- c <- d <- e <- f <- g     each arrow is a message up
    after            root ... a <------------ d <------- f <- g   d and f pass two chips and one,
                                  b -> c -> d      e -> f         and these send away from the root

All in a tree that sends up and, the other way round, down. The ends take half as many messages,
though as many hops. Knows nothing of bytes and seconds.
"""

import numpy as np

from meshmend.topology.mesh import Mesh
from meshmend.trees.tree_packing import TreePacking

# From the end of a branch: hops to the next stop. The first stops everywhere, the later ones leave
# time to go back. Found by trying on 32x32 less 4x2@14,14 at 3 MB: (1, 2) and (1, 2, 2) are slower.
_HOPS_TO_STOPS = (1, 2, 3)
_HOPS_FROM_THE_DEEPEST = 2  # branches that end within so many hops of the deepest rank


def express_ends(mesh: Mesh, packing: TreePacking) -> TreePacking:
    """Return a packing whose parents are where messages stop, some hops away near the ends.

    Only branches that are straight and have no side branches change, so that the way to a parent is
    the line to it.
    """
    parents = packing.parents.copy()
    for tree in range(packing.n_trees):
        n_children = np.bincount(
            packing.parents[tree][packing.parents[tree] >= 0], minlength=packing.n_ranks
        )
        is_far = packing.hops[tree] >= packing.depths[tree] - _HOPS_FROM_THE_DEEPEST
        for end in np.flatnonzero((n_children == 0) & is_far).tolist():
            _pass_chips(parents[tree], _line(mesh, packing.parents[tree], n_children, end))
    return TreePacking(packing.roots, parents, packing.weights)


def _line(mesh: Mesh, parents: np.ndarray, n_children: np.ndarray, end: int) -> list[int]:
    """Return the ranks from the end of a branch up to where it turns or joins another."""
    ways = mesh.neighbor_ranks
    line, most = [end], sum(_HOPS_TO_STOPS) + 1
    while len(line) < most and (above := int(parents[line[-1]])) >= 0:
        port = int(np.argmax(ways[line[-1]] == above))
        if len(line) > 1 and ways[line[-2], port] != line[-1]:
            break
        line.append(above)
        if n_children[above] > 1:
            break
    return line


def _pass_chips(parents: np.ndarray, line: list[int]) -> None:
    """Change the parents of the ranks of a line; its last rank stays as it is."""
    at = _HOPS_TO_STOPS[0]
    for hops in _HOPS_TO_STOPS[1:]:
        if at + hops >= len(line):
            return
        parents[line[at]] = line[at + hops]
        for passed in range(at + 1, at + hops):
            parents[line[passed]] = line[passed - 1]
        at += hops
