"""Ways along one axis: a `Heading` for sums that move on, a `spreading` for sums that go to all.

A sum that moves along its line cannot go on where the next chip, or the link to it, has failed.
There it goes over to a neighbouring line, sideways along an axis of `later`, as often as it takes
to reach a line that goes on.

A spreading has the shortest ways for the sums of one axis: to every chip of a **slab**, from all
chips that hold them. A slab is the chips that have the same coordinates along all axes but the
`open_axes`. Before an exchange along `axis`, the chips of a slab at one position of that axis hold
the same. Knows shapes, not data.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshmend.topology.graph import distances_from
from meshmend.topology.mesh import Mesh

Ranks = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Turns:
    """Ranks before a hole, and the neighbours in other lines that each may hand its sum to.

    `options[i, : counts[i]]` are the neighbours of `ranks[i]`.
    """

    ranks: Ranks
    options: Ranks
    counts: Ranks

    def taken(self, which: NDArray[np.integer]) -> Ranks:
        """Return one neighbour for each rank; other numbers `which` take other neighbours."""
        chosen: Ranks = self.options[np.arange(len(self.ranks)), which % self.counts]
        return chosen


@dataclass(frozen=True)
class Heading:
    """One way (1: up, -1: down) along an axis; sums may move sideways along the axes of `later`."""

    mesh: Mesh
    axis: int
    way: int
    later: tuple[int, ...]

    @property
    def wraps(self) -> bool:
        """Whether lines along the axis are rings."""
        return self.mesh.wrap[self.axis] and self.mesh.shape[self.axis] > 2

    @cached_property
    def ahead(self) -> Ranks:
        """The next live rank on each rank's line, -1 where there is none."""
        ahead: Ranks = self.mesh.neighbor_ranks[:, 2 * self.axis + (self.way > 0)]
        return ahead

    def positions(self, distance: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the positions so far ahead of each rank, and whether the lines reach there."""
        size = self.mesh.shape[self.axis]
        there = self.mesh.coordinates[:, self.axis] + self.way * distance
        if self.wraps:
            return there % size, np.ones(len(there), dtype=np.bool_)
        return there, (there >= 0) & (there < size)

    @cached_property
    def turns(self) -> tuple[Turns, ...]:
        """The ranks before holes, those with most moves to a line that goes on first."""
        _, goes_on = self.positions(1)
        waiting = np.flatnonzero(goes_on & (self.ahead < 0)).astype(np.int32)
        sideways = [port for axis in self.later for port in (2 * axis, 2 * axis + 1)]
        neighbors = self.mesh.neighbor_ranks[:, sideways]
        is_free, result = self.ahead >= 0, list[Turns]()
        while len(waiting):
            beside = neighbors[waiting]
            usable = (beside >= 0) & is_free[beside]
            can_turn = usable.any(axis=1)
            if not can_turn.any():
                break
            first = np.argsort(~usable[can_turn], axis=1, kind="stable")  # usable ones to the front
            options = np.take_along_axis(beside[can_turn], first, axis=1)
            counts = usable[can_turn].sum(axis=1, dtype=np.int32)
            result.append(Turns(waiting[can_turn], options, counts))
            is_free[waiting[can_turn]] = True
            waiting = waiting[~can_turn]
        return tuple(reversed(result))

    @cached_property
    def enclosed(self) -> Ranks:
        """The ranks before holes that no move sideways leads to a line that goes on."""
        _, goes_on = self.positions(1)
        turning = np.concatenate([turn.ranks for turn in self.turns] or [self.ahead[:0]])
        before_hole = np.flatnonzero(goes_on & (self.ahead < 0))
        return np.setdiff1d(before_hole, turning).astype(np.int32)

    def nearest(self, rank: int, distance: int) -> int:
        """Return the nearest live rank that is up to `distance` ahead, in any line of `later`.

        Some rank must be. Messages to it take several hops.
        """
        mesh, here = self.mesh, self.mesh.coordinates
        apart = here - here[rank]
        steps = self.way * apart[:, self.axis]
        if self.wraps:
            steps %= mesh.shape[self.axis]
        fixed = [axis for axis in range(len(mesh.shape)) if axis not in {self.axis, *self.later}]
        usable = (steps >= 1) & (steps <= distance) & (apart[:, fixed] == 0).all(axis=1)
        assert usable.any(), "a position without live chips owns nothing, so nothing moves there"
        sizes = np.where(mesh.wrap, mesh.shape, 2 * np.array(mesh.shape))
        hops = np.minimum(apart % sizes, -apart % sizes).sum(axis=1)
        return int(np.argmin(np.where(usable, hops, np.iinfo(np.int64).max)))


@dataclass(frozen=True, eq=False)
class Spreading:
    """How the sum of each position (first axis) comes to each rank (second axis).

    `hops` is -1 where the slab has no such sum, 0 where the rank holds it, else it rises along the
    way. `parents` says who
    sends it, once for each half of the sum: where two ways are equally short, the halves take
    different ones.
    """

    hops: NDArray[np.int32]
    parents: tuple[NDArray[np.int32], NDArray[np.int32]]


def spreading(
    mesh: Mesh, axis: int, open_axes: tuple[int, ...], *, jump_cost: float = 1.0
) -> Spreading:
    """Return shortest ways within the slabs; around holes of lines a message takes several hops.

    Each hop of such a jump counts `jump_cost` times, because it holds a link of other lines.
    """
    position = np.arange(mesh.shape[axis])[:, None]
    hops = np.where(mesh.coordinates[:, axis] == position, 0, -1).astype(np.int32)
    others = [other for other in open_axes if other != axis]
    down, up = 2 * axis, 2 * axis + 1
    beside = [port for other in others for port in (2 * other, 2 * other + 1)]
    jumps = [(before, int(jump_cost * n_hops)) for before, n_hops in _jumps(mesh, axis)]
    steps = [
        [*((mesh.neighbor_ranks[:, port], 1) for port in ports), *jumps]
        for ports in ((down, up, *beside), (up, down, *beside[::-1]))
    ]
    parents = np.full((2, *hops.shape), -1, dtype=np.int32)
    for distance in range(1, mesh.n_live * len(mesh.shape)):
        found = [_found(hops, distance, way) for way in steps]
        if (reached := found[0] >= 0).any():
            hops[reached] = distance
            for parent, new in zip(parents, found, strict=True):
                parent[reached] = new[reached]
        elif distance > hops.max() + max((hop for _, hop in jumps), default=1):
            break
    _reach_the_rest(mesh, axis, open_axes, hops, parents)
    return Spreading(hops, (parents[0], parents[1]))


_Step = tuple[NDArray[np.int32], int]  # the rank before each rank, -1 without one, and the hops


def _found(hops: NDArray[np.int32], distance: int, steps: list[_Step]) -> NDArray[np.int32]:
    """Return who can send each sum to each rank that lacks it at a distance; -1: nobody."""
    found = np.full(hops.shape, -1, dtype=np.int32)
    for before, n_hops in steps:
        if n_hops > distance:
            continue
        usable = (before >= 0) & (hops[:, before] == distance - n_hops) & (hops < 0) & (found < 0)
        found = np.where(usable, before, found)
    return found


def _jumps(mesh: Mesh, axis: int) -> list[_Step]:
    """Return the ways over the gaps in the lines of an axis, a step for each gap and way."""
    result = list[_Step]()
    size, wraps = mesh.shape[axis], mesh.wrap[axis] and mesh.shape[axis] > 2
    for way in (0, 1):
        gaps = np.flatnonzero(mesh.neighbor_ranks[:, 2 * axis + way] < 0)
        for rank in gaps.tolist():
            chip = list(mesh.live[rank])
            for _ in range(1, size):
                chip[axis] += 2 * way - 1
                if wraps:
                    chip[axis] %= size
                if tuple(chip) not in mesh or tuple(chip) in mesh.rank_of:
                    break
            other = mesh.rank_of.get(tuple(chip), rank)
            if other != rank:
                before = np.full(mesh.n_live, -1, dtype=np.int32)
                before[rank] = other
                result.append((before, int(distances_from(mesh, rank)[other])))
    return result


def _reach_the_rest(
    mesh: Mesh,
    axis: int,
    open_axes: tuple[int, ...],
    hops: NDArray[np.int32],
    parents: NDArray[np.int32],
) -> None:
    """Send a sum straight from a chip that holds it, where no way within the slab leads."""
    closed = [other for other in range(len(mesh.shape)) if other not in open_axes]
    slab = np.unique(mesh.coordinates[:, closed], axis=0, return_inverse=True)[1].reshape(-1)
    for position in range(len(hops)):
        held = mesh.coordinates[:, axis] == position
        for rank in np.flatnonzero(hops[position] < 0).tolist():
            sources = np.flatnonzero(held & (slab == slab[rank]))
            if len(sources):
                apart = distances_from(mesh, rank)[sources]
                parents[:, position, rank] = sources[np.argmin(apart)]
                hops[position, rank] = apart.min()
