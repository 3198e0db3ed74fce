"""The schedule `express`: trees whose messages pass chips without stopping.

A short payload on a mesh goes up a tree and down again, and at every chip it waits to be whole and
pays the overhead of a message. Here a tree goes along one axis after another, and the chips of a
line send straight to the line's end: as many hops, but one message for each axis
(`trees/axis_trees.py`). There is a tree for each axis, which starts with that axis.

Messages on a line follow one another one hop apart. Where a message takes longer than that, they
would queue. So every second chip first hands its sum to its neighbour, and they are two hops apart.
Works on every connected mesh, around any holes.

`express-apart` is for payloads that are longer, on meshes where a hole in the middle makes the last
lines of two trees share links: there one tree hangs a hop farther from the middle.
"""

from meshmend.errors import UnsupportedError
from meshmend.schedule.table import Collective, Schedule
from meshmend.schedule.trees import tree_schedule
from meshmend.topology.mesh import Mesh
from meshmend.trees.axis_trees import (
    axis_tree_packing,
    axis_trees_apart,
    share_last_lines,
    straight_to,
)
from meshmend.trees.tree_packing import TreePacking


def express(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the allreduce in which pairs of chips send straight to the end of their line.

    Raises:
        UnsupportedError: another collective.
    """
    return _in_pairs(mesh, axis_tree_packing(mesh), collective, "express")


def express_apart(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the same over trees whose last lines share no link.

    Raises:
        UnsupportedError: another collective, or the trees of `express` share none either.
    """
    check_express_apart(mesh)
    return _in_pairs(mesh, axis_trees_apart(mesh), collective, "express-apart")


def check_express_apart(mesh: Mesh) -> None:
    """Raise UnsupportedError where the last lines of the trees of `express` share no link."""
    has_failures = bool(mesh.failed or mesh.failed_links)
    if not (has_failures and share_last_lines(mesh, axis_tree_packing(mesh))):
        raise UnsupportedError(
            f"express-apart needs a hole that makes trees share links next to their roots, but "
            f"those of express share none on {mesh}"
        )


def _in_pairs(mesh: Mesh, packing: TreePacking, collective: Collective, name: str) -> Schedule:
    if collective is not Collective.ALLREDUCE:
        raise UnsupportedError(f"{name} is an allreduce, but got the collective {collective}")
    takers = straight_to(mesh, packing, in_pairs=True)
    return tree_schedule(packing, collective, algorithm=name, takers=takers)
