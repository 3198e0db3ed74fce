"""Figures 1 to 10 of the paper, drawn from the shapes that the library builds.

S. Kumar and N. Jouppi, "Highly Available Data Parallel ML training on Mesh Networks". The
setting is an 8x8 mesh; where chips failed, one aligned 2x2 block of them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from meshmend.pages.draw.grid import Grid
from meshmend.pages.draw.mesh_picture import ground_keys, mesh_panel
from meshmend.pages.draw.overlays import (
    forwarding_marks,
    layout_fills,
    layout_grid,
    layout_keys,
    layout_panel,
    overlay_grid,
    ring_marks,
    route_marks,
)
from meshmend.pages.draw.svg import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    LIVE_EDGE,
    RED,
    SERIES,
    SOFT_INK,
    Attributes,
    Key,
    Panel,
    arrow_head,
    beside,
    framed,
    label,
    line_path,
    mark,
    stacked,
    surrounded,
    tiled,
)
from meshmend.planning.pricing import TREES, price
from meshmend.planning.target import Question
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import FABRICS
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import routes_for
from meshmend.trees.rings import (
    Ring,
    fault_tolerant_layout,
    hamiltonian_ring,
    hops,
    line_rings,
    row_pair_layout,
)
from meshmend.units import format_time

_TITLE_SIZE = 12.0
_FULL = Mesh((8, 8))
_HOLED = _FULL.without("2x2@2,4")


def paper_figures() -> dict[str, str]:
    """Return the ten figures as SVG documents, keyed by file name without its ending."""
    return {name: draw() for name, draw in _FIGURES.items()}


def update_figure() -> str:
    """Return the paper's way to a sharded update as an SVG document, after figure 10.

    The paper names it as future work: "the updated weights can be forwarded to the nodes that are
    neighbors of the failed chips". The caption has its simulated time beside that of our trees.
    """
    question = Question(_HOLED, _UPDATE_BYTES, FABRICS["reference"], Collective.SHARDED_UPDATE)
    theirs, ours = (price(question, name) for name in ("ft-two-d", TREES))
    times = f"{format_time(theirs.time_s)}; trees hung from every chip: {format_time(ours.time_s)}"
    layout = fault_tolerant_layout(_HOLED)
    return framed(
        _update_steps(_HOLED),
        title="After figure 10: a sharded update with forwarding",
        keys=[*layout_keys(layout), *ground_keys(_HOLED)],
        caption="Chips of the complete blue rings own the weights. The yellow neighbours of the "
        "failed chips forward their gradients to them and are handed the updated weights. "
        f"100 MB on reference: {times}.",
    )


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
        _steps_of_halves(Mesh((4, 4))),
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
        _tiled_steps(_forwarding(_HOLED, "sum"), _HOLED, columns=4),
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


# The steps of two algorithms as strips of small pictures (figures 5 and 10).


def _steps_of_halves(mesh: Mesh) -> Panel:
    """Return the four steps of both halves of the payload on a square mesh (figure 5)."""
    n, square = mesh.shape[0], mesh.n_chips
    shares = [(n, f"1/{n}"), (1, f"1/{square}"), (n, f"1/{n}"), (square, "all")]
    kinds = ("reduce-scatter", "reduce-scatter", "all-gather", "all-gather")
    strips = []
    for name, colour, axes in (("red", RED, (1, 0, 0, 1)), ("blue", BLUE, (0, 1, 1, 0))):
        panels: list[Panel] = []
        for step, (axis, kind, (cells, share)) in enumerate(zip(axes, kinds, shares, strict=True)):
            picture = _line_step(mesh, axis, colour)
            bar = _shard_bar(cells, square, colour, f"{share} of the {name} half")
            body = stacked([picture, bar], gap=4, centred=True)
            title = f"{step + 1}. {kind} {'YX'[axis]}"
            panels += [surrounded(body, title=title, size=_TITLE_SIZE), _next_arrow(body.height)]
        strips.append(beside(panels[:-1], gap=12))
    return stacked(strips, gap=22)


def _update_steps(mesh: Mesh) -> Panel:
    """Return the steps of a sharded update by forwarding: owners are on the blue rings alone."""
    layout = fault_tolerant_layout(mesh)
    steps = _forwarding(mesh, "weights")
    owned = f"each of {sum(map(len, layout.blue))} blue chips: its share of the weights"
    middle = len(steps) // 2
    steps[middle:middle] = [("update", [], owned)]
    return _tiled_steps(steps, mesh, columns=3)


_Step = tuple[str, list[str], str]  # its name, its marks, and what it does


def _forwarding(mesh: Mesh, result: str) -> list[_Step]:
    layout = fault_tolerant_layout(mesh)
    grid = Grid(mesh, 26, 0.6, numbered=False)
    yellow = ring_marks(grid, layout.yellow, [AMBER] * len(layout.yellow))
    blue = ring_marks(grid, layout.blue, [BLUE] * len(layout.blue))
    to_blue = forwarding_marks(grid, list(layout.partner.items()), colour=GREEN)
    back = [(there, here) for here, there in layout.partner.items()]
    to_yellow = forwarding_marks(grid, back, colour=GREEN)
    across = _routed_rings(grid, _shown_across(mesh, layout.across))
    along, over = ("X", "Y") if layout.axis == 0 else ("Y", "X")
    return [
        ("yellow reduce-scatter", yellow, "each yellow chip: a quarter"),
        ("yellow to blue", to_blue, "the quarter is added to the blue chip's own"),
        (f"blue reduce-scatter {along}", blue, f"full rings of {len(layout.blue[0])} chips"),
        (f"reduce-scatter {over}", across, "around the hole; three rings shown"),
        (f"all-gather {over}", across, "around the hole; three rings shown"),
        (f"blue all-gather {along}", blue, f"blue chips hold the whole {result}"),
        ("blue to yellow", to_yellow, f"each yellow chip: its quarter of the {result}"),
        ("yellow all-gather", yellow, f"every chip holds the whole {result}"),
    ]


def _tiled_steps(steps: Sequence[_Step], mesh: Mesh, *, columns: int) -> Panel:
    fills = layout_fills(fault_tolerant_layout(mesh))
    ground = mesh_panel(Grid(mesh, 26, 0.6, numbered=False), fills=fills)
    panels = [
        surrounded(ground.plus(marks), title=f"{i + 1}. {name}", caption=caption, size=_TITLE_SIZE)
        for i, (name, marks, caption) in enumerate(steps)
    ]
    return tiled(panels, columns, gap=26)


def _line_step(mesh: Mesh, axis: int, colour: str) -> Panel:
    """Return the rings along one axis on a small mesh."""
    grid = Grid(mesh, 46, 0.44, numbered=False)
    rings = line_rings(mesh, axis)
    return mesh_panel(grid).plus(ring_marks(grid, rings, [colour] * len(rings)))


def _shard_bar(n_filled: int, n_cells: int, colour: str, words: str) -> Panel:
    """Return a bar of cells, some filled: what a chip holds of its half after a step."""
    cell, height = 160.0 / n_cells, 12.0
    marks = []
    for at in range(n_cells):
        place: Attributes = {"x": at * cell, "y": 0, "width": cell, "height": height}
        fill = colour if at < n_filled else FAINT
        marks.append(mark("rect", {**place, "fill": fill, "stroke": "#ffffff"}))
    marks.append(label((80, height + 11), words, size=11, anchor="middle", colour=SOFT_INK))
    return Panel(160, height + 20, tuple(marks))


def _next_arrow(height: float) -> Panel:
    """Return the arrow from one step to the next."""
    y = 0.45 * height
    shaft: Attributes = {"stroke": LIVE_EDGE, "stroke-width": 3, "fill": "none"}
    return Panel(
        24,
        height,
        (
            mark("path", {"d": line_path([(0, y), (15, y)]), **shaft}),
            mark("path", {"d": arrow_head((24, y), (1, 0), 11), "fill": LIVE_EDGE}),
        ),
    )


def _shown_across(mesh: Mesh, across: Sequence[Ring]) -> list[Ring]:
    """Return two second-phase rings that meet the hole, and the first that does not."""

    def blocked(ring: Ring) -> bool:
        return bool({chip[1] for chip in ring} & {chip[1] for chip in mesh.failed})

    half = across[: len(across) // 2]
    free = [ring for ring in half if not blocked(ring)]
    return [*free[:1], *[ring for ring in half if blocked(ring)][:2]]


def _routed_rings(grid: Grid, rings: Sequence[Ring]) -> list[str]:
    """Return every hop of the rings along its route, a colour for each ring."""
    colours = (BLUE, "#d55e00", "#7a5cc0")
    paths: list[tuple[Chip, ...]] = []
    paints: list[str] = []
    for ring, colour in zip(rings, itertools.cycle(colours), strict=False):
        paths += [route_between(grid.mesh, *hop) for hop in hops(ring)]
        paints += [colour] * len(ring)
    return route_marks(grid, paths, paints)


def route_between(mesh: Mesh, source: Chip, target: Chip) -> tuple[Chip, ...]:
    """Return the chips on the route from one live chip to another, both included."""
    ranks = (np.array([mesh.rank_of[chip]], dtype=np.int64) for chip in (source, target))
    routes = routes_for(mesh, *ranks)
    return routes.path(mesh, mesh.rank_of[source], mesh.rank_of[target])


_UPDATE_BYTES = 100e6
