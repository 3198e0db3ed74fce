"""One chip's part of a checkpoint, as the bytes of its file. Knows no folders and no framework.

A file is a cut of a `StateTree` in safetensors. Its metadata, which is texts, begins with

    checksum    16 hex digits: `hash_bytes` of the file with zeros in their place
    meshmend    the version of this format
    step, shard, n_shards, framework
    run, term, generation, chip, digest    whose state it was cut from: see `Origin`

The shards of all chips make up the state, and any number of chips can read it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from meshmend.errors import CheckpointDamageError, InputError
from meshmend.train.state.digest import hash_bytes
from meshmend.train.state.state_tree import (
    METADATA,
    Bytes,
    Framework,
    decoded,
    encoded,
    merged,
    tree_of,
)

State = Mapping[str, Any]

SUFFIX: Final = ".safetensors"
OLD_SUFFIXES: Final = (".pt", ".bin")  # of PyTorch's and JAX's shards before version 4
_VERSION: Final = "4"
_NO_CHECKSUM: Final = "0" * 16
_MARK: Final = f'{{"{METADATA}":{{"checksum":"'.encode()
_CHECKSUM: Final = slice(8 + len(_MARK), 8 + len(_MARK) + len(_NO_CHECKSUM))


@dataclass(frozen=True)
class Origin:
    """Whose state a shard was cut from, so that shards of two histories are never put together.

    `digest` is the hash of the state of the chip that wrote the shard: replicas that are equal have
    equal ones. The defaults stand for a state of no job, such as an imported one.
    """

    run: str = ""
    term: int = 0
    generation: int = 0
    chip: tuple[int, ...] = ()
    digest: str = ""


NO_ORIGIN: Final = Origin()


@dataclass(frozen=True, eq=False)
class Shard:
    """One chip's part of a state: a copy, as the bytes of its file, and what these say."""

    step: int
    number: int
    n_shards: int
    framework: str
    origin: Origin
    data: Bytes


def cut_shard(
    state: State,
    framework: Framework,
    *,
    step: int,
    shard: int,
    n_shards: int,
    origin: Origin = NO_ORIGIN,
) -> Shard:
    """Return shard number `shard` of the state; the state may change afterwards.

    Of a state of no job, the digest is made here.

    Raises:
        InputError: the state holds something that is neither a tensor nor a plain value.
    """
    if not 0 <= shard < n_shards:
        raise InputError(
            f"a checkpoint of {n_shards} shards needs shards 0 to {n_shards - 1}, but got {shard}"
        )
    tree = tree_of(state, framework.raw).cut(shard, n_shards)
    if not origin.digest:
        origin = replace(origin, digest=framework.digest(state))
    metadata = {
        "checksum": _NO_CHECKSUM,
        "meshmend": _VERSION,
        "step": str(step),
        "shard": str(shard),
        "n_shards": str(n_shards),
        "framework": framework.name,
        "run": origin.run,
        "term": str(origin.term),
        "generation": str(origin.generation),
        "chip": json.dumps(origin.chip),
        "digest": origin.digest,
    }
    return Shard(step, shard, n_shards, framework.name, origin, encoded(tree, metadata))


def seal(shard: Shard) -> Bytes:
    """Return the bytes of the shard's file, with their checksum; sets it in place."""
    shard.data[_CHECKSUM] = _digits(_NO_CHECKSUM)
    shard.data[_CHECKSUM] = _digits(f"{hash_bytes(shard.data):016x}")
    return shard.data


def read_shard(data: Bytes) -> Shard:
    """Return the shard of the bytes of a file; the shard keeps them.

    Raises:
        CheckpointDamageError: bytes are missing or have changed, or the version is unknown.
    """
    if len(data) < _CHECKSUM.stop or bytes(data[8 : _CHECKSUM.start]) != _MARK:
        raise CheckpointDamageError(
            "it does not begin with its checksum: it is incomplete, or not a checkpoint"
        )
    checksum = bytes(data[_CHECKSUM])
    data[_CHECKSUM] = _digits(_NO_CHECKSUM)
    if f"{hash_bytes(data):016x}".encode() != checksum:
        raise CheckpointDamageError(
            "its checksum is wrong: it is incomplete, or some bytes have changed"
        )
    _, said = decoded(data)
    if said["meshmend"] != _VERSION:
        raise CheckpointDamageError(
            f"it is of version {said['meshmend']} of the format, but this meshmend reads {_VERSION}"
        )
    origin = Origin(
        said["run"],
        int(said["term"]),
        int(said["generation"]),
        tuple(json.loads(said["chip"])),
        said["digest"],
    )
    numbers = int(said["step"]), int(said["shard"]), int(said["n_shards"])
    return Shard(*numbers, said["framework"], origin, data)


def framework_of(file: Path) -> str:
    """Return the framework whose state a file has, by its first bytes; ? if they do not say."""
    if file.suffix in OLD_SUFFIXES:
        return "torch" if file.suffix == ".pt" else "jax"
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            return str(json.loads(stream.read(length))[METADATA]["framework"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError):
        return "?"


def merged_state(shards: Sequence[Shard], framework: Framework) -> dict[str, Any]:
    """Return the state that was saved in these shards, bit for bit.

    Raises:
        CheckpointDamageError: a part is missing.
    """
    trees = [decoded(shard.data)[0] for shard in shards]
    state: dict[str, Any] = merged(trees).state(framework.tensor)
    return state


def _digits(text: str) -> Bytes:
    return np.frombuffer(text.encode(), dtype=np.uint8)
