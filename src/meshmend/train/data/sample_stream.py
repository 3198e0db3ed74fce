"""A data set that is a stream, read by place: what an `IterableDataset` yields, pass after pass.

Every chip reads the whole stream and takes the samples at its places. So each sample is used once,
whatever fails, if all chips read the same stream. Samples that the step in flight may still need
are kept; an earlier place is read again from the beginning.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from meshmend.errors import InputError
from meshmend.train.data.sample_seed import seed_sample


class SampleStream:
    """Reads an iterable by place; the passes over it follow each other without a gap.

    Before each sample the random numbers are seeded by its place. Before each pass,
    `set_epoch(number)` is called if the data set has such a method, as those of Hugging Face do.
    """

    def __init__(self, dataset: Iterable[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._kept: deque[Any] = deque()  # the samples before place `_next`, as many as these
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._epoch = 0

    def samples(
        self,
        start: int,
        stop: int,
        *,
        keep_from: int,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> list[Any] | None:
        """Return the samples at places from `start` to before `stop`; None if not wanted any more.

        Samples from place `keep_from` on may be asked for again; earlier ones may be forgotten.

        Raises:
            InputError: the stream has no samples, or ends and cannot be read again.
        """
        if start < self._next - len(self._kept):
            self._rewind()
        while self._next < stop:
            if not is_wanted():
                return None
            self._read(min(start, keep_from))
        first = self._next - len(self._kept)
        while self._kept and first < min(start, keep_from):
            self._kept.popleft()
            first += 1
        # Copies: whoever makes a batch may take parts out of its samples.
        return [copy.copy(self._kept[place - first]) for place in range(start, stop)]

    def _read(self, keep_from: int) -> None:
        """Read the sample at the next place; keep it if it is not before `keep_from`."""
        sample = self._next_sample()
        if self._next >= keep_from:
            self._kept.append(sample)
        else:
            self._kept.clear()
        self._next += 1

    def _next_sample(self) -> Any:
        seed_sample(self._seed, self._next)
        iterator = self._begin_pass(0) if self._iterator is None else self._iterator
        for sample in iterator:
            return sample
        return self._first_of_next_pass()

    def _first_of_next_pass(self) -> Any:
        for sample in self._begin_pass(self._epoch + 1):
            return sample
        raise InputError(
            f"a job that has not ended needs more samples, but the stream ended after {self._next} "
            "and yields none when it is read again; make an IterableDataset whose __iter__ begins "
            "anew, or do fewer steps"
        )

    def _rewind(self) -> None:
        """Begin again with the first sample of the first pass."""
        self._kept.clear()
        self._iterator, self._next = None, 0

    def _begin_pass(self, epoch: int) -> Iterator[Any]:
        self._epoch = epoch
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        self._iterator = iter(self._dataset)
        return self._iterator
