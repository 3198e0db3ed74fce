"""What one step sums: any split of a batch gives the gradient over the whole of it."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import mse_loss

from meshmend.errors import InputError
from meshmend.train.torch.gradients import Gradients
from same_bits import is_same

N_SAMPLES = 12
INPUTS = torch.randn(N_SAMPLES, 3, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randn(N_SAMPLES, 2, generator=torch.Generator().manual_seed(1))

SPLITS = st.lists(st.integers(0, N_SAMPLES), max_size=4).map(
    lambda cuts: list(np.diff([0, *sorted(cuts), N_SAMPLES]))
)


class TwoHeads(torch.nn.Module):
    """A model of which a parameter is never used and a head only by some chips."""

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = torch.nn.Linear(3, 4)
        self.second = torch.nn.Linear(4, 2).to(dtype)
        self.never = torch.nn.Parameter(torch.ones(2))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).to(self.second.weight.dtype)
        result: torch.Tensor = self.second(hidden).to(torch.float32)
        return result


def learn(loss: Any) -> None:
    loss.backward()


def chips_of(model: Any, n_chips: int) -> list[tuple[Any, Gradients]]:
    """Return replicas and their flat buffers."""
    models = [copy.deepcopy(model) for _ in range(n_chips)]
    return [(replica, Gradients(replica)) for replica in models]


def summed(gradients: list[Gradients]) -> None:
    """Leave the sum of all chips' buffers in those of each."""
    for buckets in zip(*(each.buckets for each in gradients), strict=True):
        total = torch.stack([bucket.flat for bucket in buckets]).sum(0)
        for bucket in buckets:
            bucket.flat.copy_(total)


def step(chips: list[tuple[Any, Gradients]], sizes: list[int], *, normalise: bool) -> list[float]:
    """Sum one step over chips that have so many samples each; return the losses."""
    at = 0
    for (model, gradients), size in zip(chips, sizes, strict=True):
        model.zero_grad()
        if size == 0:
            gradients.clear()
        else:
            loss: Any = mse_loss(model(INPUTS[at : at + size]), TARGETS[at : at + size])
            loss.backward()
            weight = size if normalise else size / N_SAMPLES
            gradients.gather(float(loss.detach()), weight, normalise=normalise)
        at += size
    summed([gradients for _, gradients in chips])
    return [gradients.scatter() for _, gradients in chips]


@settings(max_examples=25)
@given(SPLITS, st.booleans())
def test_any_split_gives_the_gradient_and_loss_over_the_whole_batch(
    sizes: list[int], normalise: bool
) -> None:
    """With weights that add up to one, or any that are divided by their sum."""
    model: Any = TwoHeads()
    chips = chips_of(model, len(sizes))
    whole: Any = mse_loss(model(INPUTS), TARGETS)
    whole.backward()

    losses = step(chips, sizes, normalise=normalise)

    assert losses == pytest.approx([whole.item()] * len(sizes), rel=1e-5)
    for replica, _ in chips:
        for mine, expected in zip(replica.parameters(), model.parameters(), strict=True):
            if expected.grad is None:
                assert mine.grad is None
            else:
                assert mine.grad is not None
                torch.testing.assert_close(mine.grad, expected.grad)


def test_all_chips_end_with_the_same_bits() -> None:
    chips = chips_of(TwoHeads(), 3)

    step(chips, [5, 4, 3], normalise=False)

    first, *others = (
        [parameter.grad for parameter in replica.parameters()] for replica, _ in chips
    )
    assert any(grad is not None for grad in first)
    for other in others:
        assert is_same(other, first)


def test_a_parameter_that_only_another_chip_used_gets_that_gradient() -> None:
    chips = chips_of(TwoHeads(), 2)
    (one, of_one), (other, of_other) = chips
    one.never.sum().backward()
    of_one.gather(1.0, 0.25)
    other.first(INPUTS).sum().backward()
    of_other.gather(2.0, 0.75)

    summed([of_one, of_other])
    losses = [of_one.scatter(), of_other.scatter()]

    assert losses == [1.75, 1.75]
    for replica in (one, other):
        assert replica.never.grad.tolist() == [0.25, 0.25]
        assert replica.first.weight.grad is not None
        assert replica.second.weight.grad is None
        assert replica.frozen.grad is None


def test_a_chip_of_weight_0_adds_nothing_whatever_its_gradients_are() -> None:
    """A mean over no words at all is no number, and so are its gradients."""
    chips = chips_of(TwoHeads(), 2)
    (one, of_one), (other, of_other) = chips
    (one.first(INPUTS).sum() * torch.nan).backward()
    of_one.gather(torch.nan, 0.0, normalise=True)
    other.first(INPUTS).sum().backward()
    expected = other.first.weight.grad.clone()
    of_other.gather(2.0, 3.0, normalise=True)

    summed([of_one, of_other])
    losses = [of_one.scatter(), of_other.scatter()]

    assert losses == [2.0, 2.0]
    assert is_same(one.first.weight.grad, other.first.weight.grad)
    torch.testing.assert_close(one.first.weight.grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_each_type_of_parameter_has_a_buffer_of_its_own(dtype: torch.dtype) -> None:
    model: Any = TwoHeads(dtype=dtype)
    chips = chips_of(model, 2)
    learn(mse_loss(model(INPUTS), TARGETS))

    step(chips, [6, 6], normalise=False)

    # `second`; `first` and `never`; beside the last, which are used, which to sum again, and more
    of_dtype, of_float32, rest = (str(dtype)[6:], 10), ("float32", 16 + 2), 5 + 2 + 6
    buckets = [of_dtype, of_float32] if dtype != torch.float64 else [of_float32, of_dtype]
    expected = [(name, n + rest * (index == 1)) for index, (name, n) in enumerate(buckets)]
    assert [(name, n) for n, name in chips[0][1].sizes] == expected
    assert [len(each) for each in chips[0][1].payloads] == [
        n * getattr(torch, name).itemsize for name, n in expected
    ]
    for replica, _ in chips:
        assert replica.second.weight.grad.dtype == dtype
        torch.testing.assert_close(
            replica.second.weight.grad, model.second.weight.grad, rtol=3e-2, atol=3e-2
        )


def test_running_statistics_become_the_mean_over_the_samples() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3, momentum=1.0), torch.nn.Linear(3, 2))
    chips = chips_of(model, 3)

    step(chips, [6, 0, 6], normalise=False)

    expected = (INPUTS[:6].mean(0) + INPUTS[6:].mean(0)) / 2
    for replica, _ in chips:
        torch.testing.assert_close(replica[0].running_mean, expected)


def test_losses_and_statistics_of_float64_keep_their_digits() -> None:
    norm = torch.nn.BatchNorm1d(3, momentum=1.0, dtype=torch.float64)
    inputs = INPUTS.to(torch.float64)
    chips = chips_of(torch.nn.Sequential(norm, torch.nn.Linear(3, 2, dtype=torch.float64)), 2)
    losses = []
    for (replica, gradients), half in zip(chips, torch.split(inputs, 6), strict=True):
        loss: Any = replica(half).square().mean() / 3
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.gather(losses[-1], 0.5)

    summed([gradients for _, gradients in chips])

    for replica, gradients in chips:
        assert gradients.scatter() == pytest.approx(sum(losses) / 2, rel=1e-15)
        mean = (inputs[:6].mean(0) + inputs[6:].mean(0)) / 2
        torch.testing.assert_close(replica[0].running_mean, mean, rtol=1e-14, atol=1e-14)


def test_a_second_step_does_not_see_the_first() -> None:
    model: Any = TwoHeads()
    chips = chips_of(model, 2)
    learn(mse_loss(model(INPUTS), TARGETS))

    step(chips, [6, 6], normalise=False)
    for replica, _ in chips:
        replica.zero_grad(set_to_none=False)  # the gradients stay the views that they are
    losses = step(chips, [6, 6], normalise=False)

    assert len(set(losses)) == 1
    torch.testing.assert_close(chips[0][0].first.weight.grad, model.first.weight.grad)


@pytest.mark.parametrize(
    ("dtype", "sizes"), [(torch.float64, [6, 6]), (torch.float32, [12, 0])], ids=["double", "none"]
)
def test_all_buffers_end_alike_on_all_chips(dtype: torch.dtype, sizes: list[int]) -> None:
    norm = torch.nn.BatchNorm1d(3).to(dtype)
    model = torch.nn.Sequential(norm, torch.nn.Linear(3, 2, dtype=dtype))
    chips = chips_of(model, 2)
    at = 0
    for (replica, gradients), size in zip(chips, sizes, strict=True):
        gradients.clear()
        if size:
            loss = replica(INPUTS[at : at + size].to(dtype)).sum()
            loss.backward()
            gradients.gather(float(loss.detach()), size / N_SAMPLES)
        at += size
    summed([gradients for _, gradients in chips])
    for _, gradients in chips:
        gradients.scatter()

    for one, other in zip(chips[0][0].buffers(), chips[1][0].buffers(), strict=True):
        assert torch.equal(one, other)


class Counters(torch.nn.Module):
    """Buffers of many types; a step adds to some of them, and some no step can add to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.tensor([[float("inf"), -0.0], [float("nan"), 1.0]]))
        self.register_buffer("huge", torch.tensor([2**62 + 1, 3]))
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("short", torch.tensor(1.5, dtype=torch.float16))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("bytes", torch.tensor([7, 8], dtype=torch.uint8))
        self.register_buffer("eight", torch.ones(2).to(torch.float8_e4m3fn))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("complex", torch.tensor([1j, 2.0]))

    def forward(self, x: Any) -> Any:
        buffers = dict(self.named_buffers())
        buffers["huge"][1] += 4
        buffers["short"] += 2
        buffers["turned"] += 1
        buffers["complex"] *= 1j
        return x * self.weight


def test_buffers_of_all_types_change_by_the_mean_and_others_keep_their_bits() -> None:
    chips, before = chips_of(Counters(), 2), dict(Counters().named_buffers())
    for replica, gradients in chips:
        gradients.begin()
        replica(INPUTS[:1]).sum().backward()
        gradients.gather(1.0, 0.5)
    summed([gradients for _, gradients in chips])
    for _, gradients in chips:
        gradients.scatter()

    for replica, _ in chips:
        after = dict(replica.named_buffers())
        assert after["huge"].tolist() == [2**62 + 1, 7]
        assert after["short"].item() == 3.5
        assert torch.equal(after["turned"], before["turned"] + 1)
        assert not after["turned"].is_contiguous()
        assert after["complex"].tolist() == [-1, 2j]
        for name in ("mask", "empty", "flags", "bytes", "eight"):
            bits = [each[name].contiguous().view(torch.uint8) for each in (before, after)]
            assert torch.equal(*bits), name


def test_a_buffer_that_is_not_finite_is_named_and_one_of_another_shape_refused() -> None:
    [(replica, gradients)] = chips_of(Counters(), 1)
    replica.turned[0, 0] = float("inf")
    gradients.gather(1.0, 1.0)

    assert gradients.non_finite() == ["buffer turned"]
    replica.complex *= 1j
    gradients.restore()
    assert is_same(replica.turned, Counters().turned)
    assert is_same(replica.complex, Counters().complex)
    replica.turned = torch.zeros(2)
    with pytest.raises(InputError, match=r"turned was \[3, 2\] of torch.float32 and is \[2\]"):
        gradients.gather(1.0, 1.0)
