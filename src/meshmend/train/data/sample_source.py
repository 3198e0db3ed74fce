"""Where the samples of a job come from: a data set, a stream, or a `DataLoader` around either.

A source makes the batch of a share, and knows neither chips nor generations. A job decides which
samples a chip uses, so a `DataLoader` contributes everything but its sampler.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from meshmend.errors import InputError
from meshmend.train.data.loader_source import N_COMPARED_OF_STREAM, LoaderSource
from meshmend.train.data.sample_maker import BatchRequest, Collate, SampleMaker, is_stream
from meshmend.train.data.samples import Order, Seen, Share, StreamOrder


class SampleSource(Protocol):
    """Makes batches for a job; `InProcessSource` and `LoaderSource` are such."""

    seen: Seen | None  # of a stream, before the step of the last batch

    def batch(self, share: Share, n_steps: int) -> Any:
        """Return the batch of a share, of the first of `n_steps` steps that are still to do."""

    def close(self) -> None:
        """End what works in the background."""

    def __len__(self) -> int:
        """Return how many samples there are; of a stream, how many to compare."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample, for the fingerprint of the job."""


class JobData:
    """The data of a job, as the user gave it: a data set, a stream, or a `DataLoader`.

    Raises:
        InputError: a `DataLoader` has an option that a job cannot honour, or this is no data set.
    """

    def __init__(self, data: Any, collate: Collate | None) -> None:
        self._loader: DataLoader[Any] | None = None
        self._dataset, self.collate = data, collate or default_collate
        if isinstance(data, DataLoader):
            if collate is not None:
                raise InputError(
                    "Job takes collate with a data set, but got it with a DataLoader; give the "
                    "DataLoader a collate_fn"
                )
            check_loader(data)
            self._loader, self._dataset = data, data.dataset
            self.collate = data.collate_fn
        if is_stream(self._dataset):
            if isinstance(self._dataset, Iterator):
                raise InputError(
                    f"Job needs a stream that can be read again from its beginning, but got a "
                    f"{type(self._dataset).__name__}; make an IterableDataset with an __iter__"
                )
        elif not (hasattr(self._dataset, "__len__") and hasattr(self._dataset, "__getitem__")):
            raise InputError(
                f"Job needs a data set with len() and [], an IterableDataset or a DataLoader, but "
                f"got a {type(self._dataset).__name__}"
            )

    @property
    def n_samples(self) -> int | None:
        """The length of the data set; None if it is a stream."""
        return None if is_stream(self._dataset) else len(self._dataset)

    def batch_size(self, wanted: int | None) -> int:
        """Return the samples of a step over all chips: the wanted number, or the loader's."""
        if wanted is not None:
            return wanted
        if self._loader is None or self._loader.batch_size is None:
            raise InputError("Job needs batch=, the samples of a step over all chips together")
        return self._loader.batch_size

    def source(self, order: Order | StreamOrder) -> SampleSource:
        """Return what makes the batches."""
        loader = self._loader
        if loader is not None and loader.num_workers > 0:
            return LoaderSource(loader, order)
        pins = loader is not None and loader.pin_memory and torch.cuda.is_available()
        return InProcessSource(self._dataset, self.collate, order, pins=pins)


class InProcessSource:
    """Makes each batch when it is asked for, in the process of the worker."""

    def __init__(
        self, dataset: Any, collate: Collate, order: Order | StreamOrder, *, pins: bool = False
    ) -> None:
        self._maker, self._order, self._pins = (
            SampleMaker(dataset, collate, order.seed),
            order,
            pins,
        )
        self._n_samples = N_COMPARED_OF_STREAM if is_stream(dataset) else len(dataset)
        self.seen: Seen | None = None

    def batch(self, share: Share, n_steps: int) -> Any:
        """Return the batch of a share."""
        indices = tuple(self._order.samples(share.start, share.stop).tolist())
        keep_from = share.stop - share.batch
        request = BatchRequest(share.start, indices, keep_from, share.position)
        made, self.seen = self._maker.batch(request), self._maker.seen(request)
        return pin_memory(made) if self._pins else made  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """There is nothing to end."""

    def __len__(self) -> int:
        """Return how many samples there are; of a stream, how many to compare."""
        return self._n_samples

    def __getitem__(self, index: int) -> Any:
        """Return one sample; of a stream, one of the first."""
        return self._maker.sample(index)


def check_loader(loader: "DataLoader[Any]") -> None:
    """Raise InputError if a loader has an option that a job cannot honour."""
    for is_so, what, advice in _refusals(loader):
        if is_so:
            raise InputError(f"Job cannot honour the DataLoader's {what}; {advice}")


def _refusals(loader: Any) -> list[tuple[bool, str, str]]:
    """Return each option that a job cannot honour: whether it is set, its name, what to do."""
    streams, sampler = is_stream(loader.dataset), loader.sampler
    is_own = streams or type(sampler) in (RandomSampler, SequentialSampler)
    own_batches = loader.batch_size is None and loader.batch_sampler is not None
    leave_out = "leave it out: the job decides which samples each chip uses"
    return [
        (own_batches, f"batch_sampler {type(loader.batch_sampler).__name__}", leave_out),
        (loader.batch_size is None, "batch_size=None", "give it the batch_size of a step"),
        (not is_own, f"sampler {type(sampler).__name__}", leave_out),
        (
            getattr(sampler, "replacement", False),
            "sampler that draws with replacement",
            "leave it out: a job uses every sample of an epoch once",
        ),
        (
            type(sampler) is RandomSampler and sampler.num_samples != len(loader.dataset),
            "sampler with num_samples",
            "leave it out: a job uses every sample of an epoch once",
        ),
        (
            loader.generator is not None,
            "generator",
            "leave it out: Job's seed decides the order and the random numbers of samples",
        ),
        (
            streams and loader.num_workers > 1,
            f"num_workers={loader.num_workers} with a stream",
            "use 1: every chip reads the stream in order; do costly work in collate_fn, or use a "
            "data set with len() and []",
        ),
    ]
