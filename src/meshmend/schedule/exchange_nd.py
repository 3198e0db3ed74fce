"""The schedules `exchange`: along one axis after another every chip gets the others' sums and adds.

A row that adds into the payload cannot take part in an exchange: whoever is sent to first no longer
has its own sum. So sums travel in scratch buffers, both ways at once, and each chip adds them up in
the same order, so that all have the same bits. A ring of n chips takes n / 2 hops, where a tree
takes n: up and down. But each chip gets the whole sum of each other, so this suits short payloads.

`exchange-1` and `exchange-2` first reduce-scatter along 1 or 2 axes, as `rings-nd` does, exchange
what is left along the others, and all-gather the way back: fewer bytes, more hops.

**Holes.** A sum goes to every chip of its **slab**, the chips that have the same coordinates along
all axes to come. It starts from all chips of the slab that hold it and takes shortest ways, around
holes by the neighbouring lines. Where lines hold different sums, a message goes around a hole.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import UnsupportedError
from meshmend.schedule.ring_builders import NamedRows
from meshmend.schedule.rings_nd import Part, axis_orders, backwards, part_weights
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, schedule_of
from meshmend.topology.mesh import Mesh
from meshmend.trees.spreading import Spreading, spreading

MOST_BUFFERS = 255  # a row names its buffers in one byte

# Hybrids are for longer payloads, for which jumps around holes crowd the links of other lines. On
# 16x16 less 4x2 at 1 MB a cost of 1, 1.25, 1.5, 1.75 and no jumps take 39.2, 39.1, 36.7, 38.8 and
# 37.4 us. For short payloads hops alone count.
_JUMP_COST = 1.5


def exchange(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the schedule that exchanges along every axis."""
    return exchange_nd(mesh, collective, n_scattered=0)


def exchange_1(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the schedule that reduce-scatters each part of the payload along its own axis."""
    return exchange_nd(mesh, collective, n_scattered=1)


def exchange_2(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the schedule that reduce-scatters along two axes, and exchanges along the others."""
    return exchange_nd(mesh, collective, n_scattered=2)


def check_exchange(mesh: Mesh, *, n_scattered: int) -> None:
    """Raise UnsupportedError if there is no exchange on this mesh.

    Without an axis that wraps around, trees take as few hops, with fewer bytes.
    """
    name = f"exchange-{n_scattered}" if n_scattered else "exchange"
    sizes = [size for size in mesh.shape if size > 1]
    if not any(wraps and size > 2 for size, wraps in zip(mesh.shape, mesh.wrap, strict=True)):
        raise UnsupportedError(f"{name} needs an axis that wraps around, but got {mesh}")
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
        UnsupportedError: another collective, no axis left, or sides too long together.
    """
    check_exchange(mesh, n_scattered=n_scattered)
    name = f"exchange-{n_scattered}" if n_scattered else "exchange"
    if collective is not Collective.ALLREDUCE:
        raise UnsupportedError(f"{name} is an allreduce, but got the collective {collective}")
    orders = axis_orders(mesh)
    weights = part_weights(mesh) if n_scattered else np.full(len(orders), 1 / len(orders))
    parts, first = list[Part](), 0
    for order, weight in zip(orders, weights, strict=True):
        if weight:
            parts.append(Part(mesh, order, first, n_scattered))
            first += len(parts[-1].owners)
    shares = [
        np.full(len(part.owners), weight / len(part.owners))
        for part, weight in zip(parts, weights[weights > 0], strict=True)
    ]
    cuts = np.minimum(np.concatenate([[0.0], np.cumsum(np.concatenate(shares))]), 1.0)
    cuts[-1] = 1.0
    return schedule_of(
        _phases(parts, n_scattered),
        algorithm=name,
        collective=collective,
        owners=np.concatenate([part.owners for part in parts]),
        n_ranks=mesh.n_live,
        cuts=cuts,
    )


def _phases(parts: list[Part], n_scattered: int) -> list[NamedRows]:
    scatter, between = list[NamedRows](), list[NamedRows]()
    for phase in range(len(parts[0].order)):
        for part in parts:
            name = f"part {part.order[0]}, axis {part.order[phase]}"
            if phase < n_scattered:
                scatter.append((f"reduce-scatter {name}", part.summing_rows(phase)))
            else:
                along = _Exchange(part, phase)
                between.append((f"exchange {name}", along.moving_rows()))
                between.append((f"add {name}", along.adding_rows()))
    gather = [
        (name.replace("reduce-scatter", "all-gather"), backwards(rows))
        for name, rows in reversed(scatter)
    ]
    return [*scatter, *between, *gather]


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
