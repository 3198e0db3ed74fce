"""Sums that begin during the backward pass: their order, and what happens if gradients change."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from meshmend.train.torch.backward_watch import BackwardWatch
from meshmend.train.torch.buckets import MOST_BUCKETS, SMALLEST_BUCKET_BYTES, bucket_layout
from meshmend.train.torch.gradients import Gradients

INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def layers(n_layers: int = 3) -> Any:
    torch.manual_seed(2)
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(n_layers)))


class Chips:
    """Two replicas whose sums are made when both have started them."""

    def __init__(self, model: Any) -> None:
        self.models = [copy.deepcopy(model) for _ in range(2)]
        self.gradients = [Gradients(each, bucket_bytes=4 * 4 * 4) for each in self.models]
        self.watches = [BackwardWatch(each) for each in self.gradients]
        self.started: list[list[int]] = [[], []]

    def begin(self) -> None:
        self.started = [[], []]
        for watch, started in zip(self.watches, self.started, strict=True):
            watch.begin(0.5, started.append)

    def finish(self, weight: float = 0.5, *, normalise: bool = False) -> list[int]:
        """End the step as a job does; return the sums that were made twice."""
        for watch, gradients in zip(self.watches, self.gradients, strict=True):
            watch.end()
            gradients.gather(1.0, weight, normalise=normalise)
        self._sum(range(len(self.gradients[0].buckets)))
        again, other = (gradients.refill_stale() for gradients in self.gradients)
        assert again == other
        self._sum(again)
        for watch, gradients in zip(self.watches, self.gradients, strict=True):
            watch.note_stale(again)
            gradients.scatter()
        return again

    def _sum(self, numbers: Any) -> None:
        for number in numbers:
            one, other = (gradients.buckets[number].flat for gradients in self.gradients)
            one.add_(other)
            other.copy_(one)


def loss_of(model: Any, half: int) -> Any:
    part = slice(4 * half, 4 * half + 4)
    return mse_loss(model(INPUTS[part]), TARGETS[part])


def check_whole_gradient(chips: Chips, model: Any, times: float = 1.0) -> None:
    """Both replicas have the gradient of the mean loss over all samples, some number of times."""
    whole: Any = mse_loss(model(INPUTS), TARGETS)
    whole.backward()
    for replica in chips.models:
        for mine, expected in zip(replica.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, times * expected.grad)


def test_buckets_start_in_order_while_the_backward_pass_goes_on() -> None:
    chips = Chips(layers())
    chips.begin()
    seen: list[list[int]] = []
    first_layer = chips.models[0][0].weight
    first_layer.register_hook(lambda gradient: seen.append(list(chips.started[0])))

    for half, replica in enumerate(chips.models):
        loss_of(replica, half).backward()

    assert seen == [[0, 1]]  # before the gradient of the first layer was there
    assert chips.started == [[0, 1], [0, 1]]
    assert chips.finish() == []
    check_whole_gradient(chips, layers())


def test_a_chip_on_which_a_layer_was_frozen_at_first_starts_the_sums_that_the_others_start() -> (
    None
):
    """A chip that joins may come in a turn in which the loop has frozen it, as that of a GAN does.

    If it started no sums before a gather in the step, the chips would make them in another order.
    """
    model = layers()
    chips = Chips(model)
    first = chips.models[0][1].weight
    first.requires_grad_(False)
    for turn in range(2):
        first.requires_grad_(turn > 0)
        chips.begin()
        first.requires_grad_(True)
        for half, replica in enumerate(chips.models):
            loss_of(replica, half).backward()

        assert chips.started == [[0, 1], [0, 1]]
        chips.finish()
        check_whole_gradient(chips, copy.deepcopy(model))


def test_a_bucket_waits_for_those_before_it_if_a_layer_is_not_used() -> None:
    chips = Chips(layers())
    chips.begin()

    for replica in chips.models:
        replica[0](INPUTS).sum().backward()

    assert chips.started == [[], []]
    assert chips.finish() == []
    assert chips.models[0][0].weight.grad is not None
    assert chips.models[0][2].weight.grad is None


def test_passes_within_accumulate_add_up_and_start_no_sum() -> None:
    chips = Chips(layers())
    chips.begin()

    for half, (replica, watch) in enumerate(zip(chips.models, chips.watches, strict=True)):
        with watch.accumulating():
            loss_of(replica, half).backward()
            assert chips.started[half] == []
        loss_of(replica, half).backward()
        assert chips.started[half] == [0, 1]

    assert chips.finish() == []
    check_whole_gradient(chips, layers(), times=2)


@pytest.mark.parametrize("who", [(0, 1), (1,)], ids=["both chips", "one chip"])
def test_a_second_pass_without_accumulate_is_summed_again_and_is_right(
    who: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    chips = Chips(layers())
    chips.begin()
    for half, replica in enumerate(chips.models):
        loss_of(replica, half).backward()
    for half in who:
        loss_of(chips.models[half], half).backward()

    with caplog.at_level(logging.WARNING):
        again = chips.finish()

    assert again == [0, 1]
    assert "job.accumulate()" in caplog.text
    if who == (0, 1):
        check_whole_gradient(chips, layers(), times=2)
    chips.begin()
    for half, replica in enumerate(chips.models):
        loss_of(replica, half).backward()
    assert chips.started == [[], []]  # it has learned that more may follow
    assert chips.finish() == []
    check_whole_gradient(chips, layers())


def test_gradients_that_the_loop_changes_after_the_pass_are_summed_again() -> None:
    chips = Chips(layers())
    chips.begin()
    for half, replica in enumerate(chips.models):
        loss_of(replica, half).backward()
    for replica in chips.models:
        replica[2].weight.grad.mul_(3)

    again = chips.finish()

    assert again == [0]
    model = layers()
    expected: Any = mse_loss(model(INPUTS), TARGETS)
    expected.backward()
    torch.testing.assert_close(chips.models[0][2].weight.grad, 3 * model[2].weight.grad)
    torch.testing.assert_close(chips.models[0][1].weight.grad, model[1].weight.grad)


def test_a_weight_that_comes_after_the_pass_is_summed_again() -> None:
    chips = Chips(layers())
    chips.begin()
    for half, replica in enumerate(chips.models):
        loss_of(replica, half).backward()

    again = chips.finish(weight=7.0, normalise=True)

    assert again == [0, 1]
    check_whole_gradient(chips, layers())


def test_a_weight_that_comes_before_the_pass_is_not() -> None:
    chips = Chips(layers())
    chips.begin()
    for watch in chips.watches:
        watch.set_scale(7.0)
    for half, replica in enumerate(chips.models):
        loss_of(replica, half).backward()

    assert chips.started == [[0, 1], [0, 1]]
    assert chips.finish(weight=7.0, normalise=True) == []
    check_whole_gradient(chips, layers())


def test_a_step_does_not_add_to_the_sums_of_the_one_before() -> None:
    """Although this loop never calls zero_grad."""
    chips = Chips(layers())
    for _ in range(2):
        chips.begin()
        for half, replica in enumerate(chips.models):
            loss_of(replica, half).backward()
        chips.finish()

    check_whole_gradient(chips, layers())


def test_a_shared_parameter_is_in_one_bucket_and_gets_the_gradient_of_both_uses() -> None:
    model = layers()
    model[2].weight = model[0].weight
    chips = Chips(model)
    chips.begin()

    for half, replica in enumerate(chips.models):
        loss_of(replica, half).backward()

    assert [len(bucket.parameters) for bucket in chips.gradients[0].buckets] == [1, 1]
    assert chips.finish() == []
    check_whole_gradient(chips, copy.deepcopy(model))


def test_a_parameter_that_is_frozen_after_the_job_began_counts_as_unused() -> None:
    chips = Chips(layers())
    for is_frozen in (True, False):
        chips.begin()
        for half, replica in enumerate(chips.models):
            replica[1].weight.requires_grad_(not is_frozen)
            loss_of(replica, half).backward()
        chips.finish()

        assert (chips.models[0][1].weight.grad is None) is is_frozen
    check_whole_gradient(chips, layers())


@pytest.mark.parametrize("n_layers", [1, 7, 30, 200])
def test_the_layout_goes_backwards_in_a_few_buckets_and_depends_on_the_model_alone(
    n_layers: int,
) -> None:
    width = 250  # 250 kB a layer
    parameters = [torch.nn.Parameter(torch.empty(width, width)) for _ in range(n_layers)]

    buckets = bucket_layout(parameters)

    assert [each for _, members in buckets for each in members] == parameters[::-1]
    assert len(buckets) <= MOST_BUCKETS + 1
    total = n_layers * width * width * 4
    for _, members in buckets:
        size = sum(each.nbytes for each in members)
        assert size <= max(SMALLEST_BUCKET_BYTES, total / MOST_BUCKETS)
    assert bucket_layout(parameters) == buckets
