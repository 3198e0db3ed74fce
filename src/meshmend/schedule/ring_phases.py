"""Reduce-scatter and all-gather around many rings at once, and two such phases in a row.

A ring here is a row of ranks in the direction in which it sends; a ring that runs both ways is
two of them, each with its own half of the payload. Position j of a ring owns the chunks
`lo[j]` to `hi[j] - 1`. Nothing is computed per row: the columns are strided views.
"""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from meshmend.schedule.table import COPY, REDUCE, Rows

Ranks = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class OwnedRings:
    """Rings of one length as arrays (rings, length): ranks, and the chunks each position owns."""

    ranks: Ranks
    lo: Ranks
    hi: Ranks


def both_ways(ranks: Ranks) -> Ranks:
    """Return the rings followed by the same rings in the other direction."""
    return np.concatenate([ranks, ranks[:, ::-1]])


def reduce_scatter_rows(rings: OwnedRings) -> Rows:
    """Return rows after which each position holds its ring's sum of the chunks it owns.

    At step t position i sends the chunks of position i - t - 1 to position i + 1.
    """
    length = rings.ranks.shape[1]
    return _shifted(rings, range(length - 1, 0, -1), REDUCE)


def all_gather_rows(rings: OwnedRings) -> Rows:
    """Return rows after which every position holds the chunks that each of its ring owned.

    At step t position i sends the chunks of position i - t to position i + 1.
    """
    length = rings.ranks.shape[1]
    return _shifted(rings, range(length, 1, -1), COPY)


def _shifted(rings: OwnedRings, shifts: range, op: int) -> Rows:
    """Return rows of shape (steps, rings, length): at each step position i sends what position
    i + shift (mod length) owns."""
    shape = (len(shifts), *rings.ranks.shape)

    def turned(owned: Ranks) -> Ranks:
        windows = sliding_window_view(np.tile(owned, 2), owned.shape[1], axis=1)
        return windows[:, shifts.start : shifts.stop : shifts.step].swapaxes(0, 1)

    return Rows(
        src=np.broadcast_to(rings.ranks, shape),
        dst=np.broadcast_to(np.roll(rings.ranks, -1, axis=1), shape),
        lo=turned(rings.lo),
        hi=turned(rings.hi),
        op=op,
    )


@dataclass(frozen=True, eq=False)
class TwoPhase:
    """Rings in two directions of a grid: first along, then across, both ways round.

    `along` holds R rings of length L, `across` the L rings over what is left at each position.
    The chunks, numbered from `first_chunk` on, are ordered by direction, position in the ring
    along (in that direction), ring: a position's share after phase one is R chunks in a row.
    """

    along: OwnedRings
    across: OwnedRings

    @property
    def n_chunks(self) -> int:
        return self.across.ranks.size


def two_phase(along: Ranks, order: NDArray[np.integer], *, first_chunk: int = 0) -> TwoPhase:
    """Return the two phases over rings `along` (R, L); across goes through rings in `order`."""
    n_rings, length = along.shape
    one_way = first_chunk + n_rings * np.arange(2 * length, dtype=np.int32).reshape(2, 1, length)
    lo = np.broadcast_to(one_way, (2, n_rings, length)).reshape(2 * n_rings, length)
    phase_one = OwnedRings(both_ways(along), lo, lo + np.int32(n_rings))

    # Position p of the backward rings is position L - 1 - p of the forward ones.
    positions = np.stack([along.T, along.T[::-1]])  # (direction, position, ring)
    owned = one_way.reshape(2, length, 1) + np.arange(n_rings, dtype=np.int32)
    turns = np.stack([order, order[::-1]])[:, None, :]  # the backward half goes the other way
    ranks = np.take_along_axis(positions, turns, axis=2).reshape(2 * length, n_rings)
    chunks = np.take_along_axis(owned, turns, axis=2).reshape(2 * length, n_rings)
    return TwoPhase(phase_one, OwnedRings(ranks, chunks, chunks + np.int32(1)))
