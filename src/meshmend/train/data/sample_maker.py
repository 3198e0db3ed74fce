"""Makes batches of samples, in whatever process calls it; each sample is seeded by its place.

So random augmentation does not depend on the chip or the process that makes the sample: a step done
again, or shared out among fewer chips, has the same samples.

A data set that is a stream is read by place too. Every chip reads the whole stream and takes the
samples at its places. So each sample is used once, whatever fails, if all chips read the same
stream. Samples that the step in flight may still need are kept; an earlier place is read again from
the beginning.
"""

import copy
import hashlib
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import IterableDataset, TensorDataset

from meshmend.errors import InputError
from meshmend.train.data.random_numbers import seed_all
from meshmend.train.data.samples import Seen

Collate = Callable[[list[Any]], Any]

# What is hashed of a stream: that costs less than a tenth of what it costs to seed its samples.
_HASHED_EVERY: Final = 8  # samples; who reads other samples reads other ones of these too
_MOST_HASHED: Final = 256  # elements of an array
_MOST_PARTS: Final = 32  # of a list or a dict


@dataclass(frozen=True)
class BatchRequest:
    """Which samples make up a batch: those with these indices, whose places begin at `start`.

    Samples at places from `keep_from` on may be asked for again. The step begins at `position`.
    """

    start: int
    indices: tuple[int, ...]
    keep_from: int
    position: int = 0


def hashed(sample: Any, before: int = 0) -> int:
    """Return a hash of a sample and of those before it; of large arrays it looks at some elements.

    What is neither an array, a number, text nor bytes counts by its type alone: nobody knows
    which part of it is the sample.
    """
    if isinstance(sample, dict | list | tuple):
        parts = list(sample.items()) if isinstance(sample, dict) else sample
        found = zlib.crc32(b"%d" % len(parts), before)
        for each in parts[:: -(-len(parts) // _MOST_PARTS) or 1]:
            found = hashed(each, found)
        return found
    if isinstance(sample, torch.Tensor):
        try:
            sample = sample.detach().resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError):  # of a device, or a type that NumPy has not
            return zlib.crc32(repr(sample.shape).encode(), before)
    if isinstance(sample, np.ndarray | np.generic) and sample.dtype != object:
        if sample.size > _MOST_HASHED:
            sample = sample.reshape(-1)[:: sample.size // _MOST_HASHED]
        return zlib.crc32(sample.tobytes(), before)
    if isinstance(sample, bytes):
        return zlib.crc32(sample[:_MOST_HASHED], before)
    if isinstance(sample, str):
        return zlib.crc32(sample[:_MOST_HASHED].encode(errors="replace"), before)
    is_number = sample is None or isinstance(sample, bool | int | float)
    return zlib.crc32(repr(sample if is_number else type(sample)).encode(), before)


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
            _seed("batch", self._seed, request.start)
        return self._collate(samples)

    def seen(self, request: BatchRequest) -> Seen | None:
        """Return what was read of a stream before the step of a batch that was made."""
        return None if self._stream is None else self._stream.seen(request.position)

    def sample(self, index: int) -> Any:
        """Return one sample, with its own random numbers; of a stream, one of the first."""
        if self._stream is not None:
            (sample,) = self._stream.samples(index, index + 1, keep_from=0) or [None]
            return sample
        _seed("sample", self._seed, index)
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
                _seed("sample", self._seed, place)
            samples.append(self.dataset[index])
        return samples


class SampleStream:
    """Reads an iterable by place; the passes over it follow each other without a gap.

    Before each sample the random numbers are seeded by its place. Before each pass,
    `set_epoch(number)` is called if the data set has such a method, as those of Hugging Face do.
    """

    def __init__(self, dataset: Iterable[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._kept: deque[Any] = deque()  # the samples before place `_next`, as many as these
        self._hashes: deque[int] = deque()  # of all that was read before each of these
        self._hash = 0
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
            self._hashes.popleft()
            first += 1
        # Copies: whoever makes a batch may take parts out of its samples.
        return [copy.copy(self._kept[place - first]) for place in range(start, stop)]

    def seen(self, place: int) -> Seen | None:
        """Return what was read before a place, or None if that is not known any more."""
        at = place - (self._next - len(self._hashes))
        return Seen(place, self._hashes[at]) if 0 <= at < len(self._hashes) else None

    def _read(self, keep_from: int) -> None:
        """Read the sample at the next place; keep it if it is not before `keep_from`."""
        sample = self._next_sample()
        if self._next >= keep_from:
            self._kept.append(sample)
            self._hashes.append(self._hash)
        else:
            self._kept.clear()
            self._hashes.clear()
        if self._next % _HASHED_EVERY == 0:
            self._hash = hashed(sample, self._hash)
        self._next += 1

    def _next_sample(self) -> Any:
        _seed("sample", self._seed, self._next)
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
        self._hashes.clear()
        self._iterator, self._next, self._hash = None, 0, 0

    def _begin_pass(self, epoch: int) -> Iterator[Any]:
        self._epoch = epoch
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        self._iterator = iter(self._dataset)
        return self._iterator


def _seed(what: str, seed: int, place: int) -> None:
    """Seed all random numbers for the sample at a place of the row, or the batch from there on."""
    words = f"{what} {seed} {place}".encode()
    seed_all(int.from_bytes(hashlib.blake2b(words, digest_size=4).digest(), "little"))
