"""A training state as bytes and back, bit for bit."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import InputError
from meshmend.train.state.torch_state import digest, packed, unpacked

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any type and shape, of random bits, not all of them contiguous."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    n_bytes = math.prod(shape) * dtype.itemsize
    random = np.random.default_rng(draw(st.integers(0, 99)))
    flat = torch.empty(n_bytes, dtype=torch.uint8)
    flat[:] = torch.from_numpy(random.integers(0, 2 if dtype is torch.bool else 256, n_bytes))
    tensor = flat.view(dtype).reshape(shape)
    return tensor.T if len(shape) == 2 and draw(st.booleans()) else tensor


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
STATES = st.recursive(
    PLAIN | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers(0, 9) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def check_same(one: Any, other: Any) -> None:
    """Two states are the same in structure, types and bits."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            check_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            check_same(left, right)
    else:
        assert repr(one) == repr(other)  # nan is nan, and 0.0 is not -0.0


@settings(max_examples=80)
@given(STATES)
def test_what_is_unpacked_equals_what_was_packed(state: Any) -> None:
    check_same(unpacked(packed(state)), state)


@settings(max_examples=40)
@given(STATES)
def test_equal_states_have_equal_digests(state: Any) -> None:
    again = unpacked(packed(state))

    assert digest(again) == digest(state)


def test_one_bit_changes_the_digest() -> None:
    one = torch.tensor([0.0, 1.0])

    assert digest({"weight": one}) != digest({"weight": torch.tensor([-0.0, 1.0])})


def test_what_is_unpacked_does_not_share_memory_with_the_bytes() -> None:
    data = packed({"weight": torch.zeros(3)})
    state = unpacked(data)

    data[:] = 255

    assert state["weight"].tolist() == [0.0, 0.0, 0.0]


def test_a_parameter_that_learns_is_packed_as_its_values() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))

    (value,) = unpacked(packed([parameter]))

    assert value.tolist() == [1.0, 1.0]
    assert not value.requires_grad


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_model_and_optimizer_go_on_alike_on_both_sides(name: str) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        options = {"momentum": 0.9} if name == "SGD" else {}
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        model(inputs).square().sum().backward()
        optimizer.step()

    one, other = made(), made()
    step(*one, seed=1)
    states = unpacked(packed([part.state_dict() for part in one]))
    other[0].load_state_dict(states[0])
    other[1].load_state_dict(states[1])
    step(*one, seed=2)
    step(*other, seed=2)

    check_same([dict(part.state_dict()) for part in one], [dict(p.state_dict()) for p in other])


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"rng": object()}, r"needs tensors, numbers and text, but got object .*; leave it out"),
        ([b"bytes"], "got bytes b'bytes'"),
        ({(0, 1): 2}, r"got tuple \(0, 1\)"),
        ({"lambda": {1, 2}}, r"got set \{1, 2\}"),
        (np.float32(1.0), "got float32"),
    ],
)
def test_what_is_neither_tensor_nor_plain_is_refused(state: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        packed(state)
