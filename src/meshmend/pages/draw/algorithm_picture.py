"""What a plan lays over a mesh: its trees, its rings, or else the load of its links."""

from collections.abc import Callable

import numpy as np

from meshmend.pages.draw.axis_picture import axis_lines_svg
from meshmend.pages.draw.load_picture import link_load_svg
from meshmend.pages.draw.overlays import layout_svg, rings_svg
from meshmend.pages.draw.tree_picture import trees_svg
from meshmend.pages.draw.two_root_picture import two_roots_svg
from meshmend.planning.plan import Plan
from meshmend.schedule.tree_reading import trees_in
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.trees.pairs import AXIS_NAMES, fault_tolerant_layout, row_pair_layout
from meshmend.trees.rings import hamiltonian_ring, line_rings
from meshmend.units import counted

_TREES_SHOWN = 6  # more would not be told apart
_TREES_SHOWN_3D = 2  # each has several layers


def _line_rings(mesh: Mesh) -> str:
    rows, columns = line_rings(mesh, 1), line_rings(mesh, 0)
    names = [f"rings along {AXIS_NAMES[0]}"] * len(rows)
    names += [f"rings along {AXIS_NAMES[1]}"] * len(columns)
    return rings_svg(
        mesh,
        [*rows, *columns],
        names=names,
        caption="Half of the payload is summed along its row first and then along its column, the "
        "other half the other way round.",
    )


# What the other algorithms lay over a mesh depends on the mesh alone.
_PICTURES: dict[str, Callable[[Mesh], str]] = {
    "ring-1d": lambda mesh: rings_svg(mesh, [hamiltonian_ring(mesh)]),
    "two-d": _line_rings,
    "row-pair": lambda mesh: layout_svg(mesh, row_pair_layout(mesh)),
    "rings-nd": axis_lines_svg,
    "ft-two-d": lambda mesh: layout_svg(mesh, fault_tolerant_layout(mesh)),
    "two-roots": two_roots_svg,
}


def plan_svg(plan: Plan) -> str:
    """Return the picture of a plan: what its own schedule lays over the mesh.

    A schedule of an unknown algorithm is drawn as trees where it has them, else by link load.
    """
    name = plan.schedule.algorithm
    if name in _PICTURES:
        return _PICTURES[name](plan.placement.mesh)
    if name == "rank-ring":
        return _rank_ring(plan)
    return _trees(plan) or plan_load_svg(plan)


def plan_load_svg(plan: Plan, *, darkest: float | None = None) -> str:
    """Return the mesh of a plan with its links coloured by what they carry of the payload."""
    return link_load_svg(
        plan.placement.mesh,
        plan.channel_loads,
        title=f"Link load of {plan.schedule.algorithm} on {plan.mesh}",
        darkest=darkest,
    )


def _trees(plan: Plan) -> str | None:
    """Draw the trees of a schedule side by side, the first few if there are many."""
    parents = trees_in(plan.schedule)
    if parents is None:
        return None
    mesh = plan.placement.mesh
    different = np.unique(parents, axis=0, return_index=True)[1]
    shown = np.sort(different)[: _TREES_SHOWN if len(mesh.shape) < 3 else _TREES_SHOWN_3D]
    n_trees = len(different)
    which = f"{len(shown)} of the {n_trees}" if len(shown) < n_trees else str(n_trees)
    noun = counted(n_trees, "spanning tree").split(" ", 1)[1]
    return trees_svg(
        mesh,
        parents[shown],
        title=f"{which} {noun} on {plan.mesh}",
        caption="Each carries its part of the payload up to its root and the sum back down, all at "
        f"once: no link carries more than {plan.channel_loads.max():.3g} of the payload each way. "
        "Thick and dark: near the root.",
    )


def _rank_ring(plan: Plan) -> str:
    """Draw the ring in rank order, hop by hop along the routes that its messages take."""
    mesh, routes, n_ranks = plan.placement.mesh, plan.placement.routes, plan.schedule.n_ranks
    path: list[Chip] = [mesh.live[0]]
    for rank in range(n_ranks if n_ranks > 1 else 0):
        path += routes.path(mesh, rank, (rank + 1) % n_ranks)[1:]
    return rings_svg(
        mesh,
        [tuple(path[:-1] or path)],
        title=f"1 ring in rank order on {plan.mesh}",
        caption="Ranks are numbered row by row, and the ring ignores the mesh: a message to the "
        "next rank takes several links, and some links carry several messages.",
    )
