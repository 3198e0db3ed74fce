"""Starts sums while the backward pass goes on, each when all gradients of its bucket are there.

Knows buckets and their order, but not how a sum is made. Buckets are started strictly in order, so
all chips start the same sums in the same order, whatever their backward passes compute first.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from meshmend.train.torch.gradients import Gradients

_log = logging.getLogger(__name__)


class BackwardWatch:
    """Watches the backward passes over the parameters of some buckets.

    If gradients change after the sum of their bucket has begun, the sum is made again when the step
    ends. From then on no sum begins before the end of a step.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._is_late = False
        self._is_accumulating = False
        self._scale = 0.0
        self._start: Callable[[int], None] | None = None
        self._next = 0  # the bucket to fill next
        self._n_started = 0  # buckets that were filled, and whose sums have begun
        self._has_gradients = False  # of this step, apart from those that are accumulated
        self._probe: torch.nn.Parameter | None = None  # a parameter whose gradient is looked at
        self._probed = (0, 0)  # its gradient and that one's version after the backward pass
        self._has_warned = False
        self._watch()

    def begin(self, scale: float, start: Callable[[int], None]) -> None:
        """Begin a step; `start(number)` is called for each bucket that can be summed."""
        self._gradients.begin()
        self._scale, self._next, self._n_started, self._has_gradients = scale, 0, 0, False
        self._start = start

    def set_scale(self, scale: float) -> None:
        """Multiply the gradients of this step by another scale."""
        self._scale = scale

    def end(self) -> None:
        """Start the sums of the buckets that are being filled, and no other in this step."""
        self._start_filled(is_patient=True)
        self._start = None

    def check_unchanged(self) -> None:
        """Warn once if the loop has changed gradients after the backward pass, as clipping does.

        That changes all of them, so it is enough to look at one.
        """
        gradient = None if self._probe is None else self._probe.grad
        if gradient is None or self._has_warned or self._probed[0] != id(gradient):
            return
        if self._probed[1] != gradient._version:
            self._has_warned = True
            _log.warning(
                "the loop changes gradients between backward and job.step, so each chip changes "
                "those of its own samples; to clip those of the whole batch, call "
                "job.clip_grad_norm(max_norm) instead of clip_grad_norm_"
            )

    def abandon(self) -> None:
        """Start no further sum in this step, because it does not count."""
        self._start = None

    def flush(self) -> None:
        """Start all buckets but the last now, if the backward pass has begun.

        So what the chips do next comes after the same sums on all of them.
        """
        while self._has_gradients and self._start and self._next < self._n_early:
            self._fill_next()
        self._start_filled(is_patient=True)

    def note_stale(self, numbers: list[int]) -> None:
        """Wait for the end of each step from now on, because sums had to be made again."""
        if numbers and not self._is_late:
            self._is_late = True
            _log.warning(
                "gradients changed after their sum had begun; from now on sums begin in job.step. "
                "To overlap them with the backward pass, call all backward passes but the last "
                "within job.accumulate(), and job.weigh(weight) before the last"
            )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Start no sum in the backward passes within: more of them follow in this step."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def _watch(self) -> None:
        """Watch all parameters, also those that a loop freezes for a while: it may thaw them."""
        trained = [
            (number, parameter)
            for number, bucket in enumerate(self._gradients.buckets)
            for parameter in bucket.parameters
        ]
        if trained:
            self._probe = min((each for _, each in trained), key=torch.Tensor.numel)
            self._probe.register_post_accumulate_grad_hook(self._note_probe)  # type: ignore[no-untyped-call]  # torch's stubs
        for number, parameter in trained if self._n_early else ():
            hook = partial(self._arrived, number)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's stubs

    def _note_probe(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._probed = (id(parameter.grad), parameter.grad._version)

    def _arrived(self, number: int, _parameter: torch.Tensor) -> None:
        """Note that a gradient of a bucket is there; fill and start the buckets that are complete.

        A bucket on a GPU is full some time after it was filled; it is started with a later gradient
        or at the end.
        """
        buckets = self._gradients.buckets
        if self._start is None or self._is_accumulating:
            return
        self._has_gradients = True
        buckets[number].n_missing -= 1
        while (
            not self._is_late and self._next < self._n_early and buckets[self._next].n_missing <= 0
        ):
            self._fill_next()
        self._start_filled(is_patient=False)

    @property
    def _n_early(self) -> int:
        return len(self._gradients.buckets) - 1

    def _fill_next(self) -> None:
        self._gradients.take(self._next, self._scale)
        self._next += 1

    def _start_filled(self, *, is_patient: bool) -> None:
        """Start the buckets that are full, in order; a patient caller waits for them."""
        while self._start is not None and self._n_started < self._next:
            bucket = self._gradients.buckets[self._n_started]
            if is_patient:
                bucket.await_full()
            elif not bucket.is_full:
                return
            self._n_started += 1
            self._start(self._n_started - 1)
