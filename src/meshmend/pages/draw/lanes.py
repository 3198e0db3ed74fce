"""Paths over a mesh as lines that do not lie on each other.

Where several paths use one link, or one path uses both its directions, each gets a **lane**: an
offset to the side, so that traffic keeps to the right.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshmend.pages.draw.brackets import Hop, HopKey, brackets
from meshmend.pages.draw.grid import Grid, Reach, reach
from meshmend.pages.draw.svg import Point, towards
from meshmend.topology.failures import Chip


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
            arrows.append(_arrow(stretch.start, stretch.stop, 0.5, 0.09 * grid.pitch))
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


def _arrow(start: Point, stop: Point, share: float, ahead: float) -> tuple[Point, Point]:
    """Return the tip and direction of an arrow a share of the way along, pushed ahead a little."""
    dx, dy = _minus(stop, start)
    middle = start[0] + share * dx, start[1] + share * dy
    return towards(middle, stop, ahead), (dx, dy)


def _plus(one: Point, other: Point) -> Point:
    return one[0] + other[0], one[1] + other[1]


def _minus(one: Point, other: Point) -> Point:
    return one[0] - other[0], one[1] - other[1]
