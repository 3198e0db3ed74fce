"""States of NumPy arrays as bytes and back, bit for bit, and their shards."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from meshmend.errors import CheckpointDamageError, InputError
from meshmend.train.state.array_shards import (
    ARRAY_SHARDS,
    cut_shard,
    merged_shards,
    packed_shard,
    unpacked_shard,
)
from meshmend.train.state.array_state import digest_array_parts, pack_arrays, unpack_arrays
from meshmend.train.state.checkpoint import load, save_shard

DTYPES = ("float32", "float64", "float16", "bool", "uint8", "int32", "int64", "complex64")
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_side=4))
)
STATES = st.dictionaries(
    st.text(max_size=4), ARRAYS | st.integers() | st.none() | st.lists(ARRAYS, max_size=2)
)
STATE = {"model": {"['a']": np.arange(70, dtype=np.float32)}, "progress": {"step": 3}}


def check_same(one: Any, other: Any) -> None:
    """Two states are the same in structure, types and bits."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            check_same(one[key], other[key])
    elif isinstance(one, list):
        for left, right in zip(one, other, strict=True):
            check_same(left, right)
    else:
        assert one == other


@settings(max_examples=60)
@given(STATES)
def test_what_is_unpacked_equals_what_was_packed(state: Any) -> None:
    check_same(unpack_arrays(pack_arrays(state)), state)


def test_half_precision_of_accelerators_is_kept() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    state = {"weight": np.ones((2, 3), dtype=ml_dtypes.bfloat16)}

    check_same(unpack_arrays(pack_arrays(state)), state)


def test_one_bit_changes_the_digest() -> None:
    zeros = [np.array([value, 1.0]) for value in (0.0, 0.0, -0.0)]
    first, same, other = (digest_array_parts({"weight": array}) for array in zeros)

    assert first == same != other


@settings(max_examples=40)
@given(STATES, st.integers(1, 7))
def test_the_shards_of_all_chips_make_up_the_state(state: Any, n_shards: int) -> None:
    shards = [cut_shard(state, step=9, shard=at, n_shards=n_shards) for at in range(n_shards)]

    check_same(merged_shards([unpacked_shard(packed_shard(shard)) for shard in shards]), state)


def test_every_changed_or_missing_byte_of_a_shard_is_found() -> None:
    data = packed_shard(cut_shard(STATE, step=3, shard=1, n_shards=2))

    for at in range(len(data)):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            with pytest.raises(CheckpointDamageError, match="its checksum is wrong"):
                unpacked_shard(damaged)


def test_shards_of_different_states_are_not_merged() -> None:
    other = {**STATE, "progress": {"step": 4}}
    shards = [
        cut_shard(state, step=3, shard=at, n_shards=2) for at, state in enumerate((STATE, other))
    ]

    with pytest.raises(CheckpointDamageError, match="from different states"):
        merged_shards(shards)


@pytest.mark.parametrize("shard", [-1, 2])
def test_a_shard_that_is_none_of_them_is_refused(shard: int) -> None:
    with pytest.raises(InputError, match=f"needs shards 0 to 1, but got {shard}"):
        cut_shard(STATE, step=3, shard=shard, n_shards=2)


def test_another_version_is_refused() -> None:
    line, _, rest = packed_shard(cut_shard(STATE, step=3, shard=0, n_shards=1)).partition(b"\n")

    body = json.dumps({**json.loads(line), "version": 3}).encode() + b"\n" + rest[:-32]
    with pytest.raises(CheckpointDamageError, match="not of version 2"):
        unpacked_shard(body + hashlib.sha256(body).digest())


def test_a_checkpoint_of_another_framework_is_not_read_but_named(tmp_path: Path) -> None:
    other = replace(ARRAY_SHARDS, framework="torch", suffix=".pt")
    save_shard(tmp_path, STATE, other, step=3, shard=0, n_shards=1)
    said: list[str] = []

    assert load(tmp_path, ARRAY_SHARDS, on_damage=lambda path, why: said.append(why)) is None
    assert said == ["another framework wrote it: its files end with .pt, but jax writes .bin"]
