"""Every chip gets the bytes of all chips: by one sum if they are few, else by two.

A sum of disjoint parts is their concatenation. So a gather needs no plans but those of sums. The
first sum has lengths and hashes, and as many bytes of each chip as its slot has room for. What does
not match its hash is not believed: by such messages chips are found wrong.
"""

import hashlib
import json
from typing import Any, Final

import numpy as np

from meshmend.config import CHECKSUM
from meshmend.errors import WrongResultError
from meshmend.train.core.exchange import Exchange, PendingSum, first_error

_SMALL_PIECE: Final = 1 << 15  # bytes; up to here a sum needs no search for a plan
_LARGE_PIECE: Final = 1 << 21
_MOST_SMALL_PIECES: Final = 16
_LEAST_BYTES: Final = 1 << 10
_MOST_SLOT_BYTES: Final = 512  # of each chip, in the first sum
_LENGTH_BYTES: Final = 8
_HEAD_BYTES: Final = 16  # the length, and the hash
_MOST_BYTES: Final = 1 << 40  # of one chip: more is no length, but memory that nobody has


def gather_bytes(exchange: Exchange, data: bytes) -> list[bytes]:
    """Return the bytes of each chip of the generation, in the order of ranks.

    Raises:
        TransportError: the mesh has changed.
        WrongResultError: what some chip said was damaged on its way.
    """
    n_chips, rank = exchange.mesh.n_live, exchange.rank
    slot_bytes = max(_HEAD_BYTES, min(_MOST_SLOT_BYTES, _SMALL_PIECE // n_chips))
    slots = np.zeros((n_chips, slot_bytes - slot_bytes % _LENGTH_BYTES), dtype=np.uint8)
    room = slots[:, _HEAD_BYTES:]
    head = np.int64(len(data)).tobytes() + _hash(data)
    slots[rank, :_HEAD_BYTES] = np.frombuffer(head, dtype=np.uint8)
    if len(data) <= room.shape[1]:
        room[rank, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    exchange.sum(slots.reshape(-1), slots.size, "uint8")
    lengths = np.ascontiguousarray(slots[:, :_LENGTH_BYTES]).view(np.int64)[:, 0]
    hashes = [each.tobytes() for each in slots[:, _LENGTH_BYTES:_HEAD_BYTES]]
    if lengths[rank] != len(data) or not all(0 <= each <= _MOST_BYTES for each in lengths.tolist()):
        raise _damage()
    if lengths.max() <= room.shape[1]:
        parts = [each[:length].tobytes() for each, length in zip(room, lengths, strict=True)]
    else:
        parts = _gather_long(exchange, data, lengths)
    if [_hash(part) for part in parts] != hashes:
        raise _damage()
    return parts


def gather_values(exchange: Exchange, value: Any) -> list[Any]:
    """Return the value of each chip, in the order of ranks: what JSON can hold.

    Raises:
        TransportError, WrongResultError: as `gather_bytes`.
    """
    text = json.dumps(value, separators=(",", ":"))
    return [json.loads(each) for each in gather_bytes(exchange, text.encode())]


def _damage() -> WrongResultError:
    return WrongResultError(
        "what the chips told each other was damaged on its way: a link changes bytes; find it with "
        f"--checksum or {CHECKSUM.name}=1"
    )


def _hash(data: bytes) -> bytes:
    """Return a hash of some bytes, of none zeros: those of a chip that says nothing."""
    n_bytes = _HEAD_BYTES - _LENGTH_BYTES
    return hashlib.blake2b(data, digest_size=n_bytes).digest() if data else bytes(n_bytes)


def _gather_long(
    exchange: Exchange, data: bytes, lengths: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> list[bytes]:
    """Return the bytes of each chip by a second sum, after all have told how many they have."""
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
