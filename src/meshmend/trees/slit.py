"""The slit of a mesh: a run of missing links in a straight cut through it.

A slit has two ends, and at each end a **gap**, where links cross the cut. A mesh without failures
has slits of no length: any place where a cut can be crossed on both sides of it. Knows shapes only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import UnsupportedError
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh

Ranks = NDArray[np.int32]

# Gaps begin so far apart, as a part of the line, even where links cross between them. Sums that are
# carried farther stop less often: 32x32 at 1 MB takes 1.646, 1.638, 1.630, 1.621 and 1.654 times
# the limit with 0, 0.15, 0.25, 0.35 and 0.5.
_LEAST_PART = 0.35


@dataclass(frozen=True, eq=False)
class Slit:
    """A cut through a 2-D mesh behind line `after` of an axis, with a gap at each end of the slit.

    `gaps` has the ranks on line `after` whose link crosses the cut, those nearest to the slit
    first.
    """

    mesh: Mesh
    axis: int
    after: int
    gaps: tuple[Ranks, Ranks]

    @cached_property
    def sides(self) -> tuple["Side", "Side"]:
        """The chips up to the cut, and those beyond it."""
        is_beyond = self.mesh.coordinates[:, self.axis] > self.after
        return _side(self.mesh, ~is_beyond), _side(self.mesh, is_beyond)


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a cut as a mesh of its own; `ranks` are the ranks of its chips in the whole."""

    mesh: Mesh
    ranks: Ranks


def _side(mesh: Mesh, is_inside: NDArray[np.bool_]) -> Side:
    outside = map(tuple, mesh.coordinates[~is_inside].tolist())
    part = replace(mesh, failed=mesh.failed | set(outside))
    return Side(part, np.flatnonzero(is_inside).astype(np.int32))


def likely_slits(mesh: Mesh) -> tuple[Slit, ...]:
    """Return the slit with the longest run of missing links, and one in the middle of the mesh.

    Of equally long ones it is one across the longer axis, the most central.

    Raises:
        UnsupportedError: the mesh has an axis too many or one that wraps around, or no slit leaves
            two connected sides.
    """
    is_flat = len(mesh.shape) == 2 and 1 not in mesh.shape and not any(mesh.rings)
    found = sorted(_slits(mesh), key=lambda each: each[0]) if is_flat else []
    without_length = [slit for (length, *_), slit in found if not length]
    likely = map(_first_with_sides, ([slit for _, slit in found], without_length))
    slits = tuple(slit for slit in likely if slit is not None)
    if not slits:
        raise UnsupportedError(
            "two-roots needs a 2-D mesh without wrap-around, which a straight cut divides into two "
            f"connected sides with two links between them, but got {mesh}"
        )
    return slits


def _first_with_sides(slits: list[Slit]) -> Slit | None:
    """Return the first slit whose two sides are connected."""
    for slit in slits:
        if all(mesh_figures(side.mesh).is_connected for side in slit.sides):
            return slit
    return None


def _slits(mesh: Mesh) -> Iterator[tuple[tuple[int, ...], Slit]]:
    """Yield the slits between two gaps, each with a key: the smallest is that of the best."""
    for axis, size in enumerate(mesh.shape):
        n_along = mesh.shape[1 - axis]
        for after, crosses in enumerate(_crossings(mesh, axis)[:-1]):
            for start, stop in (*_runs(crosses < 0), (n_along // 2, n_along // 2)):
                spans = (_widened(start, stop, n_along), (start, stop))
                for is_narrow, (first, last) in enumerate(spans):
                    gaps = _first_run(crosses[: max(0, first)][::-1]), _first_run(crosses[last:])
                    if all(map(len, gaps)):
                        key = (start - stop, is_narrow, -size, abs(2 * after + 2 - size))
                        yield key, Slit(mesh, axis, after, gaps)


def _crossings(mesh: Mesh, axis: int) -> Ranks:
    """Return for each place of each line the rank whose link leads to the next line, -1 if none."""
    leads_on = mesh.neighbor_ranks[:, 2 * axis + 1] >= 0
    crosses = np.full(mesh.shape, -1, dtype=np.int32)
    crosses[tuple(mesh.coordinates[leads_on].T)] = np.flatnonzero(leads_on)
    return np.moveaxis(crosses, axis, 0)


def _widened(start: int, stop: int, n_along: int) -> tuple[int, int]:
    """Return a run that is as long as `_LEAST_PART` of the line, with the same middle."""
    half = int(_LEAST_PART * n_along / 2)
    return min(start, (start + stop) // 2 - half), max(stop, (start + stop) // 2 + half)


def _runs(is_missing: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield where each run of missing links starts and stops."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_missing, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _first_run(ranks: Ranks) -> Ranks:
    """Return the ranks up to the first that is -1."""
    missing = np.flatnonzero(ranks < 0)
    return ranks[: missing[0]] if len(missing) else ranks
