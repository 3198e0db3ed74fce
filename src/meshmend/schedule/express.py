"""The schedule `express`: trees whose messages pass chips without stopping.

A short payload on a mesh goes up a tree and down again, and at every chip it waits to be whole and
pays the overhead of a message. Here a tree goes along one axis after another, and the chips of a
line send straight to the line's end: as many hops, but one message for each axis
(`trees/axis_trees.py`). There is a tree for each axis, which starts with that axis.

Messages on a line follow one another one hop apart. Where a message takes longer than that, they
would queue. So every second chip first hands its sum to its neighbour, and they are two hops apart.
Works on every connected mesh, around any holes.
"""

from meshmend.errors import UnsupportedError
from meshmend.schedule.table import Collective, Schedule
from meshmend.schedule.trees import tree_schedule
from meshmend.topology.mesh import Mesh
from meshmend.trees.axis_trees import axis_tree_packing, straight_to


def express(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the allreduce in which pairs of chips send straight to the end of their line.

    Raises:
        UnsupportedError: another collective.
    """
    if collective is not Collective.ALLREDUCE:
        raise UnsupportedError(f"express is an allreduce, but got the collective {collective}")
    packing = axis_tree_packing(mesh)
    takers = straight_to(mesh, packing, in_pairs=True)
    return tree_schedule(packing, collective, algorithm="express", takers=takers)
