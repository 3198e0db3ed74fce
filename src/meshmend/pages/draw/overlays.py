"""Rings, routes, and blue and yellow layouts drawn over a mesh.

Each `*_marks` function returns marks for a mesh panel of the same grid, so that pictures may
put several on one mesh; each `*_svg` function returns a finished document.
"""

from collections.abc import Collection, Sequence

from meshmend.pages.draw.grid import Grid, LanePath, Reach, fitting_grid, reach, traces
from meshmend.pages.draw.mesh_picture import ground_keys, mesh_panel
from meshmend.pages.draw.svg import (
    AMBER,
    BLUE,
    BLUE_FILL,
    GREEN,
    YELLOW_FILL,
    Attributes,
    Key,
    Panel,
    arrow_head,
    framed,
    group,
    line_path,
    mark,
    series,
    towards,
)
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.trees.rings import AXIS_NAMES, PairLayout, Ring
from meshmend.units import counted

Path = Sequence[Chip]


def rings_svg(
    mesh: Mesh,
    rings: Sequence[Ring],
    *,
    names: Sequence[str] = (),
    title: str = "",
    caption: str = "",
) -> str:
    """Return a mesh with rings in colours, one `hop` arrow for every chip of every ring.

    `names` label the rings in the legend, where given; rings of one name have one colour.
    """
    grid = overlay_grid(mesh, rings, closed=True)
    number_of = {name: i for i, name in enumerate(dict.fromkeys(names))}
    colours = [series(number_of[names[i]] if names else i) for i in range(len(rings))]
    keys = [Key(series(i), name, "arrow") for name, i in number_of.items()]
    return framed(
        mesh_panel(grid).plus(ring_marks(grid, rings, colours)),
        title=title or f"{counted(len(rings), 'ring')} on {mesh}",
        keys=[*keys, *ground_keys(mesh)],
        caption=caption,
    )


def routes_svg(mesh: Mesh, routes: Sequence[Path]) -> str:
    """Return a mesh with routes in colours: a dot at the first chip, an arrow into the last."""
    grid = overlay_grid(mesh, routes, closed=False)
    colours = [series(i) for i in range(len(routes))]
    return framed(
        mesh_panel(grid).plus(route_marks(grid, routes, colours)),
        title=f"{counted(len(routes), 'route')} on {mesh}",
        keys=ground_keys(mesh),
    )


def layout_svg(mesh: Mesh, layout: PairLayout) -> str:
    """Return a mesh with blue and yellow rings, and an arrow from each yellow chip to a blue."""
    return framed(
        layout_panel(layout_grid(mesh, layout), layout),
        title=f"Rings over pairs of {AXIS_NAMES[layout.axis]} on {mesh}",
        keys=[*layout_keys(layout), *ground_keys(mesh)],
    )


def layout_grid(mesh: Mesh, layout: PairLayout) -> Grid:
    """Return a grid with wide gaps where a yellow chip's partner is not its neighbour."""
    return overlay_grid(mesh, list(layout.partner.items()), closed=False)


def layout_panel(grid: Grid, layout: PairLayout) -> Panel:
    """Return the picture of a layout without its frame."""
    return mesh_panel(grid, fills=layout_fills(layout)).plus(
        [
            *ring_marks(grid, layout.blue, [BLUE] * len(layout.blue)),
            *ring_marks(grid, layout.yellow, [AMBER] * len(layout.yellow)),
            *forwarding_marks(grid, list(layout.partner.items())),
        ]
    )


def layout_keys(layout: PairLayout) -> list[Key]:
    """Return the legend of a layout."""
    keys = [Key(BLUE, "full ring", "chip", BLUE_FILL)]
    if layout.yellow:
        keys.append(Key(AMBER, "ring of a 2x2 block", "chip", YELLOW_FILL))
        keys.append(Key(GREEN, "forwards to a full ring", "arrow"))
    return keys


def layout_fills(layout: PairLayout) -> dict[Chip, str]:
    """Return the fill of every live chip: blue on full rings, yellow on the small ones."""
    blue = {chip: BLUE_FILL for ring in layout.blue for chip in ring}
    return blue | {chip: YELLOW_FILL for ring in layout.yellow for chip in ring}


def overlay_grid(mesh: Mesh, paths: Sequence[Path], *, closed: bool) -> Grid:
    """Return a grid with wide gaps when a path passes by chips, else with wide chips."""
    skips = any(
        reach(mesh, *hop)[0] is Reach.SKIP
        for path in paths
        for hop in zip(path, [*path[1:], *(path[:1] if closed else [])], strict=False)
    )
    return fitting_grid(mesh, fill=0.44, roomy=True) if skips else fitting_grid(mesh, fill=0.62)


def ring_marks(grid: Grid, rings: Sequence[Ring], colours: Sequence[str]) -> list[str]:
    """Return the marks of rings: one `ring` line and as many `hop` arrows as chips each."""
    marks = []
    for trace, colour in zip(traces(grid, rings, closed=True), colours, strict=True):
        marks += _line(grid, trace, {"class": "ring", "stroke": colour})
        marks += _arrows(grid, trace, "hop", colour)
    return marks


def route_marks(
    grid: Grid, routes: Sequence[Path], colours: Sequence[str], *, dashed: Collection[int] = ()
) -> list[str]:
    """Return the marks of routes: a `start` dot, a `route` line, and one arrow at the end.

    `dashed` numbers the routes to draw dashed, as a bare line.
    """
    marks = []
    for number, (trace, colour) in enumerate(zip(traces(grid, routes), colours, strict=True)):
        look: Attributes = {"class": "route", "stroke": colour}
        dash: Attributes = {"stroke-dasharray": "5 4"} if number in dashed else {}
        marks += _line(grid, trace, {**look, **dash})
        if trace.lines and number not in dashed:
            marks += _ends(grid, trace, colour)
    return marks


def _ends(grid: Grid, trace: LanePath, colour: str) -> list[str]:
    """Return a dot where a route starts and an arrow where it ends."""
    (x, y), (before, tip) = trace.lines[0][0], trace.lines[-1][-2:]
    dot: Attributes = {"cx": x, "cy": y, "r": 0.1 * grid.pitch, "fill": colour}
    way = tip[0] - before[0], tip[1] - before[1]
    head = arrow_head(tip, way, 1.4 * _arrow_size(grid))
    return [
        mark("circle", {"class": "start", **dot}),
        mark("path", {"class": "end", "d": head, "fill": colour}),
    ]


def forwarding_marks(
    grid: Grid, pairs: Sequence[tuple[Chip, Chip]], *, colour: str = GREEN
) -> list[str]:
    """Return one `forward` arrow from the side of each first chip to the side of the second."""
    marks = []
    for trace in _separate_hops(grid, pairs):
        marks += _line(grid, trace, {"class": "forward", "stroke": colour})
        marks += _arrows(grid, trace, "forward-head", colour)
    return marks


def _separate_hops(grid: Grid, pairs: Sequence[tuple[Chip, Chip]]) -> list[LanePath]:
    """Return each pair as a line that starts and ends at the sides of its chips."""
    edge = 0.48 * grid.side
    result = []
    for trace in traces(grid, pairs):
        if trace.lines and len(trace.lines[0]) == 2 and len(trace.lines) == 1:
            start, stop = trace.lines[0]
            line = towards(start, stop, edge), towards(stop, start, edge)
            way = line[1][0] - line[0][0], line[1][1] - line[0][1]
            trace = LanePath((line,), ((line[1], way),))
        result.append(trace)
    return result


def _line(grid: Grid, trace: LanePath, attributes: Attributes) -> list[str]:
    radius = 0.22 * grid.pitch
    data = "".join(line_path(line, radius=radius, closed=trace.closed) for line in trace.lines)
    if not data:
        return []
    width = max(1.3, min(2.6, 0.07 * grid.pitch))
    look: Attributes = {"fill": "none", "stroke-width": width}
    return [mark("path", {**attributes, "d": data, **look})]


def _arrows(grid: Grid, trace: LanePath, name: str, colour: str) -> list[str]:
    size = _arrow_size(grid)
    heads = [
        mark("path", {"class": name, "d": arrow_head(tip, way, size)}) for tip, way in trace.arrows
    ]
    return [group(heads, {"fill": colour})] if heads else []


def _arrow_size(grid: Grid) -> float:
    return max(3.0, min(7.5, 0.19 * grid.pitch))
