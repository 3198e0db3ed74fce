"""One way along an axis: the next chip of each line, and where to turn off before a hole.

A sum that moves along its line cannot go on where the next chip, or the link to it, has failed.
There it goes over to a neighbouring line, sideways along an axis of `later`, as often as it takes
to reach a line that goes on. Knows shapes, not data.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

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
