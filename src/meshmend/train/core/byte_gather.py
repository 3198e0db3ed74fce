"""Every chip gets the bytes of all chips: by one sum if they are few, else by two.

A sum of disjoint parts is their concatenation. So a gather needs no plans but those of sums. The
first sum has the lengths, and as many bytes of each chip as its slot has room for.
"""

from typing import Final

import numpy as np

from meshmend.config import CHECKSUM
from meshmend.errors import TransportError
from meshmend.train.core.exchange import Exchange, PendingSum, first_error

_SMALL_PIECE: Final = 1 << 15  # bytes; up to here a sum needs no search for a plan
_LARGE_PIECE: Final = 1 << 21
_MOST_SMALL_PIECES: Final = 16
_LEAST_BYTES: Final = 1 << 10
_MOST_SLOT_BYTES: Final = 512  # of each chip, in the first sum
_LENGTH_BYTES: Final = 8
_MOST_BYTES: Final = 1 << 40  # of one chip: more is no length, but memory that nobody has


def gather_bytes(exchange: Exchange, data: bytes) -> list[bytes]:
    """Return the bytes of each chip of the generation, in the order of ranks.

    Raises:
        TransportError: the mesh has changed, or the lengths were damaged on their way.
    """
    n_chips, rank = exchange.mesh.n_live, exchange.rank
    slot_bytes = max(_LENGTH_BYTES, min(_MOST_SLOT_BYTES, _SMALL_PIECE // n_chips))
    slots = np.zeros((n_chips, slot_bytes - slot_bytes % _LENGTH_BYTES), dtype=np.uint8)
    room = slots[:, _LENGTH_BYTES:]
    slots[rank, :_LENGTH_BYTES] = np.frombuffer(np.int64(len(data)).tobytes(), dtype=np.uint8)
    if len(data) <= room.shape[1]:
        room[rank, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    exchange.sum(slots.reshape(-1), slots.size, "uint8")
    lengths = np.ascontiguousarray(slots[:, :_LENGTH_BYTES]).view(np.int64)[:, 0]
    if lengths[rank] != len(data) or not all(0 <= each <= _MOST_BYTES for each in lengths.tolist()):
        raise TransportError(
            f"the lengths that the chips gathered were damaged on their way: {lengths.tolist()}; "
            f"find the host with {CHECKSUM.name}=1"
        )
    if lengths.max() <= room.shape[1]:
        return [each[:length].tobytes() for each, length in zip(room, lengths, strict=True)]
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
