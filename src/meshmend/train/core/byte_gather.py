"""Every chip gets the bytes of all chips: by one sum if they are few, else by two.

A sum of disjoint parts is their concatenation. So a gather needs no plans but those of sums. The
first sum has lengths and hashes, and as many bytes of each chip as its slot has room for. What does
not match its hash is not believed: by such messages chips are found wrong.

All gathers look alike on their way. So each has a **topic**: the call that it is for. Chips that
gather for different calls, because a script does not do the same on all of them, are told so.
"""

import hashlib
from typing import Final, TypeVar

import msgspec
import numpy as np

from meshmend.config import CHECKSUM
from meshmend.errors import MismatchError, WrongResultError
from meshmend.train.core.exchange import Exchange, PendingSum, first_error

_SMALL_PIECE: Final = 1 << 15  # bytes; up to here a sum needs no search for a plan
_LARGE_PIECE: Final = 1 << 21
_MOST_SMALL_PIECES: Final = 16
_LEAST_BYTES: Final = 1 << 10
_MOST_SLOT_BYTES: Final = 512  # of each chip, in the first sum
_LENGTH_BYTES: Final = 8
_HEAD_BYTES: Final = 16  # the length, and the hash
_LENGTH_BITS: Final = 48  # of the length; the others have the topic
_MOST_BYTES: Final = 1 << 40  # of one chip: more is no length, but memory that nobody has

_Value = TypeVar("_Value")


def gather_bytes(exchange: Exchange, data: bytes, topic: str = "") -> list[bytes]:
    """Return the bytes of each chip of the generation, in the order of ranks.

    The topic is what all chips gather for, in words; a step if there are none.

    Raises:
        TransportError: the mesh has changed.
        MismatchError: some chip gathers for something else.
        WrongResultError: what some chip said was damaged on its way.
    """
    n_chips, rank = exchange.mesh.n_live, exchange.rank
    slot_bytes = max(_HEAD_BYTES, min(_MOST_SLOT_BYTES, _SMALL_PIECE // n_chips))
    slots = np.zeros((n_chips, slot_bytes - slot_bytes % _LENGTH_BYTES), dtype=np.uint8)
    room = slots[:, _HEAD_BYTES:]
    number = _number_of(topic)
    head = np.int64(number << _LENGTH_BITS | len(data)).tobytes() + _hash(data, number)
    slots[rank, :_HEAD_BYTES] = np.frombuffer(head, dtype=np.uint8)
    if len(data) <= room.shape[1]:
        room[rank, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    exchange.sum(slots.reshape(-1), slots.size, "uint8")
    heads = np.ascontiguousarray(slots[:, :_LENGTH_BYTES]).view(np.int64)[:, 0]
    topics, lengths = (heads >> _LENGTH_BITS).tolist(), heads & (1 << _LENGTH_BITS) - 1
    hashes = [each.tobytes() for each in slots[:, _LENGTH_BYTES:_HEAD_BYTES]]
    if lengths[rank] != len(data) or not all(0 <= each <= _MOST_BYTES for each in lengths.tolist()):
        raise _damage()
    if lengths.max() <= room.shape[1]:
        parts = [each[:length].tobytes() for each, length in zip(room, lengths, strict=True)]
    else:
        parts = _gather_long(exchange, data, lengths)
    if [_hash(*each) for each in zip(parts, topics, strict=True)] != hashes:
        raise _damage()
    for other, each in enumerate(topics):
        if each != number:
            raise MismatchError(
                f"chip {exchange.members[rank]} is in {topic or 'a step'}, and chip "
                f"{exchange.members[other]} in another call"
            )
    return parts


def gather_values(exchange: Exchange, value: _Value, kind: type[_Value]) -> list[_Value]:
    """Return the value of each chip, in the order of ranks; all are of a kind that msgspec knows.

    Raises:
        TransportError, WrongResultError: as `gather_bytes`.
    """
    told = gather_bytes(exchange, msgspec.msgpack.encode(value))
    return [msgspec.msgpack.decode(each, type=kind) for each in told]


def _damage() -> WrongResultError:
    return WrongResultError(
        "what the chips told each other was damaged on its way: a link changes bytes; find it with "
        f"--checksum or {CHECKSUM.name}=1"
    )


def _number_of(topic: str) -> int:
    """Return a number for a topic that fits beside a length; 0 for none."""
    if not topic:
        return 0
    digest = hashlib.blake2b(topic.encode(), digest_size=_LENGTH_BYTES).digest()
    return 1 + int.from_bytes(digest) % ((1 << 63 - _LENGTH_BITS) - 1)


def _hash(data: bytes, topic: int) -> bytes:
    """Return a hash of bytes and topic, zeros if there are none: those of a silent chip."""
    n_bytes = _HEAD_BYTES - _LENGTH_BYTES
    if not (data or topic):
        return bytes(n_bytes)
    return hashlib.blake2b(data, digest_size=n_bytes, salt=topic.to_bytes(2, signed=True)).digest()


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
