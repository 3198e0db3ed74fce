"""One chip's shard of a state of NumPy arrays: a range of the bytes of the whole state.

A file is one line of JSON, the bytes, and the SHA-256 of both. This module knows no folders.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from meshmend.errors import CheckpointDamageError, InputError
from meshmend.train.array_state import pack_arrays, unpack_arrays
from meshmend.train.shard_format import ShardFormat, State

_FORMAT: Final = "meshmend-array-checkpoint"
_VERSION: Final = 1
_SEAL_BYTES: Final = 32
_SAMPLED_BYTES: Final = 1 << 16  # of the whole state, for its fingerprint


class ArrayShard(NamedTuple):
    """One chip's part of a state: the bytes in its range of all bytes of the state."""

    step: int
    number: int
    n_shards: int
    fingerprint: str
    data: bytes


def cut_shard(state: State, *, step: int, shard: int, n_shards: int) -> ArrayShard:
    """Return shard number `shard` of the state; the shards of all chips make up the state.

    Raises:
        InputError: the state holds something that is neither an array nor a plain value.
    """
    if not 0 <= shard < n_shards:
        raise InputError(
            f"a checkpoint of {n_shards} shards needs shards 0 to {n_shards - 1}, but got {shard}"
        )
    whole = pack_arrays(dict(state))
    # An odd distance, so that not always the same byte of an element is looked at.
    some = whole[:: max(1, len(whole) // _SAMPLED_BYTES) | 1]
    fingerprint = hashlib.sha256(some.tobytes()).hexdigest()
    low, high = len(whole) * shard // n_shards, len(whole) * (shard + 1) // n_shards
    return ArrayShard(step, shard, n_shards, fingerprint, whole[low:high].tobytes())


def packed_shard(shard: ArrayShard) -> bytes:
    """Return the shard as bytes that end with their checksum."""
    head = {"format": _FORMAT, "version": _VERSION, **shard._asdict()}
    del head["data"]
    body = json.dumps(head).encode() + b"\n" + shard.data
    return body + hashlib.sha256(body).digest()


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
    if (head.pop("format", None), head.pop("version", None)) != (_FORMAT, _VERSION):
        raise CheckpointDamageError(f"it is not of version {_VERSION} of {_FORMAT}")
    return ArrayShard(**head, data=content)


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
    "jax", ".bin", cut_shard, packed_shard, unpacked_shard, merged_shards, _is_array
)
