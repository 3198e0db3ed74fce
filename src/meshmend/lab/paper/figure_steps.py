"""The steps of two algorithms as strips of small pictures (figures 5 and 10 of the paper)."""

import itertools
from collections.abc import Sequence

import numpy as np

from meshmend.pages.draw.grid import Grid
from meshmend.pages.draw.mesh_picture import mesh_panel
from meshmend.pages.draw.overlays import forwarding_marks, layout_fills, ring_marks, route_marks
from meshmend.pages.draw.svg import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    LIVE_EDGE,
    RED,
    SOFT_INK,
    Attributes,
    Panel,
    arrow_head,
    beside,
    label,
    line_path,
    mark,
    stacked,
    surrounded,
    tiled,
)
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import routes_for
from meshmend.trees.pairs import fault_tolerant_layout
from meshmend.trees.rings import Ring, hops, line_rings

_TITLE_SIZE = 12.0


def two_d_steps(n: int) -> Panel:
    """Return the four steps of both halves of the payload on an n x n mesh (figure 5)."""
    square = n * n
    shares = [(n, f"1/{n}"), (1, f"1/{square}"), (n, f"1/{n}"), (square, "all")]
    kinds = ("reduce-scatter", "reduce-scatter", "all-gather", "all-gather")
    strips = []
    for name, colour, axes in (("red", RED, (1, 0, 0, 1)), ("blue", BLUE, (0, 1, 1, 0))):
        panels: list[Panel] = []
        for step, (axis, kind, (cells, share)) in enumerate(zip(axes, kinds, shares, strict=True)):
            picture = _line_step(Mesh((n, n)), axis, colour)
            bar = _shard_bar(cells, square, colour, f"{share} of the {name} half")
            body = stacked([picture, bar], gap=4, centred=True)
            title = f"{step + 1}. {kind} {'YX'[axis]}"
            panels += [surrounded(body, title=title, size=_TITLE_SIZE), _next_arrow(body.height)]
        strips.append(beside(panels[:-1], gap=12))
    return stacked(strips, gap=22)


def forwarding_steps(mesh: Mesh) -> Panel:
    """Return the eight steps of the forwarding scheme on a mesh with a hole (figure 10)."""
    return _tiled_steps(_forwarding(mesh, "sum"), mesh, columns=4)


def update_steps(mesh: Mesh) -> Panel:
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
