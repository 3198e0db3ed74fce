"""Makes batches of samples, in whatever process calls it; seeds each sample by its place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, TensorDataset

from meshmend.train.data.sample_seed import seed_collation, seed_sample
from meshmend.train.data.sample_stream import SampleStream

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class BatchRequest:
    """Which samples make up a batch: those with these indices, whose places begin at `start`.

    Samples at places from `keep_from` on may be asked for again.
    """

    start: int
    indices: tuple[int, ...]
    keep_from: int


def is_stream(dataset: Any) -> bool:
    """Whether a data set yields samples in its own order, and has none by index."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


class SampleMaker:
    """Makes the batches of a data set. `collate` makes a batch of a list of samples."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self.dataset, self._collate, self._seed = dataset, collate, seed
        self._stream = SampleStream(dataset, seed) if is_stream(dataset) else None
        self._is_plain = isinstance(dataset, list | tuple | TensorDataset)  # draws nothing random

    def batch(self, request: BatchRequest, is_wanted: Callable[[], bool] = lambda: True) -> Any:
        """Return a batch; return None if `is_wanted()` becomes false meanwhile."""
        samples = self._samples(request, is_wanted)
        if samples is None:
            return None
        if not self._is_plain:
            seed_collation(self._seed, request.start)
        return self._collate(samples)

    def sample(self, index: int) -> Any:
        """Return one sample, with its own random numbers; of a stream, one of the first."""
        if self._stream is not None:
            (sample,) = self._stream.samples(index, index + 1, keep_from=0) or [None]
            return sample
        seed_sample(self._seed, index)
        return self.dataset[index]

    def _samples(self, request: BatchRequest, is_wanted: Callable[[], bool]) -> list[Any] | None:
        if self._stream is not None:
            stop, keep_from = request.start + len(request.indices), request.keep_from
            return self._stream.samples(
                request.start, stop, keep_from=keep_from, is_wanted=is_wanted
            )
        samples = []
        for place, index in enumerate(request.indices, request.start):
            if not is_wanted():
                return None
            if not self._is_plain:
                seed_sample(self._seed, place)
            samples.append(self.dataset[index])
        return samples
