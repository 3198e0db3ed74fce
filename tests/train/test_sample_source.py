"""The data of a job: a data set, a stream or a loader give the same samples, made ahead or not."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from augmented_samples import N_SAMPLES, Augmented, drawn
from meshmend.errors import InputError, LoaderError
from meshmend.train import Job
from meshmend.train.data.loader_source import LoaderSource
from meshmend.train.data.sample_source import JobData, SampleSource
from meshmend.train.data.samples import Order, Share, StreamOrder, share_of


class Stream(IterableDataset[Any]):
    """Splits itself among loader workers, as the manual of PyTorch says."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        split = (info.id, info.num_workers) if info else (0, 1)
        return map(drawn, range(split[0], 23, split[1]))


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise ValueError("sample 13 is bad")
        return index


def source_of(data: Any, order: Order | StreamOrder | None = None) -> SampleSource:
    dataset = data.dataset if isinstance(data, DataLoader) else data
    is_stream = isinstance(dataset, IterableDataset)
    return JobData(data, None).source(order or (StreamOrder(3) if is_stream else Order(50, 3)))


def shares() -> list[Share]:
    """Return what a chip asks for: two changes of its generation, and a restore of step 0."""
    steps = [share_of(8 * step, 8, 1, 2) for step in range(6)]
    fewer = [share_of(8 * step, 8, 0, 1) for step in range(5, 9)]
    again = [share_of(8 * step, 8, 2, 3) for step in range(8, 10)]
    return [*steps, *fewer, *again, share_of(0, 8, 1, 2), share_of(8, 8, 1, 2)]


@pytest.mark.parametrize(
    ("dataset", "loader"),
    [
        (Augmented(), DataLoader(Augmented(), num_workers=2)),
        (Augmented(), DataLoader(Augmented(), num_workers=2, prefetch_factor=5)),
        (Augmented(), DataLoader(Augmented())),
        (Augmented(), DataLoader(Augmented(), 8, drop_last=True, num_workers=1)),
        (Stream(), DataLoader(Stream(), num_workers=1)),
        (Stream(), DataLoader(Stream())),
    ],
)
def test_loader_workers_make_the_samples_of_each_share_and_no_others(
    dataset: Any, loader: Any
) -> None:
    plain, ahead = source_of(dataset), source_of(loader)
    try:
        for number, share in enumerate(shares()):
            n_steps = 10 - number % 6
            assert torch.equal(ahead.batch(share, n_steps), plain.batch(share, n_steps))
    finally:
        ahead.close()


def test_the_random_numbers_of_a_sample_depend_on_its_place_and_not_on_its_share() -> None:
    source = source_of(Augmented())

    whole = source.batch(share_of(48, 8, 0, 1), 1)  # the end of one epoch, the start of the next
    parts = [source.batch(share_of(48, 8, rank, 3), 1) for rank in range(3)]

    assert torch.equal(torch.cat(parts), whole)
    assert len(set(whole[:, 1].tolist())) == 8


def test_an_error_in_a_sample_is_raised_where_that_sample_is_used() -> None:
    source = source_of(DataLoader(Failing(), num_workers=1, prefetch_factor=4), Order(50))
    place = Order(50).samples(0, 50).tolist().index(13)
    try:
        for start in range(0, place - place % 4, 4):
            source.batch(Share(start, start + 4, 4), 99)
        with pytest.raises(ValueError, match="sample 13 is bad"):
            source.batch(Share(place - place % 4, place - place % 4 + 4, 4), 99)
        source.batch(Share(place + 1, place + 2, 1), 99)
    finally:
        source.close()


def test_a_loader_worker_that_is_killed_while_it_is_read_from_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel closes the connection of a killed process before it tells of its death."""
    source = source_of(DataLoader(Augmented(), num_workers=1))
    assert isinstance(source, LoaderSource)
    source.batch(Share(0, 4, 4), 99)
    (worker,) = source._iterator._workers
    monkeypatch.setattr(worker, "is_alive", lambda: True)  # as torch sees it at this moment

    def get(timeout: float) -> Any:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it comes later
        worker.kill()
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(source._iterator._data_queue, "get", get)
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        with pytest.raises(LoaderError, match=f"pid {worker.pid}.* is killed by signal: Killed;"):
            source.batch(Share(4, 8, 4), 99)
    finally:
        signal.signal(signal.SIGCHLD, handler)
        source.close()


def test_a_loader_whose_worker_was_killed_with_a_lock_in_its_hand_is_closed() -> None:
    """A worker takes the lock of the event that ends it whenever it gets a task."""
    source = source_of(DataLoader(Augmented(), num_workers=1))
    assert isinstance(source, LoaderSource)
    source.batch(Share(0, 4, 4), 99)
    source._iterator._workers_done_event._cond.acquire()  # as the killed worker did
    worker = source._iterator._workers[0]

    signal.alarm(60)  # ends the test if it waits for that lock
    source.close()
    signal.alarm(0)

    assert not worker.is_alive()


def test_an_error_in_samples_that_were_made_for_nothing_is_not_raised() -> None:
    place = Order(50).samples(0, 50).tolist().index(13)
    source = source_of(DataLoader(Failing(), num_workers=1, prefetch_factor=8), Order(50))
    try:
        source.batch(Share(place - 1, place, 1), 9)  # the next ones are requested too
        source.batch(Share(place + 1, place + 2, 1), 9)
    finally:
        source.close()


def test_a_loader_worker_sees_the_users_data_set_and_runs_the_users_function() -> None:
    def tell(number: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.told = (number, info.num_workers)  # type: ignore[attr-defined]

    class Told(Augmented):
        told: tuple[int, int] = (-1, -1)

        def __getitem__(self, index: int) -> Any:
            return torch.tensor(self.told)

    source = source_of(DataLoader(Told(), num_workers=2, worker_init_fn=tell))
    try:
        seen = {tuple(source.batch(Share(at, at + 1, 1), 9)[0].tolist()) for at in range(4)}
    finally:
        source.close()

    assert seen == {(0, 2), (1, 2)}


def test_loader_workers_that_a_fork_server_starts_make_the_same_samples() -> None:
    loader = DataLoader(
        Augmented(), num_workers=1, multiprocessing_context="forkserver", collate_fn=torch.stack
    )
    plain, ahead = source_of(Augmented()), source_of(loader)
    try:
        share = share_of(8, 8, 1, 2)
        assert torch.equal(ahead.batch(share, 1), plain.batch(share, 1))
    finally:
        ahead.close()


def test_closing_does_not_wait_for_a_sample_that_takes_long() -> None:
    class Long(Augmented):
        def __getitem__(self, index: int) -> Any:
            if index == Order(50, 3).samples(1, 2)[0]:
                while True:
                    pass
            return index

    source = source_of(DataLoader(Long(), num_workers=1))
    source.batch(Share(0, 1, 1), 9)
    assert isinstance(source, LoaderSource)
    processes = list(source._iterator._workers)

    source.close()

    assert not any(process.is_alive() for process in processes)


def in_order(dataset: Any) -> Any:
    return BatchSampler(SequentialSampler(dataset), 4, False)


D, S = Augmented(), Stream()
REFUSED = [
    (
        DataLoader(D, sampler=WeightedRandomSampler([1.0], 1)),
        "sampler WeightedRandomSampler; leave",
    ),
    (DataLoader(D, sampler=RandomSampler(D, replacement=True)), "draws with replacement; leave it"),
    (DataLoader(D, sampler=RandomSampler(D, num_samples=1)), "sampler with num_samples; leave it"),
    (DataLoader(D, batch_sampler=in_order(D)), "batch_sampler BatchSampler; leave it out: the job"),
    (DataLoader(D, batch_size=None), "batch_size=None; give it the batch_size of a step"),
    (DataLoader(D, generator=torch.Generator()), "generator; leave it out: Job's seed decides"),
    (DataLoader(S, num_workers=2), "num_workers=2 with a stream; use 1: every chip reads"),
    (iter([1]), "a stream that can be read again from its beginning, but got a list_iterator"),
    (7, r"a data set with len\(\) and \[\], an IterableDataset or a DataLoader, but got a int"),
]


@pytest.mark.parametrize(("data", "words"), REFUSED)
def test_what_a_job_cannot_honour_is_refused_in_words_that_help(data: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        JobData(data, None)


def test_a_job_takes_its_batch_from_the_loader_unless_it_is_given() -> None:
    loader = DataLoader(D, 16, shuffle=True)

    assert JobData(loader, None).batch_size(None) == 16
    assert JobData(loader, None).batch_size(64) == 64
    with pytest.raises(InputError, match="Job needs batch=, the samples of a step over all chips"):
        JobData(D, None).batch_size(None)


def test_collate_is_given_to_the_loader_or_to_the_job_but_not_to_both() -> None:
    with pytest.raises(InputError, match="give the DataLoader a collate_fn"):
        JobData(DataLoader(D), torch.stack)


EMPTY: Any = []


@pytest.mark.parametrize("data", [EMPTY, DataLoader(EMPTY)])
def test_an_empty_data_set_is_refused(data: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(InputError, match="training needs at least one sample"):
        Job(model, optimizer, data, batch=1, steps=1)


def test_a_job_without_a_loader_starts_no_process() -> None:
    assert not isinstance(source_of(DataLoader(D)), LoaderSource)
