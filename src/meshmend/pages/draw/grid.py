"""Where things lie in the picture of a mesh: chips, layers, links, and the paths over them.

The last axis runs to the right, the one before it downwards; every choice of the axes before
those is a layer of its own, drawn side by side. Where several paths use one link, or one path uses
both its directions, each gets a **lane**: an offset to the side, so that traffic keeps to the
right. A hop past other chips on their line is a **bracket** in the gap between two lines of chips.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from meshmend.pages.draw.svg import Point, towards
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh

_LAYER_GAP = 14.0
_LAYER_LABEL = 16.0
_ROW_WIDTH = 900.0  # a row of layers is filled up to this before the next begins


class Reach(Enum):
    """How a hop between two chips lies in the picture."""

    NEAR = "neighbours on a line"
    WRAP = "neighbours over the border"
    LAYER = "neighbours in different layers"
    SKIP = "on a line, past other chips"
    FAR = "anything else"


@dataclass(frozen=True)
class Grid:
    """The places of a mesh's chips when neighbours are `pitch` apart.

    `fill` is a chip's side over the pitch; `numbered` leaves room for row and column numbers.
    """

    mesh: Mesh
    pitch: float
    fill: float = 0.6
    numbered: bool = True

    @property
    def side(self) -> float:
        """The side of a chip's square."""
        return self.pitch * self.fill

    @property
    def n_rows(self) -> int:
        """Rows of one layer; a 1-D mesh is one row."""
        return self.mesh.shape[-2] if len(self.mesh.shape) > 1 else 1

    @property
    def n_columns(self) -> int:
        """Columns of one layer."""
        return self.mesh.shape[-1]

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The axes that number the layers; empty for one and two axes."""
        return self.mesh.shape[:-2]

    @property
    def n_layers(self) -> int:
        """How many layers are drawn side by side."""
        return math.prod(self.layer_shape)

    @property
    def border(self) -> float:
        """Room around the cells of a layer, for the stubs of wrap links."""
        return 0.3 * self.pitch if any(self.mesh.wrap) else 0.05 * self.pitch

    @property
    def number_size(self) -> float:
        """The font size of row and column numbers."""
        return min(11.0, max(8.0, 0.36 * self.pitch))

    @property
    def margin(self) -> Point:
        """Room left of and above a layer's cells, for numbers and the layer's name."""
        if not self.numbered:
            return self.border, self.border
        digits = len(str(self.n_rows - 1))
        left = 4 + 0.6 * self.number_size * digits if len(self.mesh.shape) > 1 else 0.0
        name = _LAYER_LABEL if self.layer_shape else 0.0
        return left + self.border, 1.3 * self.number_size + name + self.border

    @property
    def layer_size(self) -> Point:
        """The width and height of one layer with its numbers."""
        left, top = self.margin
        width = left + self.n_columns * self.pitch + self.border
        return width, top + self.n_rows * self.pitch + self.border

    @property
    def layers_per_row(self) -> int:
        """How many layers stand side by side: the last layer axis, or rows of equal length."""
        if len(self.layer_shape) > 1:
            return self.layer_shape[-1]
        width, height = self.layer_size
        square = round(math.sqrt(1.8 * self.n_layers * height / width))
        n_most = max(1, square, int(_ROW_WIDTH / (width + _LAYER_GAP)))
        n_rows = math.ceil(self.n_layers / n_most)
        return math.ceil(self.n_layers / n_rows)

    @property
    def size(self) -> Point:
        """The width and height of the whole picture."""
        width, height = self.layer_size
        across = self.layers_per_row
        down = math.ceil(self.n_layers / across)
        return across * (width + _LAYER_GAP) - _LAYER_GAP, down * (height + _LAYER_GAP) - _LAYER_GAP

    def layer_origin(self, layer: tuple[int, ...]) -> Point:
        """Return the upper left corner of a layer's box, its numbers included."""
        number = 0
        for at, size in zip(layer, self.layer_shape, strict=True):
            number = number * size + at
        down, across = divmod(number, self.layers_per_row)
        width, height = self.layer_size
        return across * (width + _LAYER_GAP), down * (height + _LAYER_GAP)

    def centre(self, chip: Chip) -> Point:
        """Return the middle of a chip."""
        left, top = self.layer_origin(chip[:-2])
        row = chip[-2] if len(chip) > 1 else 0
        return (
            left + self.margin[0] + (chip[-1] + 0.5) * self.pitch,
            top + self.margin[1] + (row + 0.5) * self.pitch,
        )

    def heading(self, chip: Chip, port: int) -> Point:
        """Return the unit vector in which a link leaves a chip; between layers it is slanted."""
        up = 1.0 if port % 2 else -1.0
        axis = port // 2 - len(self.mesh.shape)
        if axis == -1:
            return up, 0.0
        if axis == -2:
            return 0.0, up
        return (0.7 * up, -0.7 * up) if axis % 2 else (-0.7 * up, -0.7 * up)

    def stub(self, chip: Chip, port: int) -> tuple[Point, Point]:
        """Return the two ends of the short line that stands for a link that cannot be drawn."""
        x, y = self.centre(chip)
        dx, dy = self.heading(chip, port)
        # A slanted stub starts at the corner of the chip and stays between it and its neighbours.
        far = 0.5 * self.pitch + self.border if 0.0 in (dx, dy) else 0.62 * self.pitch
        near = 0.5 * self.side if 0.0 in (dx, dy) else 0.66 * self.side
        return (x + dx * near, y + dy * near), (x + dx * far, y + dy * far)


def drawn_apart(mesh: Mesh, chip: Chip, port: int) -> bool:
    """Whether the link behind a port leads over the border or to another layer."""
    axis, up = divmod(port, 2)
    if axis < len(mesh.shape) - 2:
        return True
    return chip[axis] == (mesh.shape[axis] - 1 if up else 0)


def reach(mesh: Mesh, source: Chip, target: Chip) -> tuple[Reach, int]:
    """Return how a hop lies in the picture, and the port by which it leaves its source."""
    apart = [axis for axis in range(len(mesh.shape)) if source[axis] != target[axis]]
    if len(apart) != 1:
        return Reach.FAR, 0
    (axis,) = apart
    step, size = target[axis] - source[axis], mesh.shape[axis]
    over_border = mesh.rings[axis] and abs(step) == size - 1
    port = 2 * axis + int((step > 0) != over_border)
    if abs(step) != 1 and not over_border:
        return (Reach.SKIP if axis >= len(mesh.shape) - 2 else Reach.FAR), port
    if axis < len(mesh.shape) - 2:
        return Reach.LAYER, port
    return (Reach.WRAP if over_border else Reach.NEAR), port


def fitting_grid(mesh: Mesh, *, fill: float = 0.6, roomy: bool = False) -> Grid:
    """Return a grid whose cells shrink as the mesh grows, from 44 (or 60) down to 10."""
    longest = max(mesh.shape[-2:])
    n_layers = math.prod(mesh.shape[:-2])
    widest = 60.0 if roomy else 44.0
    room = 720.0 if n_layers == 1 else 420.0
    pitch = min(widest, max(10.0, room / max(longest, 1)))
    return Grid(mesh, round(pitch), fill)


Hop = tuple[Chip, Chip]
HopKey = tuple[int, int]  # the path's number, the hop's number within it


def brackets(grid: Grid, paths: Sequence[Sequence[Hop]]) -> dict[HopKey, tuple[Point, ...]]:
    """Return the lines of all hops past other chips, in lanes that do not overlap."""
    by_line: dict[tuple[int, Chip], list[tuple[int, bool, int, int, int]]] = defaultdict(list)
    for number, own in enumerate(paths):
        for at, (source, target) in enumerate(own):
            kind, port = reach(grid.mesh, source, target)
            if kind is Reach.SKIP:
                axis = port // 2
                low, high = sorted((source[axis], target[axis]))
                line = (*source[:axis], *source[axis + 1 :])
                ahead = source[axis] < target[axis]
                by_line[axis, line].append((number, ahead, low, high, at))
    slots: dict[HopKey, tuple[int, int]] = {}  # (side, lane)
    for own_hops in by_line.values():
        slots |= _bracket_slots(own_hops)
    n_lanes = 1 + max((lane for _, lane in slots.values()), default=0)
    return {
        key: _bracket(grid, paths[key[0]][key[1]], side, (lane, n_lanes))
        for key, (side, lane) in slots.items()
    }


def _bracket_slots(
    hops: Iterable[tuple[int, bool, int, int, int]],
) -> dict[HopKey, tuple[int, int]]:
    """Give each hop of a line a side and the first lane there that is free for its whole length.

    A single path keeps its two directions on two sides; several paths take a side each.
    """
    ordered = sorted(hops, key=lambda hop: (hop[0], not hop[1], hop[2]))
    numbers = sorted({hop[0] for hop in ordered})
    taken: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    slots = {}
    for number, ahead, low, high, at in ordered:
        side = int(ahead) if len(numbers) == 1 else numbers.index(number) % 2
        lane = 0
        while any(a < high and low < b for a, b in taken[side, lane]):
            lane += 1
        taken[side, lane].append((low, high))
        slots[number, at] = (1 if side else -1, lane)
    return slots


def _bracket(grid: Grid, hop: Hop, side: int, lanes: tuple[int, int]) -> tuple[Point, ...]:
    """Return the line from the side of one chip, along its lane, to the side of the other."""
    lane, n_lanes = lanes
    edge = 0.5 * grid.side
    out = edge + (0.5 * grid.pitch - edge) * (lane + 1) / (n_lanes + 0.6)
    # The farther the lane, the nearer to the middle it meets the chip: so lanes do not cross.
    inset = 0.36 * grid.side * (n_lanes - lane) / n_lanes
    (ax, ay), (bx, by) = (grid.centre(chip) for chip in hop)
    if ay == by:
        inset, up = (inset if bx > ax else -inset), -side
        return (
            (ax + inset, ay + up * edge),
            (ax + inset, ay + up * out),
            (bx - inset, by + up * out),
            (bx - inset, by + up * edge),
        )
    inset = inset if by > ay else -inset
    return (
        (ax + side * edge, ay + inset),
        (ax + side * out, ay + inset),
        (bx + side * out, by - inset),
        (bx + side * edge, by - inset),
    )


@dataclass(frozen=True)
class LanePath:
    """One path as drawn: polylines, and for each hop the tip and direction of its arrow."""

    lines: tuple[tuple[Point, ...], ...]
    arrows: tuple[tuple[Point, Point], ...]
    closed: bool = False


@dataclass(frozen=True)
class _Stretch:
    """A hop over one link, shifted into its lane; `axis` is 0 when it runs across, 1 when down."""

    start: Point
    stop: Point
    axis: int


def traces(grid: Grid, paths: Sequence[Sequence[Chip]], *, closed: bool = False) -> list[LanePath]:
    """Return one trace per path of chips; closed paths return from their last chip to the first.

    Paths over single links run through their chips in one line; a path with a hop past other
    chips is drawn hop by hop, from the side of one chip to the side of the next.
    """
    hops = [_hops(path, closed) for path in paths]
    stretches = _lanes(grid, hops)
    detours = brackets(grid, hops)
    result = []
    for number, own in enumerate(hops):
        kinds = {reach(grid.mesh, *hop)[0] for hop in own}
        if kinds & {Reach.SKIP, Reach.FAR}:
            result.append(_hop_by_hop(grid, number, own, stretches, detours))
        else:
            result.append(_flowing(grid, number, own, stretches, closed))
    return result


def _hops(path: Sequence[Chip], closed: bool) -> list[Hop]:
    around = [*path, path[0]] if closed and len(path) > 1 else path
    return list(pairwise(around))


def _lanes(grid: Grid, paths: Sequence[Sequence[Hop]]) -> dict[HopKey, _Stretch]:
    """Give every hop over a single drawn link its own lane of that link."""
    users: dict[Hop, list[tuple[bool, int, int]]] = defaultdict(list)
    for number, own in enumerate(paths):
        for at, (source, target) in enumerate(own):
            if reach(grid.mesh, source, target)[0] is Reach.NEAR:
                link = min(source, target), max(source, target)
                users[link].append((source < target, number, at))
    stretches = {}
    for (low, high), own_users in users.items():
        spacing = min(0.17 * grid.pitch, 0.8 * grid.side / len(own_users))
        axis = 0 if low[-1] != high[-1] else 1
        for slot, (ahead, number, at) in enumerate(sorted(own_users)):
            offset = (slot - (len(own_users) - 1) / 2) * spacing
            # To the right of the way: below a line that runs right, left of one that runs down.
            shift = (0.0, offset) if axis == 0 else (-offset, 0.0)
            ends = [_plus(grid.centre(chip), shift) for chip in (low, high)]
            start, stop = ends if ahead else reversed(ends)
            stretches[number, at] = _Stretch(start, stop, axis)
    return stretches


def _flowing(
    grid: Grid,
    number: int,
    hops: Sequence[Hop],
    stretches: dict[HopKey, _Stretch],
    closed: bool,
) -> LanePath:
    lines: list[tuple[Point, ...]] = []
    arrows: list[tuple[Point, Point]] = []
    run: list[_Stretch] = []
    for at, (source, target) in enumerate(hops):
        stretch = stretches.get((number, at))
        if stretch is not None:
            run.append(stretch)
            arrows.append(_arrow(stretch.start, stretch.stop, 0.09 * grid.pitch))
            continue
        lines += _joined(grid, run)
        run = []
        out, into = _stubs(grid, source, target)
        lines += [out, into]
        arrows.append((out[1], _minus(out[1], out[0])))
    whole = closed and not lines and len(run) > 1
    lines += _joined(grid, run, closed=whole)
    return LanePath(tuple(lines), tuple(arrows), closed=whole)


def _joined(
    grid: Grid, run: Sequence[_Stretch], *, closed: bool = False
) -> list[tuple[Point, ...]]:
    """Return the stretches as one polyline, with the corners where one lane meets the next."""
    if not run:
        return []
    points = [] if closed else [run[0].start]
    joints = [*pairwise(run)] + ([(run[-1], run[0])] if closed else [])
    for before, after in joints:
        points += _joint(grid, before, after)
    if not closed:
        points.append(run[-1].stop)
    return [tuple(points)]


def _joint(grid: Grid, before: _Stretch, after: _Stretch) -> list[Point]:
    if before.axis != after.axis:
        across, down = (before, after) if before.axis == 0 else (after, before)
        return [(down.start[0], across.start[1])]
    reach_on = 0.14 * grid.pitch
    if _same_way(before, after):
        if before.stop == after.start:
            return []
        return [
            towards(before.stop, before.start, reach_on),
            towards(after.start, after.stop, reach_on),
        ]
    return [
        towards(before.stop, before.start, -reach_on),
        towards(after.start, after.stop, -reach_on),
    ]


def _same_way(one: _Stretch, other: _Stretch) -> bool:
    (ax, ay), (bx, by) = _minus(one.stop, one.start), _minus(other.stop, other.start)
    return ax * bx + ay * by > 0


def _stubs(grid: Grid, source: Chip, target: Chip) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Return a hop over the border or to another layer as a line out and a line in."""
    _, port = reach(grid.mesh, source, target)
    out, into = grid.stub(source, port)[1], grid.stub(target, port ^ 1)[1]
    return (grid.centre(source), out), (into, grid.centre(target))


def _hop_by_hop(
    grid: Grid,
    number: int,
    hops: Sequence[Hop],
    stretches: dict[HopKey, _Stretch],
    detours: dict[HopKey, tuple[Point, ...]],
) -> LanePath:
    lines: list[tuple[Point, ...]] = []
    arrows = []
    for at, (source, target) in enumerate(hops):
        kind = reach(grid.mesh, source, target)[0]
        if (number, at) in detours:
            line = detours[number, at]
        elif kind in {Reach.WRAP, Reach.LAYER}:
            out, line = _stubs(grid, source, target)
            lines.append(out)
        else:
            stretch = stretches.get((number, at))
            start, stop = (
                (stretch.start, stretch.stop)
                if stretch
                else (grid.centre(source), grid.centre(target))
            )
            edge = 0.5 * grid.side if stretch else 0.55 * grid.side
            line = (towards(start, stop, edge), towards(stop, start, edge))
        lines.append(line)
        arrows.append((line[-1], _minus(line[-1], line[-2])))
    return LanePath(tuple(lines), tuple(arrows))


def _arrow(start: Point, stop: Point, ahead: float) -> tuple[Point, Point]:
    """Return the tip and direction of an arrow in the middle, pushed ahead a little."""
    dx, dy = _minus(stop, start)
    middle = start[0] + 0.5 * dx, start[1] + 0.5 * dy
    return towards(middle, stop, ahead), (dx, dy)


def _plus(one: Point, other: Point) -> Point:
    return one[0] + other[0], one[1] + other[1]


def _minus(one: Point, other: Point) -> Point:
    return one[0] - other[0], one[1] - other[1]
