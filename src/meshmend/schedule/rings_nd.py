"""Sums along one axis after another, on meshes and tori of any axes: `rings-nd` and `exchange`.

**`rings-nd`.** The payload has one part for each axis. A part is reduce-scattered along its axis,
then along the others, and all-gathered the same way back. The parts start with different axes, so
that all links are busy at once. Along an axis each position of a line owns a share. The sum of a
share comes to its owner from both sides at once, so it takes half as many hops as a ring that runs
one way. On a ring of even length the chip opposite to the owner sends half of the share each way.

Holes: a line with a failed chip hands its partial sums, just before the hole, to a neighbouring
line along an axis that is summed later (`trees/axis_ways.py`). They meet again in a later phase,
so nothing has to come back. Along the last axis a message goes around the hole. Failed chips own
nothing. It works on every connected mesh; with holes `trees` are faster.

**`exchange`.** Along one axis after another every chip gets the others' sums and adds. A row that
adds into the payload cannot take part in an exchange: whoever is sent to first no longer has its
own sum. So sums travel in scratch buffers, both ways at once, and each chip adds them up in the
same order, so that all have the same bits. A ring of n chips takes n / 2 hops, where a tree takes
n: up and down. But each chip gets the whole sum of each other, so this suits short payloads.
`exchange-1` and `exchange-2` first reduce-scatter along 1 or 2 axes, as `rings-nd` does, exchange
what is left along the others, and all-gather the way back: fewer bytes, more hops.

Holes: a sum goes to every chip of its **slab**, the chips that have the same coordinates along all
axes to come. It starts from all chips of the slab that hold it and takes shortest ways, around
holes by the neighbouring lines. Where lines hold different sums, a message goes around a hole.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import UnsupportedError
from meshmend.schedule.ring_builders import NamedRows, halves
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, cuts_of, schedule_of
from meshmend.topology.mesh import Mesh
from meshmend.trees.axis_ways import Heading, Ranks, Spreading, spreading

MOST_BUFFERS = 255  # a row names its buffers in one byte

# Hybrids are for longer payloads, for which jumps around holes crowd the links of other lines. On
# 16x16 less 4x2 at 1 MB a cost of 1, 1.25, 1.5, 1.75 and no jumps take 39.2, 39.1, 36.7, 38.8 and
# 37.4 us. For short payloads hops alone count.
_JUMP_COST = 1.5

_Cell = TypeVar("_Cell", np.bool_, np.int32)
_Moves = tuple[Ranks, Ranks]  # sources and destinations of rows that move the source's share


def rings_nd(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the schedule for a connected mesh; every rank owns an equal chunk or two of each part.

    It has about chips x sum of sides x axes rows in either half.
    """
    return _in_phases("rings-nd", mesh, collective, len(axis_orders(mesh)))


def part_weights(mesh: Mesh) -> NDArray[np.float64]:
    """Return the share of each part, for which the links of all axes carry alike on a full mesh.

    A part has none if the others alone load the links of its axis more than all other links.
    """
    loads = axis_loads(mesh)
    weights, used = np.zeros(len(loads)), np.arange(len(loads))
    while weights.sum() == 0:
        solved = np.linalg.solve(loads[np.ix_(used, used)], np.ones(len(used)))
        if solved.min() >= 0:
            weights[used] = solved / solved.sum()
        used = np.delete(used, np.argmin(solved))
    return weights


def axis_loads(mesh: Mesh) -> NDArray[np.float64]:
    """Return what a channel of each axis (rows) carries of each part (columns), in both halves."""
    orders = axis_orders(mesh)
    loads = np.zeros((len(orders), len(orders)))
    for part, order in enumerate(orders):
        left = 1.0
        for axis in order:
            size = mesh.shape[axis]
            loads[orders[0].index(axis), part] = left * (1 - 1 / size if mesh.rings[axis] else 1)
            left /= size
    return loads


def axis_orders(mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the axes in the order of each part: its own, then the others, short ones first.

    With equal sides the parts go around in turn, so that no two use an axis at the same time. On
    unequal sides short axes first took 10 % less time (16x20x28). An axis of one chip has nothing
    to sum.
    """
    axes = tuple(axis for axis, size in enumerate(mesh.shape) if size > 1) or (0,)
    turned = [axes[first:] + axes[:first] for first in range(len(axes))]
    return [(own, *sorted(rest, key=lambda axis: mesh.shape[axis])) for own, *rest in turned]


def _chunks_per_rank(mesh: Mesh) -> int:
    """Return 2 where a share is halved, on rings of even length, else 1."""
    sizes = zip(mesh.shape, mesh.rings, strict=True)
    return 2 if any(on_ring and size % 2 == 0 for size, on_ring in sizes) else 1


@dataclass(frozen=True)
class Part:
    """One part of the payload: its axes in order, and the number of its first chunk.

    It is reduce-scattered along the first `n_scattered` axes. Chunks are numbered by the
    coordinates of their owners along these, the first axis of the order first. So what a rank owns
    after each phase is one run of chunks. Ranks that differ along the other axes only own the same.
    """

    mesh: Mesh
    order: tuple[int, ...]
    first_chunk: int
    n_scattered: int

    @property
    def owners(self) -> Ranks:
        """The owner of each chunk: the first of the ranks that own it."""
        rank = np.full(self.mesh.shape, self.mesh.n_live, dtype=np.int32)
        rank[tuple(self.mesh.coordinates.T)] = np.arange(self.mesh.n_live, dtype=np.int32)
        owner = self._in_order(rank).min(axis=1)
        live = owner[owner < self.mesh.n_live]
        return np.repeat(live, _chunks_per_rank(self.mesh)).astype(np.int32)

    @property
    def _first_chunks(self) -> Ranks:
        """Where the chunks of each place begin, places numbered along the scattered axes."""
        live = np.zeros(self.mesh.shape, dtype=np.bool_)
        live[tuple(self.mesh.coordinates.T)] = True
        is_owner = self._in_order(live).any(axis=1)
        first = np.concatenate([[0], np.cumsum(is_owner)]).astype(np.int32)
        return (first * np.int32(_chunks_per_rank(self.mesh))).astype(np.int32)

    def _in_order(self, grid: NDArray[_Cell]) -> NDArray[_Cell]:
        """Return the values of a grid in the order of the chunks, a line for each place."""
        scattered = self.order[: self.n_scattered]
        rest = [axis for axis in range(grid.ndim) if axis not in scattered]
        n_places = int(np.prod([grid.shape[axis] for axis in scattered], dtype=np.int64))
        return grid.transpose(*scattered, *rest).reshape(n_places, -1)

    def chunks_of_ranks(self) -> tuple[Ranks, Ranks]:
        """Return the chunks that each rank owns after the reduce-scatter, as first and end."""
        place = self._places(self.n_scattered)
        first = self._first_chunks + np.int32(self.first_chunk)
        return first[place], first[place + 1]

    def _places(self, n_axes: int) -> NDArray[np.int64]:
        """Return the number of each rank's place along the first axes of the order."""
        place = np.zeros(self.mesh.n_live, dtype=np.int64)
        for axis in self.order[:n_axes]:
            place = place * self.mesh.shape[axis] + self.mesh.coordinates[:, axis]
        return place

    def summing_rows(self, phase: int) -> Rows:
        """Return the reduce-scatter along the axis of a phase: the farthest chips send first."""
        axis, later = self.order[phase], self.order[phase + 1 :]
        size = self.mesh.shape[axis]
        headings = [Heading(self.mesh, axis, way, later) for way in (1, -1)]
        first_chunks = self._first_chunks
        columns: list[tuple[Ranks, Ranks, Ranks, Ranks]] = []
        for distance in range(size // 2 if headings[0].wraps else size - 1, 0, -1):
            for heading in headings:
                owner, usable = heading.positions(distance)
                lo, hi = self._shares(phase, owner, usable, first_chunks)
                if headings[0].wraps and 2 * distance == size:  # opposite: half a share each way
                    middle = (lo + hi) // 2
                    lo, hi = (lo, middle) if heading.way > 0 else (middle, hi)
                usable = usable & (lo < hi)
                for src, dst in _moves(heading, distance, owner, usable):
                    columns.append((src, dst, lo[src], hi[src]))
        none = np.zeros(0, dtype=np.int32)
        src, dst, lo, hi = map(np.concatenate, zip(*columns or [(none,) * 4], strict=True))
        return Rows(src, dst, lo + self.first_chunk, hi + self.first_chunk, REDUCE)

    def _shares(
        self,
        phase: int,
        owner: NDArray[np.int64],
        usable: NDArray[np.bool_],
        first_chunks: Ranks,
    ) -> tuple[Ranks, Ranks]:
        """Return the chunks that the position `owner` of each rank's line owns after a phase."""
        sizes = [self.mesh.shape[axis] for axis in self.order[: self.n_scattered]]
        place = np.where(usable, self._places(phase) * sizes[phase] + owner, 0)
        width = int(np.prod(sizes[phase + 1 :], dtype=np.int64))
        return first_chunks[place * width], first_chunks[place * width + width]


def _moves(
    heading: Heading, distance: int, owner: NDArray[np.int64], usable: NDArray[np.bool_]
) -> list[_Moves]:
    """Return who sends to whom, in order: first sideways before holes, then ahead."""
    moves: list[_Moves] = []
    for turn in heading.turns:
        # Owners differ in whom they send over, so that the neighbours share the load.
        chosen = turn.taken(owner[turn.ranks])
        keep = usable[turn.ranks]
        moves.append((turn.ranks[keep], chosen[keep]))
    if len(enclosed := heading.enclosed[usable[heading.enclosed]]):
        nearest = [heading.nearest(int(rank), distance) for rank in enclosed]
        moves.append((enclosed, np.array(nearest, dtype=np.int32)))
    straight = np.flatnonzero(usable & (heading.ahead >= 0)).astype(np.int32)
    moves.append((straight, heading.ahead[straight]))
    return moves


def backwards(rows: Rows) -> Rows:
    """Return the all-gather that undoes a reduce-scatter: the same ways from the owners out."""
    return Rows(rows.dst[::-1], rows.src[::-1], rows.lo[::-1], rows.hi[::-1], COPY)


def check_exchange(mesh: Mesh, *, n_scattered: int) -> None:
    """Raise UnsupportedError if there is no exchange on this mesh."""
    name = f"exchange-{n_scattered}" if n_scattered else "exchange"
    sizes = [size for size in mesh.shape if size > 1]
    if len(sizes) <= n_scattered:
        raise UnsupportedError(
            f"{name} needs {n_scattered + 1} axes or more of two chips or more, but got {mesh}"
        )
    if sum(sizes) > MOST_BUFFERS:
        raise UnsupportedError(
            f"{name} needs sides of at most {MOST_BUFFERS} chips together, but got {mesh}"
        )


def exchange_nd(mesh: Mesh, collective: Collective, *, n_scattered: int) -> Schedule:
    """Return the allreduce that exchanges along all axes but the first `n_scattered` of each part.

    Raises:
        UnsupportedError: no axis left, or sides too long together.
    """
    check_exchange(mesh, n_scattered=n_scattered)
    name = f"exchange-{n_scattered}" if n_scattered else "exchange"
    return _in_phases(name, mesh, collective, n_scattered)


def _in_phases(name: str, mesh: Mesh, collective: Collective, n_scattered: int) -> Schedule:
    """Return the schedule that scatters along so many axes of each part and exchanges the rest."""
    orders = axis_orders(mesh)
    weights = part_weights(mesh) if n_scattered else np.full(len(orders), 1 / len(orders))
    parts, shares, first = list[Part](), list[NDArray[np.float64]](), 0
    for order, weight in zip(orders, weights, strict=True):
        if weight:
            parts.append(Part(mesh, order, first, n_scattered))
            n_chunks = len(parts[-1].owners)
            shares.append(np.full(n_chunks, weight / n_chunks))
            first += n_chunks
    scatter, between = list[NamedRows](), list[NamedRows]()
    for phase in range(len(orders[0])):
        for part in parts:
            which = f"part {part.order[0]}, axis {part.order[phase]}"
            if phase < n_scattered:
                scatter.append((f"reduce-scatter {which}", part.summing_rows(phase)))
            else:
                along = _Exchange(part, phase)
                between.append((f"exchange {which}", along.moving_rows()))
                between.append((f"add {which}", along.adding_rows()))
    gather = [
        (which.replace("reduce-scatter", "all-gather"), backwards(rows))
        for which, rows in reversed(scatter)
    ]
    return schedule_of(
        halves(collective, [*scatter, *between], gather),
        algorithm=name,
        collective=collective,
        owners=np.concatenate([part.owners for part in parts]),
        n_ranks=mesh.n_live,
        cuts=cuts_of(np.concatenate(shares)),
    )


@dataclass(frozen=True)
class _Exchange:
    """One part along the axis of one phase.

    The sum that the chips at position v of the axis hold travels in a buffer of its own, the first
    that there is in the slab in the payload. Each axis has its own buffers: a chip that is still
    busy with one axis does not keep back what others send along the next.
    """

    part: Part
    phase: int

    @cached_property
    def _spread(self) -> Spreading:
        part = self.part
        open_axes = part.order[part.n_scattered : self.phase + 1]
        jump_cost = _JUMP_COST if part.n_scattered else 1.0
        return spreading(part.mesh, part.order[self.phase], open_axes, jump_cost=jump_cost)

    @cached_property
    def _buffers(self) -> NDArray[np.int64]:
        """The buffer of each position's sum (first axis) at each rank; the first is the payload."""
        order, shape = self.part.order[self.part.n_scattered :], self.part.mesh.shape
        before = order[: self.phase - self.part.n_scattered]
        first_buffer = 1 + sum(shape[axis] for axis in before)
        exists = self._spread.hops >= 0
        position = np.arange(len(exists))[:, None]
        return np.where(position == np.argmax(exists, axis=0), 0, first_buffer + position)

    def moving_rows(self) -> Rows:
        """Return what keeps own sums, then what sends sums on, the nearest chips first."""
        lo, hi = self.part.chunks_of_ranks()
        middle, buffers = (lo + hi) // 2, self._buffers
        rank = np.arange(self.part.mesh.n_live)
        own = self.part.mesh.coordinates[:, self.part.order[self.phase]]
        kept = rank[buffers[own, rank] > 0]
        columns = [(kept, kept, lo[kept], hi[kept], 0 * kept, buffers[own[kept], kept])]
        for distance in range(1, int(self._spread.hops.max()) + 1):
            position, target = np.nonzero(self._spread.hops == distance)
            first, second = (each[position, target] for each in self._spread.parents)
            whole = (first == second) | (hi[target] - lo[target] == 1)
            for source, start, stop, which in (
                (first, lo, hi, whole),
                (first, lo, middle, ~whole),
                (second, middle, hi, ~whole),
            ):
                src, dst, at = source[which], target[which], position[which]
                used = buffers[at, src], buffers[at, dst]
                columns.append((src, dst, start[dst], stop[dst], *used))
        src, dst, lo, hi, read, written = map(np.concatenate, zip(*columns, strict=True))
        return Rows(src, dst, lo, hi, COPY, read, written)

    def adding_rows(self) -> Rows:
        """Return the local rows that add the sums to the first, in the order of positions."""
        lo, hi = self.part.chunks_of_ranks()
        buffers = self._buffers
        position, rank = np.nonzero((self._spread.hops >= 0) & (buffers > 0))
        return Rows(rank, rank, lo[rank], hi[rank], REDUCE, buffers[position, rank])
