"""One chip's shard of a state of NumPy arrays: a range of the bytes of the whole state.

A file is one line of JSON, the bytes, and the SHA-256 of both. This module knows no folders.
"""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np

from meshmend.errors import CheckpointDamageError, InputError
from meshmend.train.state.array_state import array_parts, unpack_arrays
from meshmend.train.state.raw_state import cut_raw
from meshmend.train.state.shard_format import NO_ORIGIN, Origin, ShardFormat, State

_FORMAT: Final = "meshmend-array-checkpoint"
_VERSION: Final = 2
_WITHOUT_ORIGIN: Final = 1  # the version of a shard that does not say whose state it is of
_SEAL_BYTES: Final = 32
_SAMPLED_BYTES: Final = 1 << 16  # of the whole state, for its fingerprint


class ArrayShard(NamedTuple):
    """One chip's part of a state: the bytes in its range of all bytes of the state."""

    step: int
    number: int
    n_shards: int
    fingerprint: str
    data: bytes | memoryview
    origin: Origin = NO_ORIGIN


def cut_shard(
    state: State, *, step: int, shard: int, n_shards: int, origin: Origin = NO_ORIGIN
) -> ArrayShard:
    """Return shard number `shard` of the state, a copy; the shards of all chips make up the state.

    Raises:
        InputError: the state holds something that is neither an array nor a plain value.
    """
    if not 0 <= shard < n_shards:
        raise InputError(
            f"a checkpoint of {n_shards} shards needs shards 0 to {n_shards - 1}, but got {shard}"
        )
    parts = array_parts(dict(state))
    size = sum(len(part) for part in parts)
    # An odd distance, so that not always the same byte of an element is looked at.
    some = cut_raw(parts, 0, size, max(1, size // _SAMPLED_BYTES) | 1)
    fingerprint = hashlib.sha256(some.data).hexdigest()
    low, high = size * shard // n_shards, size * (shard + 1) // n_shards
    return ArrayShard(step, shard, n_shards, fingerprint, cut_raw(parts, low, high).data, origin)


def write_shard_bytes(shard: ArrayShard, stream: BinaryIO) -> None:
    """Write the shard to a stream: bytes that end with their checksum."""
    head = {"format": _FORMAT, "version": _VERSION, **shard._asdict()}
    head["origin"] = asdict(shard.origin)
    del head["data"]
    if shard.origin == NO_ORIGIN:  # so that earlier versions read it
        del head["origin"]
        head["version"] = _WITHOUT_ORIGIN
    line, seal = json.dumps(head).encode() + b"\n", hashlib.sha256()
    for part in (line, shard.data):
        seal.update(part)
        stream.write(part)
    stream.write(seal.digest())


def packed_shard(shard: ArrayShard) -> bytes:
    """Return what `write_shard_bytes` writes."""
    buffer = io.BytesIO()
    write_shard_bytes(shard, buffer)
    return buffer.getvalue()


def unpacked_shard(data: bytes) -> ArrayShard:
    """Return the shard that `packed_shard` turned into these bytes.

    Raises:
        CheckpointDamageError: bytes are missing or have changed, or the version is unknown.
    """
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if hashlib.sha256(body).digest() != seal:
        raise CheckpointDamageError(
            "its checksum is wrong: it is incomplete, some bytes have changed, or it is not a "
            "checkpoint"
        )
    line, _, content = body.partition(b"\n")
    head = json.loads(line)
    if head.pop("format", None) != _FORMAT or head.pop("version", None) not in (
        _VERSION,
        _WITHOUT_ORIGIN,
    ):
        raise CheckpointDamageError(f"it is not of version {_VERSION} of {_FORMAT}")
    origin = head.pop("origin", {})
    if "chip" in origin:
        origin["chip"] = tuple(origin["chip"])  # JSON has no tuples
    return ArrayShard(**head, data=content, origin=Origin(**origin))


def merged_shards(shards: Sequence[ArrayShard]) -> dict[str, Any]:
    """Return the state that was saved in these shards, bit for bit.

    Raises:
        CheckpointDamageError: the shards are of different states.
    """
    if len({shard.fingerprint for shard in shards}) > 1:
        raise CheckpointDamageError("its shards were saved from different states")
    whole = b"".join(shard.data for shard in shards)
    state: dict[str, Any] = unpack_arrays(np.frombuffer(whole, dtype=np.uint8))
    return state


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


ARRAY_SHARDS: Final = ShardFormat(
    "jax", ".bin", cut_shard, write_shard_bytes, unpacked_shard, merged_shards, _is_array
)
