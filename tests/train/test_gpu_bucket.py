"""Gradients on a GPU: summed like those on the host, without a wait in the backward pass."""

from typing import Any

import pytest
import torch

from meshmend.train.torch.backward_watch import BackwardWatch
from meshmend.train.torch.buckets import GpuBucket
from meshmend.train.torch.gradients import Gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

cuda: Any = torch.cuda  # it has no types
LONG = 200_000_000  # cycles of a GPU, about 0.1 s


def layers(device: str) -> Any:
    torch.manual_seed(2)
    made = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    return made.to(device)


def begun(model: Any) -> tuple[Gradients, BackwardWatch, list[int]]:
    gradients, started = Gradients(model, bucket_bytes=4 * 64 * 65), list[int]()
    watch = BackwardWatch(gradients)
    watch.begin(0.5, started.append)
    return gradients, watch, started


def summed(device: str) -> list[Any]:
    """Return the gradients of one step of one chip, as given back to the parameters."""
    model = layers(device)
    gradients, watch, _ = begun(model)
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(device)
    model(inputs).square().mean().backward()
    watch.end()
    gradients.gather(1.0, 0.5)
    gradients.scatter()
    return [parameter.grad.cpu() for parameter in model.parameters()]


def test_a_bucket_of_a_gpu_holds_what_a_bucket_of_the_host_holds() -> None:
    for mine, other in zip(summed("cuda"), summed("cpu"), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_the_backward_pass_does_not_wait_for_the_gpu_but_the_sums_do() -> None:
    model = layers("cuda")
    gradients, watch, started = begun(model)
    inputs = torch.ones(16, 64, device="cuda")
    torch.cuda.synchronize()

    cuda._sleep(LONG)
    model(inputs).square().mean().backward()

    assert all(isinstance(bucket, GpuBucket) for bucket in gradients.buckets)
    assert started == []  # the first bucket is still being computed
    assert not gradients.buckets[0].is_full
    watch.end()
    assert started == list(range(len(gradients.buckets) - 1))
    assert all(gradients.buckets[number].is_full for number in started)


def test_a_gradient_that_is_freed_at_once_is_copied_all_the_same() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    bucket = GpuBucket(torch.zeros(1 << 20, pin_memory=True), {parameter: "weight"})
    parameter.grad = torch.full_like(parameter, 3.0)
    torch.cuda.synchronize()

    with torch.cuda.stream(bucket._stream):
        cuda._sleep(LONG)
    bucket.fill(2.0)
    parameter.grad = None
    for _ in range(8):  # would take the memory of the gradient
        torch.full((1 << 20,), -1.0, device="cuda")
    bucket.await_full()

    assert (bucket.flat == 6.0).all()


def test_a_chip_without_samples_empties_the_bucket_after_its_last_copy() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1 << 22, device="cuda"))
    bucket = GpuBucket(torch.ones(1 << 22, pin_memory=True), {parameter: "weight"})
    torch.cuda.synchronize()

    cuda._sleep(LONG)
    bucket.give({parameter: True})
    bucket.empty()

    assert parameter.grad is not None
    assert bool(torch.all(parameter.grad == 1))
    assert (bucket.flat == 0).all()
