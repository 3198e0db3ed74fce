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
from meshmend.schedule.hazards import Hazards, before_at, n_before
from meshmend.schedule.table import Schedule

Ints = NDArray[np.int64]

# First guesses: slice s starts this many times its busiest pair's rows after slice s - 1. Each
# guess is improved; which of them ends shortest differs from mesh to mesh by a step or two.
_HEAD_STARTS: Final = (1.0, 0.75, 1.5)
_MOST_PASSES: Final = 8
# Beyond this many rows x slices, one guess and few passes: they take some steps more, and seconds
# less.
_MANY_MESSAGES: Final = 1 << 17
_FEW_PASSES: Final = 2


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
    edges = _edges(schedule.src, schedule.dst, hazards.send, hazards.write, hazards.more)
    return graph_of(schedule.src, schedule.dst, edges)


def graph_of(src: NDArray[np.integer], dst: NDArray[np.integer], edges: Ints) -> RowGraph:
    """Return the graph of rows between these ranks; `edges` has three rows of numbers.

    They are a row that is waited for, a later row that waits, and how many steps later it may come.
    """
    n_rows = len(src)
    earlier, later, steps = edges
    before, after = _waits(later, earlier, steps, n_rows), _waits(earlier, later, steps, n_rows)
    number = src.astype(np.int64) * (int(max(src.max(initial=0), dst.max(initial=0))) + 1) + dst
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

    Deterministic. Takes time about linear in rows x slices; many rows get fewer passes.
    """
    best: Ints | None = None
    bound = graph.bound(slices)
    n_messages = slices * len(graph.pair)
    is_small = n_messages <= _MANY_MESSAGES
    for head_start in _HEAD_STARTS if slices > 1 and is_small else _HEAD_STARTS[:1]:
        delay = np.arange(slices)[:, None] * (head_start * graph.busiest)
        guess = np.rint(4 * (graph.head + delay)).astype(np.int64).reshape(-1)
        steps = _improved(graph, guess, bound, _MOST_PASSES if is_small else _FEW_PASSES)
        if best is None or steps.max(initial=-1) < best.max(initial=-1):
            best = steps
        if best.max(initial=-1) < bound:
            break
    assert best is not None, "there is a first guess"
    return best.reshape(slices, -1) if n_messages else best.reshape(slices, 0)


def _improved(graph: RowGraph, guess: Ints, bound: int, most_passes: int) -> Ints:
    n_rows = max(1, len(graph.pair))
    steps = _placed(_in_order(guess, n_rows, False), graph, graph.before)
    for _ in range(most_passes):
        last = int(steps.max(initial=-1))
        if last < bound:
            break
        late = _placed(_in_order(last - steps, n_rows, True), graph, graph.after)
        late = late.max(initial=-1) - late
        steps = _placed(_in_order(late, n_rows, False), graph, graph.before)
        if steps.max(initial=-1) == last:
            break
    return steps


def _placed(order: Ints, graph: RowGraph, waits: Waits) -> Ints:
    """Return the earliest step of each row when rows are placed in this order."""
    slices = len(order) // max(1, len(graph.pair))
    room = 2 * (graph.busiest * slices + graph.depth) + 1
    while True:
        placed: Ints | None = _place(
            order, waits.ptr, waits.rows, waits.steps, graph.pair, graph.n_pairs, room
        )
        if placed is not None:
            return placed
        room *= 2


def _waits(waiting: Ints, waited_for: Ints, steps: Ints, n_rows: int) -> Waits:
    order = np.argsort(waiting, kind="stable")
    ptr = np.searchsorted(waiting[order], np.arange(n_rows + 1))
    return Waits(ptr.astype(np.int64), waited_for[order], steps[order])


@kernel
def _edges(src, dst, send, write, more):  # type: ignore[no-untyped-def]
    """Return the waits of all rows: the row waited for, the row that waits, and the steps."""
    n_edges = 0
    for row in range(len(src)):
        n_edges += n_before(send[row], more) + n_before(write[row], more)
    edges = np.empty((3, n_edges), dtype=np.int64)
    at = 0
    for kind in range(2):
        for row in range(len(src)):
            entry = send[row] if kind == 0 else write[row]
            for which in range(n_before(entry, more)):
                earlier = before_at(entry, more, which)
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
def _in_order(keys, n_rows, last_rows_first):  # type: ignore[no-untyped-def]
    """Return the rows of all slices by rising key; of one key, smaller rows first, or larger.

    A row waits for smaller rows only, so of rows in one step those that wait come later.
    """
    counts = np.zeros((0 if len(keys) == 0 else keys.max()) + 2, dtype=np.int64)
    for message in range(len(keys)):
        counts[keys[message] + 1] += 1
    ptr = np.cumsum(counts)
    order = np.empty(len(keys), dtype=np.int64)
    for at in range(n_rows):
        row = n_rows - 1 - at if last_rows_first else at
        for message in range(row, len(keys), n_rows):
            order[ptr[keys[message]]] = message
            ptr[keys[message]] += 1
    return order


@kernel
def _place(order, ptr, rows, steps, pair, n_pairs, room):  # type: ignore[no-untyped-def]
    """Return for each row of each slice the first step that its waits and its pair allow.

    None: that takes more steps than there is room for.
    """
    n_rows = len(pair)
    busy = np.zeros((n_pairs, room), dtype=np.uint8)
    placed = np.empty(len(order), dtype=np.int64)
    for message in order:
        row = message % n_rows
        first = message - row
        step = 0
        for at in range(ptr[row], ptr[row + 1]):
            step = max(step, placed[first + rows[at]] + steps[at])
        while step < room and busy[pair[row], step]:
            step += 1
        if step >= room:
            return None
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
