"""The picture of a mesh: live, failed and stranded chips, live, slow and failed links, boards.

`mesh_panel` is the ground that every other picture of a mesh is drawn on.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

import numpy as np

from meshmend.pages.draw.grid import Grid, drawn_apart, fitting_grid
from meshmend.pages.draw.svg import (
    AMBER,
    FAILED_FILL,
    FAINT,
    LINK,
    LIVE_EDGE,
    LIVE_FILL,
    RED,
    SOFT_INK,
    STRANDED_FILL,
    Attributes,
    Key,
    Panel,
    Point,
    framed,
    group,
    label,
    line_path,
    mark,
    number,
    text_block,
)
from meshmend.topology.failures import Chip, Link, format_shape
from meshmend.topology.graph import stranded
from meshmend.topology.mesh import Mesh
from meshmend.units import counted

_WIDEST_WITH_LINKS = 40  # columns; wider meshes leave the links out


def mesh_text(mesh: Mesh, signs: Mapping[Chip, str] = MappingProxyType({})) -> str:
    """Return a drawing with one character for each chip, layer by layer for more than two axes.

    A chip that has one of `signs` is drawn so. Slow links are drawn as `~` and `:`.
    """
    sign = dict.fromkeys(mesh.live, "o") | dict.fromkeys(stranded(mesh), "?") | dict(signs)
    parts = []
    for layer in itertools.product(*map(range, mesh.shape[:-2])):
        if layer:
            parts.append(f"layer {','.join(map(str, layer))}")
        parts.extend(_layer(mesh, layer, sign))
    return "\n".join(parts)


def _layer(mesh: Mesh, layer: Chip, sign: dict[Chip, str]) -> list[str]:
    rows, cols = (1, *mesh.shape)[-2:]
    linked = cols <= _WIDEST_WITH_LINKS

    def chip(row: int, col: int) -> Chip:
        return (*layer, row, col)[-len(mesh.shape) :]

    slow = {each.link for each in mesh.slow}

    def joined(one: Chip, other: Chip, signs: str) -> str:
        if one not in mesh.rank_of or other not in mesh.neighbors(one):
            return " "
        return signs[Link(one, other) in slow]

    lines = []
    for row in range(rows):
        line, below = "", ""
        for col in range(cols):
            here = chip(row, col)
            line += sign.get(here, "x")
            below += joined(here, chip(row + 1, col), "|:") if row + 1 < rows else " "
            if linked and col + 1 < cols:
                line += joined(here, chip(row, col + 1), "-~")
                below += " "
        lines.append(line)
        if linked and row + 1 < rows:
            lines.append(below.rstrip())
    return lines


_ROUNDED_SIDE = 10.0  # below this a chip is a plain square, in fewer bytes
_LABELLED_SIDE = 18.0
MAX_DRAWN_CHIPS = 1 << 14


def mesh_svg(mesh: Mesh) -> str:
    """Return a mesh as an SVG document with one `chip` element for every chip.

    Beyond `MAX_DRAWN_CHIPS` it is described in words: no reader would see the chips, and a
    notebook would choke on them.
    """
    if mesh.n_chips > MAX_DRAWN_CHIPS:
        words = f"{_summary(mesh)}; too many to draw, at most {MAX_DRAWN_CHIPS} are"
        return framed(text_block(words, 480), title=str(mesh))
    grid = fitting_grid(mesh)
    labels = grid.side >= _LABELLED_SIDE and mesh.n_chips <= 512
    return framed(
        mesh_panel(grid, labelled=labels),
        title=str(mesh),
        keys=ground_keys(mesh),
        caption=_summary(mesh),
    )


def mesh_panel(
    grid: Grid, *, fills: Mapping[Chip, str] | None = None, labelled: bool = False
) -> Panel:
    """Return the ground: boards, links, chips and numbers; `fills` colours some live chips."""
    mesh = grid.mesh
    cut_off = frozenset(stranded(mesh))
    marks = [*_boards(grid), *_links(grid), *_slow_links(grid)]
    marks += _chips(grid, fills or {}, cut_off)
    marks += _failed_links(grid)
    if grid.numbered:
        marks += _numbers(grid)
    if labelled:
        marks += _ranks(grid)
    return Panel(*grid.size, tuple(marks))


def ground_keys(mesh: Mesh) -> list[Key]:
    """Return the legend of what failed or wraps in a mesh; empty for a full plain mesh."""
    keys = []
    if mesh.failed:
        keys.append(Key(RED, "failed chip", "cross", FAILED_FILL))
    if mesh.failed_links:
        keys.append(Key(RED, "failed link", "dash"))
    if mesh.has_slow:
        keys.append(Key(AMBER, "slow link, thinner if slower", "line"))
    if stranded(mesh):
        keys.append(Key(LIVE_EDGE, "cut off", "hatch", STRANDED_FILL))
    if any(mesh.rings):
        keys.append(Key(LINK, "wraps around", "line"))
    return keys


def _summary(mesh: Mesh) -> str:
    parts = [counted(mesh.n_live, "live chip"), counted(len(mesh.links), "live link")]
    if mesh.failed:
        parts.append(counted(len(mesh.failed), "failed chip"))
    if n_slow := int(np.count_nonzero(mesh.link_speeds < 1)):
        parts.append(counted(n_slow, "slow link"))
    if cut_off := stranded(mesh):
        parts.append(f"{len(cut_off)} cut off")
    return f"{format_shape(mesh.shape)}: " + ", ".join(parts)


def _layers(grid: Grid) -> Iterator[Chip]:
    return itertools.product(*map(range, grid.layer_shape))


def _boards(grid: Grid) -> list[str]:
    """Outline the 2x2 boards where both drawn sides are even."""
    if len(grid.mesh.shape) < 2 or grid.n_rows % 2 or grid.n_columns % 2 or grid.pitch < 14:
        return []
    inset, span = 0.06 * grid.pitch, 1.88 * grid.pitch
    data = []
    for layer in _layers(grid):
        left, top = (at - 0.5 * grid.pitch + inset for at in grid.centre((*layer, 0, 0)))
        for row, col in itertools.product(range(grid.n_rows // 2), range(grid.n_columns // 2)):
            x, y = left + 2 * col * grid.pitch, top + 2 * row * grid.pitch
            data.append(f"M{number(x)} {number(y)}h{number(span)}v{number(span)}h-{number(span)}z")
    return [mark("path", {"class": "boards", "d": "".join(data), "fill": "none", "stroke": FAINT})]


def _links(grid: Grid) -> list[str]:
    """Draw all live links as one path; a run of links along a line is one stroke."""
    mesh, data = grid.mesh, []
    first_axis = max(0, len(mesh.shape) - 2)
    ports = mesh.neighbor_ranks
    for axis in range(len(mesh.shape)):
        for rank, chip in enumerate(mesh.live):
            for port in (2 * axis, 2 * axis + 1):
                if ports[rank, port] >= 0 and drawn_apart(mesh, chip, port):
                    data.append(line_path(grid.stub(chip, port)))
            if axis >= first_axis and (run := _run(mesh, rank, axis)):
                data.append(line_path([grid.centre(chip), grid.centre(run)]))
    width = max(1.0, 0.05 * grid.pitch)
    look: Attributes = {"fill": "none", "stroke": LINK, "stroke-width": width}
    return [mark("path", {"class": "links", "d": "".join(data), **look})] if data else []


def _run(mesh: Mesh, rank: int, axis: int) -> Chip | None:
    """Return where the run of drawn links that starts at this rank ends, if one starts here."""
    ports, chip = mesh.neighbor_ranks, mesh.live[rank]
    if ports[rank, 2 * axis] >= 0 and not drawn_apart(mesh, chip, 2 * axis):
        return None
    end = rank
    while (after := ports[end, 2 * axis + 1]) >= 0 and not drawn_apart(
        mesh, mesh.live[end], 2 * axis + 1
    ):
        end = int(after)
    return mesh.live[end] if end != rank else None


def _slow_links(grid: Grid) -> list[str]:
    """Draw each slow link, the thinner the slower, with its speed as a tooltip."""
    mesh, marks = grid.mesh, []
    for link, speed in zip(mesh.live_links(), mesh.link_speeds.tolist(), strict=True):
        if speed == 1:
            continue
        data = "".join(line_path(part) for part in _link_lines(grid, link))
        width = max(1.0, (0.03 + 0.15 * speed) * grid.pitch)
        look: Attributes = {"fill": "none", "stroke": AMBER, "stroke-width": width}
        name = mark("title", {}, f"{link}: {speed:.3g} of the bandwidth")
        marks.append(group([name, mark("path", {"class": "link slow", "d": data, **look})], {}))
    return marks


def _failed_links(grid: Grid) -> list[str]:
    marks = []
    width = max(1.4, 0.06 * grid.pitch)
    for link in sorted(grid.mesh.failed_links):
        data = "".join(line_path(part) for part in _link_lines(grid, link))
        dash = f"{number(0.1 * grid.pitch)} {number(0.08 * grid.pitch)}"
        look: Attributes = {"stroke": RED, "stroke-width": width, "stroke-dasharray": dash}
        marks.append(mark("path", {"class": "link failed", "d": data, "fill": "none", **look}))
    return marks


def _link_lines(grid: Grid, link: Link) -> list[tuple[Point, Point]]:
    """Return the line of a link between the sides of its chips, or its two stubs."""
    axis = next(a for a in range(len(link.first)) if link.first[a] != link.second[a])
    over_border = link.second[axis] - link.first[axis] != 1
    port = 2 * axis + (0 if over_border else 1)
    if drawn_apart(grid.mesh, link.first, port):
        return [grid.stub(link.first, port), grid.stub(link.second, port ^ 1)]
    x, y = grid.centre(link.first)
    dx, dy = grid.heading(link.first, port)
    near, far = 0.5 * grid.side, grid.pitch - 0.5 * grid.side
    return [((x + dx * near, y + dy * near), (x + dx * far, y + dy * far))]


def _chips(grid: Grid, fills: Mapping[Chip, str], cut_off: Collection[Chip]) -> list[str]:
    marks, hatch, crosses = [], [], []
    for chip in itertools.product(*map(range, grid.mesh.shape)):
        x, y = grid.centre(chip)
        if chip in grid.mesh.failed:
            marks.append(
                _square(grid, (x, y), {"class": "chip failed", "fill": FAILED_FILL, "stroke": RED})
            )
            crosses.append(_cross((x, y), 0.3 * grid.side))
        elif chip in cut_off:
            marks.append(_square(grid, (x, y), {"class": "chip live", "fill": STRANDED_FILL}))
            hatch.append(_hatching((x, y), grid.side))
        else:
            own: Attributes = {"fill": fills[chip]} if chip in fills else {}
            marks.append(_square(grid, (x, y), {"class": "chip live", **own}))
    edge = max(0.5, min(1.2, 0.03 * grid.pitch))
    look: Attributes = {"fill": LIVE_FILL, "stroke": LIVE_EDGE, "stroke-width": edge}
    result = [group(marks, look)]
    for name, data, colour in (("hatch", hatch, LIVE_EDGE), ("crosses", crosses, RED)):
        if data:
            thick = max(1.0, (0.05 if name == "crosses" else 0.02) * grid.pitch)
            lines: Attributes = {"stroke": colour, "stroke-width": thick, "fill": "none"}
            result.append(mark("path", {"class": name, "d": "".join(data), **lines}))
    return result


def _square(grid: Grid, centre: Point, attributes: Attributes) -> str:
    side = grid.side
    x, y = centre[0] - side / 2, centre[1] - side / 2
    if side < _ROUNDED_SIDE:
        data = f"M{number(x)} {number(y)}h{number(side)}v{number(side)}h-{number(side)}z"
        return mark("path", {**attributes, "d": data})
    place: Attributes = {"x": x, "y": y, "width": side, "height": side, "rx": 0.16 * side}
    return mark("rect", {**attributes, **place})


def _cross(centre: Point, reach: float) -> str:
    (x, y), r = centre, reach
    return line_path([(x - r, y - r), (x + r, y + r)]) + line_path([(x - r, y + r), (x + r, y - r)])


def _hatching(centre: Point, side: float) -> str:
    """Return path data of three slanted lines inside a square."""
    x, y = centre[0] - side / 2, centre[1] - side / 2
    return "".join(
        line_path(
            [(x + max(0, s - side), y + min(s, side)), (x + min(s, side), y + max(0, s - side))]
        )
        for s in (0.5 * side, side, 1.5 * side)
    )


def _numbers(grid: Grid) -> list[str]:
    """Number the columns above and the rows beside each layer, as many as there is room for."""
    size, marks = grid.number_size, []
    left, top = grid.margin[0] - grid.border, grid.margin[1] - grid.border
    room = max(1.4 * size, 0.62 * size * len(str(max(grid.n_columns, grid.n_rows))) + 3)
    stride = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 1 << 20) if s * grid.pitch >= room)
    tail = len(grid.mesh.shape) > 1
    for layer in _layers(grid):
        x, y = grid.layer_origin(layer)
        for col in range(0, grid.n_columns, stride):
            at = grid.centre((*layer, 0, col) if tail else (col,))[0], y + top - 0.6 * size
            marks.append(label(at, str(col), size=size, anchor="middle", colour=SOFT_INK))
        for row in range(0, grid.n_rows if tail else 0, stride):
            at = x + left - 2, grid.centre((*layer, row, 0))[1]
            marks.append(label(at, str(row), size=size, anchor="end", colour=SOFT_INK))
        if layer:
            name = f"({', '.join(map(str, layer))}, ·, ·)"
            marks.append(label((x + grid.margin[0], y + 7), name, size=11))
    return marks


def _ranks(grid: Grid) -> list[str]:
    size = min(11.0, 0.42 * grid.side)
    return [
        label(grid.centre(chip), str(rank), size=size, anchor="middle", colour=SOFT_INK)
        for rank, chip in enumerate(grid.mesh.live)
    ]
