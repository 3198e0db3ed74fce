"""The digest of a state: every bit counts, names and types too, the order of dicts does not."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.train.state.digest import hash_bytes
from meshmend.train.state.torch_state import TORCH
from meshmend.train.torch.learner import TorchLearner


@settings(max_examples=200)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_single_bit_that_differs_changes_the_hash(data: bytes, drawn: st.DataObject) -> None:
    bit = drawn.draw(st.integers(0, 8 * len(data) - 1))
    array = np.frombuffer(data, dtype=np.uint8).copy()
    before = hash_bytes(array)
    array[bit // 8] ^= np.uint8(1 << (bit % 8))

    assert hash_bytes(array) != before


def test_no_two_of_many_pairs_of_flipped_signs_cancel_each_other() -> None:
    zeros = torch.zeros(64, dtype=torch.float64)

    def flipped(*places: int) -> str:
        array = zeros.clone()
        array[list(places)] = -0.0
        return TORCH.digest([array])

    found = [flipped(one, other) for one in range(64) for other in range(one)]
    assert len({TORCH.digest([zeros]), *found}) == len(found) + 1


def test_an_array_anywhere_in_memory_has_the_hash_of_its_bytes() -> None:
    data = np.arange(101, dtype=np.uint8)
    shifted = np.concatenate([np.zeros(3, dtype=np.uint8), data])[3:]

    assert hash_bytes(shifted) == hash_bytes(data)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lr": 0.1}, {"lr": 0.1 + 2**-55}),
        ({"lr": 1}, {"lr": 1.0}),
        ({"lr": 1j}, {"lr": 2j}),
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(1, 2)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(1, dtype=torch.float64)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(3)}),
        ({"a": {}}, {}),
        ({"a": "x" * 80 + "y"}, {"a": "x" * 80 + "z"}),
    ],
)
def test_what_is_not_the_same_has_another_digest(one: Any, other: Any) -> None:
    assert TORCH.digest(one) != TORCH.digest(other)


def test_the_order_of_a_dict_does_not_count_but_that_of_a_list_does() -> None:
    assert TORCH.digest({"a": 1, "b": 2}) == TORCH.digest({"b": 2, "a": 1})
    assert TORCH.digest([1, 2]) != TORCH.digest([2, 1])


def test_a_difference_is_named() -> None:
    one = {"optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "groups": [{"lr": 0.1}]}}
    other = {"optimizer": {"state": {0: {"step": torch.tensor(2.0)}}, "groups": [{"lr": 0.2}]}}
    parts, others = TORCH.begun_digest(one).wait(), TORCH.begun_digest(other).wait()

    assert [name for name in parts if parts[name] != others[name]] == [
        "optimizer.state.0.step",
        "optimizer.groups.0.lr",
    ]
    assert parts["optimizer.groups.0.lr"] == "0.1"


def test_large_arrays_are_hashed_later_to_the_same_digest() -> None:
    large = torch.arange(1 << 20, dtype=torch.float32)
    small = large[:1000].clone()

    begun = TORCH.begun_digest({"large": large, "small": small})

    assert begun.is_early
    assert not TORCH.begun_digest({"small": small}).is_early
    of_large = f"float32[{1 << 20}] {hash_bytes(large.numpy().view(np.uint8)):016x}"
    assert begun.wait() == {"large": of_large, **TORCH.begun_digest({"small": small}).wait()}


def learner_with_all_kinds_of_state() -> tuple[TorchLearner, torch.nn.Module]:
    """Return a learner that has stepped once; its model has a buffer that is not persistent."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    torch.nn.Sequential(*model)(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return TorchLearner(model, optimizer, [scheduler]), model


def test_the_digest_of_a_learner_has_all_of_its_state() -> None:
    learner, model = learner_with_all_kinds_of_state()
    before = learner.begun_digest().wait()

    assert {"model.0.weight", "model.1.running_mean", "buffers.mask"} <= set(before)
    assert {"optimizer.state.0.exp_avg", "optimizer.param_groups.0.lr"} <= set(before)
    assert "also.0.last_epoch" in before
    assert isinstance(model.mask, torch.Tensor)
    model.mask[0, 1] = 0
    after = learner.begun_digest().wait()
    assert [name for name in before if before[name] != after[name]] == ["buffers.mask"]


def test_a_learner_that_loads_a_state_has_its_digest_also_of_buffers_not_persistent() -> None:
    learner, model = learner_with_all_kinds_of_state()
    other, other_model = learner_with_all_kinds_of_state()
    assert isinstance(other_model.mask, torch.Tensor)
    other_model.mask.fill_(3)
    other_model.mask[0, 0] = torch.nan

    framework = learner.framework
    learner.load(framework.unpacked(framework.packed(other.state())))

    assert learner.begun_digest().wait() == other.begun_digest().wait()
    assert isinstance(model.mask, torch.Tensor)
    assert model.mask[1, 1] == 3
