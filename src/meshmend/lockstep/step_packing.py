"""Packs rows into steps: all ranks step together, and a pair moves one row of one slice a step.

A step's sends read what was there when it began, and its writes come after all its sends. So a row
that sends what another wrote comes a step later; a row that overwrites what another sends may share
its step.

The method is forward-backward improvement, as for projects with scarce resources (Li and Willis
1992): place rows as early as possible in order of a first guess, then as late as possible in order
of where they ended, then as early as possible again. No pass makes the packing longer.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel
from meshmend.schedule.hazards import MANY, NONE, Hazards
from meshmend.schedule.table import Schedule

Ints = NDArray[np.int64]

# First guesses: slice s starts this many times its busiest pair's rows after slice s - 1. Each
# guess is improved; which of them ends shortest differs from mesh to mesh by a step or two.
_HEAD_STARTS: Final = (1.0, 0.75, 1.5)
_MOST_PASSES: Final = 8


@dataclass(frozen=True, eq=False)
class Waits:
    """For each row the rows that it waits for, and how many steps later it may come.

    Row r waits for `rows[ptr[r]:ptr[r + 1]]`: `steps` is 1 after a write, and 0 after a read.
    """

    ptr: Ints
    rows: Ints
    steps: Ints


@dataclass(frozen=True, eq=False)
class RowGraph:
    """What bounds the steps of a schedule: waits in both directions, and each row's pair."""

    before: Waits
    after: Waits
    pair: Ints
    n_pairs: int
    head: Ints  # steps before a row, at least
    tail: Ints  # steps after a row, at least

    @property
    def depth(self) -> int:
        """The longest chain of rows that wait for each other."""
        return int((self.head + self.tail + 1).max(initial=0))

    @property
    def busiest(self) -> int:
        """How many rows the busiest pair moves in one slice."""
        return int(np.bincount(self.pair, minlength=1).max()) if len(self.pair) else 0

    def bound(self, slices: int) -> int:
        """Return a number of steps that no order beats: the worst pair's on its own.

        A pair moves its rows one a step, no row before its head, and after each its tail follows.
        Jackson's rule, the longest tail first, is best for one pair.
        """
        return int(_jackson(self.pair, self.n_pairs, self.head, self.tail, slices))


def row_graph(schedule: Schedule, hazards: Hazards) -> RowGraph:
    """Return the waits between the rows of a schedule, for steps."""
    n_rows = schedule.n_rows
    edges = _edges(schedule.src, schedule.dst, hazards.send, hazards.write, hazards.more)
    earlier, later, steps = edges
    before, after = _waits(later, earlier, steps, n_rows), _waits(earlier, later, steps, n_rows)
    number = schedule.src.astype(np.int64) * schedule.n_ranks + schedule.dst
    names, pair = np.unique(number, return_inverse=True)
    order = np.arange(n_rows)
    return RowGraph(
        before=before,
        after=after,
        pair=pair.astype(np.int64),
        n_pairs=len(names),
        head=_chain(order, before.ptr, before.rows, before.steps),
        tail=_chain(order[::-1], after.ptr, after.rows, after.steps),
    )


def packed_steps(graph: RowGraph, slices: int) -> Ints:
    """Return the step of each row of each slice, as an array (slices, rows); few steps in all.

    Deterministic. Takes time about linear in rows x slices.
    """
    n_rows = len(graph.pair)
    best: Ints | None = None
    bound = graph.bound(slices)
    for head_start in _HEAD_STARTS if slices > 1 else _HEAD_STARTS[:1]:
        delay = np.arange(slices)[:, None] * (head_start * graph.busiest)
        steps = _improved(graph, (graph.head + delay).reshape(-1), slices, bound)
        if best is None or steps.max(initial=-1) < best.max(initial=-1):
            best = steps
        if best.max(initial=-1) < bound:
            break
    assert best is not None, "there is a first guess"
    return best.reshape(slices, n_rows)


def _improved(graph: RowGraph, guess: NDArray[np.float64], slices: int, bound: int) -> Ints:
    row = np.tile(np.arange(len(graph.pair)), slices)
    steps = _placed(np.lexsort((row, guess)), graph, graph.before, slices)
    for _ in range(_MOST_PASSES):
        last = int(steps.max(initial=-1))
        if last < bound:
            break
        late = _placed(np.lexsort((-row, -steps)), graph, graph.after, slices)
        late = late.max(initial=-1) - late
        steps = _placed(np.lexsort((row, late)), graph, graph.before, slices)
        if steps.max(initial=-1) == last:
            break
    return steps


def _placed(order: Ints, graph: RowGraph, waits: Waits, slices: int) -> Ints:
    """Return the earliest step of each row when rows are placed in this order."""
    most = graph.busiest * slices + graph.depth
    placed: Ints = _place(
        order, waits.ptr, waits.rows, waits.steps, graph.pair, graph.n_pairs, 4 * most + 1
    )
    return placed


def _waits(waiting: Ints, waited_for: Ints, steps: Ints, n_rows: int) -> Waits:
    order = np.argsort(waiting, kind="stable")
    ptr = np.searchsorted(waiting[order], np.arange(n_rows + 1))
    return Waits(ptr.astype(np.int64), waited_for[order], steps[order])


@kernel
def _edges(src, dst, send, write, more):  # type: ignore[no-untyped-def]
    """Return the waits of all rows: the row waited for, the row that waits, and the steps."""
    n_edges = np.int64(0)
    for kind in range(2):
        for row in range(len(src)):
            entry = send[row] if kind == 0 else write[row]
            if entry != NONE:
                n_edges += np.int64(1) if entry < MANY else np.int64(more[entry - MANY])
    edges = np.empty((3, n_edges), dtype=np.int64)
    at = 0
    for kind in range(2):
        for row in range(len(src)):
            entry = send[row] if kind == 0 else write[row]
            if entry == NONE:
                continue
            count = np.int64(1) if entry < MANY else np.int64(more[entry - MANY])
            for which in range(count):
                earlier = (
                    np.int64(entry) if entry < MANY else np.int64(more[entry - MANY + 1 + which])
                )
                edges[0, at] = earlier
                edges[1, at] = row
                edges[2, at] = 0 if kind == 1 and src[earlier] == dst[row] else 1
                at += 1
    return edges


@kernel
def _chain(order, ptr, rows, steps):  # type: ignore[no-untyped-def]
    """Return the longest chain of steps that leads to each row."""
    length = np.zeros(len(order), dtype=np.int64)
    for row in order:
        for at in range(ptr[row], ptr[row + 1]):
            length[row] = max(length[row], length[rows[at]] + steps[at])
    return length


@kernel
def _place(order, ptr, rows, steps, pair, n_pairs, horizon):  # type: ignore[no-untyped-def]
    """Return for each row of each slice the first step that its waits and its pair allow."""
    n_rows = len(pair)
    busy = np.zeros((n_pairs, horizon), dtype=np.uint8)
    placed = np.empty(len(order), dtype=np.int64)
    for message in order:
        row = message % n_rows
        first = message - row
        step = 0
        for at in range(ptr[row], ptr[row + 1]):
            step = max(step, placed[first + rows[at]] + steps[at])
        while busy[pair[row], step]:
            step += 1
        busy[pair[row], step] = 1
        placed[message] = step
    return placed


@kernel
def _jackson(pair, n_pairs, head, tail, slices):  # type: ignore[no-untyped-def]
    """Return the most steps that any one pair needs for its rows of all slices."""
    most = 0
    counts = np.zeros(n_pairs + 1, dtype=np.int64)
    for row in range(len(pair)):
        counts[pair[row] + 1] += 1
    ptr = np.cumsum(counts)
    fill = ptr.copy()
    listed = np.empty(len(pair), dtype=np.int64)
    for row in range(len(pair)):
        listed[fill[pair[row]]] = row
        fill[pair[row]] += 1
    for which in range(n_pairs):
        own = listed[ptr[which] : ptr[which + 1]]
        left = np.full(len(own), slices)
        n_left = slices * len(own)
        step = np.int64(0)
        while n_left:
            chosen, first = -1, np.int64(1 << 60)
            for at in range(len(own)):
                if left[at] == 0:
                    continue
                first = min(first, head[own[at]])
                if head[own[at]] <= step and (chosen < 0 or tail[own[at]] > tail[own[chosen]]):
                    chosen = at
            if chosen < 0:
                step = first
                continue
            left[chosen] -= 1
            n_left -= 1
            step += 1
            most = max(most, step + tail[own[chosen]])
    return most
