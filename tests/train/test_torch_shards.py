"""Shards of a state: together they are the state bit for bit, and no byte of them can change."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import CheckpointDamageError, InputError
from meshmend.train.state.torch_shards import merged, packed, shard_of, unpacked
from same_bits import is_same

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    size = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from(DTYPES))
    values = torch.randint(-100, 100, (2 * size,), generator=generator)
    if dtype.is_floating_point:
        values = values / 7
    flat = values.to(dtype)
    return (flat[:size] if draw(st.booleans()) else flat[::2]).view(shape)


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
states = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        tensors() | plain,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
        ),
        max_leaves=12,
    ),
    max_size=5,
)


def shards_of(state: dict[str, Any], n_shards: int, step: int = 7) -> list[bytes]:
    return [
        packed(shard_of(state, step=step, shard=shard, n_shards=n_shards))
        for shard in range(n_shards)
    ]


@settings(max_examples=50)
@given(states, st.integers(1, 9))
def test_all_shards_make_up_the_state_bit_for_bit(state: dict[str, Any], n_shards: int) -> None:
    shards = [unpacked(data) for data in shards_of(state, n_shards)]

    assert is_same(merged(shards), state)


@settings(max_examples=50)
@given(states, st.integers(1, 9))
def test_shards_have_equally_many_bytes_to_within_two_elements(
    state: dict[str, Any], n_shards: int
) -> None:
    shards = [shard_of(state, step=0, shard=shard, n_shards=n_shards) for shard in range(n_shards)]

    sizes = [sum(elements.nbytes for _, _, elements in shard.pieces) for shard in shards]
    assert max(sizes) - min(sizes) < 2 * 8 + 1


def test_a_tensor_under_two_names_is_stored_once_and_comes_back_as_one() -> None:
    tied = torch.rand(1000)
    shards = [
        unpacked(data) for data in shards_of({"in": tied, "out": tied, "half": tied[:500]}, 2)
    ]

    assert sum(elements.numel() for shard in shards for _, _, elements in shard.pieces) == 1500
    state = merged(shards)
    assert state["in"] is state["out"]
    assert torch.equal(state["half"], tied[:500])


def test_a_view_is_stored_without_the_storage_behind_it() -> None:
    big = torch.rand(1_000_000)

    (data,) = shards_of({"few": big[:10]}, 1)
    assert len(data) < 10_000


def test_a_shard_does_not_follow_the_state() -> None:
    state = {"weight": torch.zeros(4)}
    shard = shard_of(state, step=0, shard=0, n_shards=1)
    state["weight"].fill_(1)

    assert torch.equal(merged([shard])["weight"], torch.zeros(4))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {2}]}, r"needs tensors, numbers, .*, but state\['a'\]\[1\] is a set"),
        ({"a": {(1, 2): 3}}, r"needs texts and numbers as keys, but state\['a'\] has a tuple"),
        ({"a": torch.eye(2).to_sparse()}, r"needs dense tensors, but state\['a'\] is"),
    ],
)
def test_what_cannot_be_stored_is_named(state: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        shard_of(state, step=0, shard=0, n_shards=1)


@given(st.data())
def test_any_byte_changed_or_cut_off_is_noticed(data: st.DataObject) -> None:
    (whole,) = shards_of({"weight": torch.arange(5.0), "step": 3}, 1)
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= data.draw(st.integers(1, 255))

    unpacked(whole)
    for broken in (bytes(flipped), whole[:at]):
        with pytest.raises(CheckpointDamageError):
            unpacked(broken)
