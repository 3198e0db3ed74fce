"""How much the busiest links carry in an all-to-all, at least: the worst cut, or the mean way.

Cut. Of n chips, k on one side have a block for each of n - k on the other, so k (n - k) blocks
cross the links between the sides, each way. The links of a cut share them at best.

Mean way. Every block takes a hop on each link of a shortest way at least, and all links share the
hops of all blocks at best.

Both are true for any cut, and there are too many to try all. Tried are straight cuts, then moves of
single chips from one side to the other while those of a good cut make it worse. On meshes with
random holes the result was the exact optimum, a multi-commodity flow, wherever that was computed
(the tests do it); of a full torus the mean way is the optimum. Links count with their speeds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel
from meshmend.topology.graph import distances_from
from meshmend.topology.mesh import Mesh

_CLIMBED: Final = 8  # straight cuts that are made worse by single moves: those that are worst
_Side = NDArray[np.bool_]


@dataclass(frozen=True)
class PairCut:
    """The least load of the busiest link in an all-to-all, in blocks, and what it is bound by.

    `sides` counts the chips of either side of a cut, and `links` the links between them; both are 0
    where the mean way binds.
    """

    blocks: float
    sides: tuple[int, int] = (0, 0)
    links: int = 0

    def describe(self) -> str:
        """Return in words what binds."""
        if not self.links:
            return "the hops of all blocks, shared by all links"
        link = f"{self.links} link{'s' if self.links > 1 else ''}"
        return f"{self.sides[0]} and {self.sides[1]} chips exchange blocks over {link}"


@lru_cache(maxsize=64)
def pair_cut(mesh: Mesh) -> PairCut:
    """Return the bound for a connected mesh; of one chip it is 0."""
    if mesh.n_live == 1:
        return PairCut(0.0)
    neighbors = mesh.neighbor_ranks
    speeds = np.where(neighbors >= 0, mesh.port_speeds, 0.0)
    best, worst_side = _mean_way(mesh, speeds), None
    for side in _first_sides(mesh, speeds):
        _climb(neighbors, speeds, side)
        if (blocks := _blocks(neighbors, speeds, side)) > best:
            best, worst_side = blocks, side
    if worst_side is None:
        return PairCut(best)
    n_inside = int(worst_side.sum())
    crossing = (neighbors >= 0) & worst_side[:, None] & ~worst_side[neighbors]
    return PairCut(best, (n_inside, mesh.n_live - n_inside), int(crossing.sum()))


def _mean_way(mesh: Mesh, speeds: NDArray[np.float64]) -> float:
    hops = sum(int(distances_from(mesh, rank).sum()) for rank in range(mesh.n_live))
    return hops / float(speeds.sum())


def _first_sides(mesh: Mesh, speeds: NDArray[np.float64]) -> Iterator[_Side]:
    """Yield the worst of all runs of neighbouring lines, and of the chip with the fewest links."""
    cuts: list[tuple[float, int, int, int]] = []  # blocks, axis, first line, lines
    for axis, (size, wraps) in enumerate(zip(mesh.shape, mesh.wrap, strict=True)):
        at, up = mesh.coordinates[:, axis], speeds[:, 2 * axis + 1]
        n_on_line, capacity = np.bincount(at, minlength=size), np.bincount(at, up, minlength=size)
        for first in range(size if wraps else 1):
            n_inside = np.cumsum(np.roll(n_on_line, -first))[: size // 2 if wraps else size]
            cut = np.roll(capacity, -first)[: len(n_inside)]
            n_pairs = n_inside * (mesh.n_live - n_inside)
            blocks = n_pairs / np.where(n_pairs, cut + capacity[first - 1] * wraps, 1.0)
            worst = np.argsort(-blocks, kind="stable")[:_CLIMBED].tolist()
            cuts += [(blocks[each], axis, first, each + 1) for each in worst if blocks[each]]
    loneliest = np.arange(mesh.n_live) == np.argmin((speeds > 0).sum(axis=1))
    cuts.append((_blocks(mesh.neighbor_ranks, speeds, loneliest), -1, 0, 0))
    for _, axis, first, length in sorted(cuts, key=lambda cut: -cut[0])[:_CLIMBED]:
        if axis < 0:
            yield loneliest
        else:
            yield (mesh.coordinates[:, axis] - first) % mesh.shape[axis] < length


@kernel
def _blocks(neighbors, speeds, side):  # type: ignore[no-untyped-def]
    """Return the blocks that cross a cut for each link of it."""
    n_inside = side.sum()
    return n_inside * (len(side) - n_inside) / _capacity(neighbors, speeds, side)


@kernel
def _capacity(neighbors, speeds, side):  # type: ignore[no-untyped-def]
    capacity = 0.0
    for rank in range(len(side)):
        for port in range(neighbors.shape[1]):
            if side[rank] and neighbors[rank, port] >= 0 and not side[neighbors[rank, port]]:
                capacity += speeds[rank, port]
    return capacity


@kernel
def _climb(neighbors, speeds, side):  # type: ignore[no-untyped-def]
    """Move the chip that makes a cut worst to its other side, as long as there is one."""
    n_ranks, n_inside = len(side), side.sum()
    capacity = _capacity(neighbors, speeds, side)
    worst = n_inside * (n_ranks - n_inside) / capacity
    while True:
        mover, mover_capacity = -1, 0.0
        for rank in range(n_ranks):
            inside_after = n_inside - 1 if side[rank] else n_inside + 1
            if inside_after in (0, n_ranks):
                continue
            after = capacity
            for port in range(neighbors.shape[1]):
                if neighbors[rank, port] >= 0:
                    joins = side[neighbors[rank, port]] == side[rank]
                    after += speeds[rank, port] if joins else -speeds[rank, port]
            blocks = inside_after * (n_ranks - inside_after) / after
            if blocks > worst * (1 + 1e-12):
                worst, mover, mover_capacity = blocks, rank, after
        if mover < 0:
            return
        n_inside += -1 if side[mover] else 1
        side[mover] = not side[mover]
        capacity = mover_capacity
