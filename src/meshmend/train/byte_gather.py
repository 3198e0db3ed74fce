"""Every chip gets the bytes of all chips: two sums, of the lengths and of the bytes.

A sum of disjoint parts is their concatenation. So a gather needs no plans but those of sums.
"""

from typing import Final

import numpy as np

from meshmend.train.exchange import Exchange
from meshmend.train.pending_sum import PendingSum
from meshmend.train.sum_waiting import first_error

_SMALL_PIECE: Final = 1 << 15  # bytes; up to here a sum needs no search for a plan
_LARGE_PIECE: Final = 1 << 21
_MOST_SMALL_PIECES: Final = 16
_LEAST_BYTES: Final = 1 << 10


def gather_bytes(exchange: Exchange, data: bytes) -> list[bytes]:
    """Return the bytes of each chip of the generation, in the order of ranks.

    Raises:
        TransportError: the mesh has changed.
    """
    lengths = np.zeros(exchange.mesh.n_live, dtype=np.int64)
    lengths[exchange.rank] = len(data)
    exchange.sum(lengths.view(np.uint8), len(lengths), "int64")
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    is_small = total <= _MOST_SMALL_PIECES * _SMALL_PIECE
    piece = _padded(min(total, _SMALL_PIECE if is_small else _LARGE_PIECE))
    n_pieces = -(-total // piece)
    flat = np.zeros(n_pieces * piece, dtype=np.uint8)
    end = int(ends[exchange.rank])
    flat[end - len(data) : end] = np.frombuffer(data, dtype=np.uint8)
    pieces = [flat[at * piece : (at + 1) * piece] for at in range(n_pieces)]
    pending: list[PendingSum] = []
    try:
        for each in pieces:
            pending.append(exchange.start_sum(each, piece, "uint8"))
    finally:
        error = first_error(pending)  # the arrays must live until no sum writes to them
    if error is not None:
        raise error
    starts = ends - lengths
    return [flat[start:end].tobytes() for start, end in zip(starts, ends, strict=True)]


def _padded(n_bytes: int) -> int:
    """Return the next power of two, so that few different sums are planned."""
    return max(_LEAST_BYTES, 1 << max(0, n_bytes - 1).bit_length())
