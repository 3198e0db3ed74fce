"""Figures 1 to 10 of the paper, drawn from the shapes that the library builds.

S. Kumar and N. Jouppi, "Highly Available Data Parallel ML training on Mesh Networks". The
setting is an 8x8 mesh; where chips failed, one aligned 2x2 block of them.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from meshmend.lab.paper.figure_steps import forwarding_steps, route_between, two_d_steps
from meshmend.pages.draw.mesh_picture import ground_keys, mesh_panel
from meshmend.pages.draw.overlays import (
    layout_grid,
    layout_keys,
    layout_panel,
    overlay_grid,
    ring_marks,
    route_marks,
)
from meshmend.pages.draw.svg import BLUE, LIVE_EDGE, RED, SERIES, Key, beside, framed, surrounded
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.trees.pairs import fault_tolerant_layout, row_pair_layout
from meshmend.trees.rings import hamiltonian_ring, line_rings

_FULL = Mesh((8, 8))
_HOLED = _FULL.without("2x2@2,4")


def paper_figures() -> dict[str, str]:
    """Return the ten figures as SVG documents, keyed by file name without its ending."""
    return {name: draw() for name, draw in _FIGURES.items()}


def _dimension_order() -> str:
    pairs = (((1, 0), (5, 5)), ((6, 7), (2, 2)), ((7, 0), (7, 4)))
    routes = [route_between(_FULL, *pair) for pair in pairs]
    grid = overlay_grid(_FULL, routes, closed=False)
    return framed(
        mesh_panel(grid).plus(route_marks(grid, routes, SERIES[:3])),
        title="Figure 1: dimension-order routing",
        caption="A packet walks along X until its column is right, then along Y: minimal, and "
        "its channel-dependency graph has no cycle.",
    )


def _around_the_hole() -> str:
    pairs = (((2, 1), (2, 6)), ((3, 7), (3, 2)))
    routes = [route_between(_HOLED, *pair) for pair in pairs]
    wanted = [
        _from_where_they_part(route_between(_FULL, *pair), route)
        for pair, route in zip(pairs, routes, strict=True)
    ]
    paths = [*wanted, *routes]
    grid = overlay_grid(_HOLED, paths, closed=False)
    colours = [LIVE_EDGE] * len(wanted) + list(SERIES[: len(routes)])
    return framed(
        mesh_panel(grid).plus(route_marks(grid, paths, colours, dashed=range(len(wanted)))),
        title="Figure 2: routing around failed chips",
        keys=[
            Key(SERIES[0], "route", "arrow"),
            Key(LIVE_EDGE, "dimension order, blocked", "dash"),
            *ground_keys(_HOLED),
        ],
        caption="The failed 2x2 block lies on the dimension-order path; the packet steps aside, "
        "walks along the border of the block and comes back.",
    )


def _from_where_they_part(path: Sequence[Chip], other: Sequence[Chip]) -> Sequence[Chip]:
    """Return the rest of a path from the last chip up to which another agrees with it."""
    parting = next(i for i, (one, two) in enumerate(zip(path, other, strict=False)) if one != two)
    return path[parting - 1 :]


def _hamiltonian() -> str:
    return _one_ring(
        _FULL,
        title="Figure 3: one Hamiltonian ring",
        caption="1-D algorithm: one ring over near neighbours through all 64 chips. Column 0 is "
        "the way back, a snake fills the others.",
    )


def _two_colours() -> str:
    rings = {RED: line_rings(_FULL, 1), BLUE: line_rings(_FULL, 0)}
    grid = overlay_grid(_FULL, rings[RED], closed=True)
    marks = [
        mark for colour, own in rings.items() for mark in ring_marks(grid, own, [colour] * len(own))
    ]
    return framed(
        mesh_panel(grid).plus(marks),
        title="Figure 4: two colours, rings along X and along Y",
        keys=[Key(RED, "rings along X", "arrow"), Key(BLUE, "rings along Y", "arrow")],
        caption="2-D algorithm: red sums half of the payload along X, then Y; blue the other half "
        "along Y, then X, at the same time. Without wrap links a ring visits every other chip on "
        "its way out and the rest on its way back, so both ways share the line's links.",
    )


def _two_d_steps() -> str:
    return framed(
        two_d_steps(4),
        title="Figure 5: the steps of the 2-D allreduce",
        caption="Both halves of the payload run at the same time, one along X while the other "
        "runs along Y; drawn for 4x4. Bars: what each chip holds of its half, summed so far, "
        "after the step: 1/N after one axis, 1/N² after both.",
    )


def _row_pairs() -> str:
    rings = row_pair_layout(_FULL).blue
    grid = overlay_grid(_FULL, rings, closed=True)
    return framed(
        mesh_panel(grid).plus(ring_marks(grid, rings, [BLUE] * len(rings))),
        title="Figure 6: rings over pairs of rows",
        caption="Alternate 2-D scheme, phase 1: rows 2k and 2k+1 form one ring of 16 chips; every "
        "hop is a near neighbour, and no link serves two rings.",
    )


def _alternate_rows() -> str:
    rings = row_pair_layout(_FULL).across
    grid = overlay_grid(_FULL, rings, closed=True)
    colours = [SERIES[ring[0][0] % 2] for ring in rings]
    return framed(
        mesh_panel(grid).plus(ring_marks(grid, rings, colours)),
        title="Figure 7: rings over alternate rows",
        keys=[
            Key(SERIES[0], "rings over even rows", "arrow"),
            Key(SERIES[1], "rings over odd rows", "arrow"),
        ],
        caption="Alternate 2-D scheme, phase 2: neighbours in these rings skip rows, so the links "
        "of a column carry two rings; 1/16 of the payload is left by then.",
    )


def _hamiltonian_with_hole() -> str:
    return _one_ring(
        _HOLED,
        title="Figure 8: one ring around failed chips",
        caption="A ring through all 60 live chips: the mesh is split into 2x2 blocks, and the ring "
        "walks once around a spanning tree of the live blocks.",
    )


def _one_ring(mesh: Mesh, *, title: str, caption: str) -> str:
    ring = hamiltonian_ring(mesh)
    grid = overlay_grid(mesh, [ring], closed=True)
    return framed(
        mesh_panel(grid).plus(ring_marks(grid, [ring], [BLUE])),
        title=title,
        keys=ground_keys(mesh),
        caption=caption,
    )


def _blue_and_yellow() -> str:
    panels = []
    for hole, words in (
        ("2x2@2,4", "2x2 failed: rows pair"),
        ("4x2@2,4", "4x2 failed: columns pair"),
    ):
        mesh = _FULL.without(hole)
        layout = fault_tolerant_layout(mesh)
        picture = layout_panel(layout_grid(mesh, layout), layout)
        panels.append(surrounded(picture, title=words, size=13))
    return framed(
        beside(panels, gap=36),
        title="Figure 9: fault-tolerant rings with forwarding",
        keys=[*layout_keys(layout), *ground_keys(_HOLED)],
        caption="Pairs without failed chips form full blue rings. The live chips of a broken pair "
        "are yellow: they form rings of 2x2 blocks and forward their sums to the blue ring beside "
        "them. Lines pair along the long side of the hole, so that one pair breaks.",
    )


def _forwarding_steps() -> str:
    layout = fault_tolerant_layout(_HOLED)
    return framed(
        forwarding_steps(_HOLED),
        title="Figure 10: the steps of the forwarding scheme",
        keys=[*layout_keys(layout), *ground_keys(_HOLED)],
        caption="Steps 1 to 3 and 6 to 8 overlap as far as the data allows: no barrier separates "
        "the steps.",
    )


_FIGURES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "figure-01-dimension-order": _dimension_order,
        "figure-02-around-the-hole": _around_the_hole,
        "figure-03-hamiltonian-ring": _hamiltonian,
        "figure-04-two-colours": _two_colours,
        "figure-05-two-d-steps": _two_d_steps,
        "figure-06-row-pair-rings": _row_pairs,
        "figure-07-alternate-rows": _alternate_rows,
        "figure-08-ring-with-hole": _hamiltonian_with_hole,
        "figure-09-blue-and-yellow": _blue_and_yellow,
        "figure-10-forwarding-steps": _forwarding_steps,
    }
)
