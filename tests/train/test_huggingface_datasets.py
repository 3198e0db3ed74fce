"""Hugging Face's `datasets` as the data of a job: by index, and as a stream."""

from typing import Any

import pytest

from packages import needs

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader

from meshmend.train import Job
from meshmend.train.data.sample_source import JobData, SampleSource
from meshmend.train.data.samples import Order, Share, StreamOrder, share_of

pytestmark = [
    needs("datasets"),
    pytest.mark.filterwarnings("ignore:Cannot"),  # of dill, harmless
]

N_SAMPLES = 30


def table() -> Any:
    from datasets import Dataset

    columns = {"x": [float(number) for number in range(N_SAMPLES)], "name": ["a"] * N_SAMPLES}
    return Dataset.from_dict(columns)


def indices_of(source: SampleSource, shares: list[Share]) -> list[int]:
    try:
        batches = [source.batch(share, len(shares) - at) for at, share in enumerate(shares)]
    finally:
        source.close()
    return [int(number) for batch in batches for number in batch["x"].tolist()]


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_data_set_is_read_by_index(n_workers: int) -> None:
    order = Order(N_SAMPLES, 5)
    loader = DataLoader(table(), 8, num_workers=n_workers)
    source = JobData(loader, None).source(order)

    found = indices_of(source, [share_of(8 * step, 8, 1, 2) for step in range(5)])

    wanted = [order.samples(8 * step + 4, 8 * step + 8).tolist() for step in range(5)]
    assert found == [index for step in wanted for index in step]


@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_stream_is_used_once_a_pass_and_shuffled_anew_in_each(n_workers: int) -> None:
    stream = table().to_iterable_dataset(num_shards=3).shuffle(seed=7, buffer_size=10)
    data = JobData(DataLoader(stream, 6, num_workers=n_workers), None)
    assert data.n_samples is None

    by_rank = [
        indices_of(
            data.source(StreamOrder(0)), [share_of(6 * step, 6, rank, 2) for step in range(10)]
        )
        for rank in range(2)
    ]

    found = [
        by_rank[rank][3 * step + at] for step in range(10) for rank in range(2) for at in range(3)
    ]
    assert sorted(found[:N_SAMPLES]) == sorted(found[N_SAMPLES:]) == list(range(N_SAMPLES))
    assert found[:N_SAMPLES] != found[N_SAMPLES:]


def test_a_job_trains_on_a_stream() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    job = Job(model, optimizer, DataLoader(table().to_iterable_dataset(), 10), steps=6)

    seen: list[float] = []
    for batch in job:
        seen += batch["x"].tolist()
        loss = model(batch["x"].float()[:, None]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        job.step(loss)

    assert seen == [float(number) for number in range(N_SAMPLES)] * 2
