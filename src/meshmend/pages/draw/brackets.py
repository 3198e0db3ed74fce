"""Hops past other chips on their line, drawn as brackets outside the chips.

A bracket leaves the side of one chip, runs along a **lane** in the gap between two lines of
chips, and enters the side of the other. Brackets of one line never lie on each other.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from meshmend.pages.draw.grid import Grid, Reach, reach
from meshmend.pages.draw.svg import Point
from meshmend.topology.failures import Chip

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
