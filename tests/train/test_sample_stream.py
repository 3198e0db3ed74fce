"""A stream read by place: each place has one sample, however often it is asked for."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from commanding import meshmend_run
from meshmend.errors import InputError
from meshmend.train.data.sample_maker import SampleStream


class Numbers:
    """Yields numbers with a random part; the passes differ in length and in their first number."""

    def __init__(self) -> None:
        self.n_read = 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in range(7 + self.epoch % 2):
            self.n_read += 1
            yield self.epoch, number, random.random()


PLAIN = SampleStream(Numbers(), 1).samples(0, 60, keep_from=0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(0, 50)), max_size=12))
def test_every_place_has_one_sample_whatever_was_read_before(asks: list[Any]) -> None:
    assert PLAIN is not None
    stream = SampleStream(Numbers(), 1)
    for start, length, keep_from in asks:
        found = stream.samples(start, start + length, keep_from=keep_from)
        assert found == PLAIN[start : start + length]


def test_samples_that_may_be_asked_for_again_are_not_read_again() -> None:
    numbers = Numbers()
    stream = SampleStream(numbers, 0)
    stream.samples(30, 40, keep_from=20)

    n_read = numbers.n_read
    stream.samples(20, 30, keep_from=20)

    assert numbers.n_read == n_read


def test_reading_stops_when_the_samples_are_not_wanted_any_more() -> None:
    numbers = Numbers()

    assert SampleStream(numbers, 0).samples(0, 9, keep_from=0, is_wanted=lambda: False) is None
    assert numbers.n_read == 0


def test_a_batch_may_take_its_samples_apart() -> None:
    stream = SampleStream([{"label": 1}], 0)
    (sample,) = stream.samples(0, 1, keep_from=0) or []
    sample.pop("label")

    assert stream.samples(0, 1, keep_from=0) == [{"label": 1}]


def test_a_stream_that_cannot_be_read_again_says_after_how_many_samples_it_ended() -> None:
    with pytest.raises(InputError, match="the stream ended after 3 and yields none when"):
        SampleStream(iter([1, 2, 3]), 0).samples(0, 4, keep_from=0)


def test_what_was_read_before_a_step_is_known_to_all_that_have_read_it_in_whatever_order() -> None:
    streams = [SampleStream(Numbers(), 1) for _ in range(3)]
    streams[0].samples(40, 44, keep_from=36)
    for start in 0, 12, 24, 36:
        streams[1].samples(start + 4, start + 8, keep_from=start)
    streams[2].samples(30, 50, keep_from=30)
    streams[2].samples(36, 40, keep_from=36)

    found = [stream.seen(40) for stream in streams]

    assert found[0] == found[1] == found[2]
    assert found[0] is not None
    assert SampleStream(Numbers(), 2).seen(40) is None
    other = SampleStream(Numbers(), 2)
    other.samples(40, 44, keep_from=36)
    assert other.seen(40) != found[0]


@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_chip_that_reads_another_stream_than_the_others_is_named_before_the_job_goes_on(
    tmp_path: Path, n_workers: int
) -> None:
    """Its first samples are those of the others: it passes the comparison when it joins."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import os
import torch
from meshmend.train import Job

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for number in range(200):
            if number != 20 or os.environ["MESHMEND_CHIP"] != "0,1":
                yield torch.tensor([float(number)])

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
loader = torch.utils.data.DataLoader(Stream(), 6, num_workers={n_workers})
job = Job(model, optimizer, loader, steps=12, compare_every=5)
for inputs in job:
    loss = model(inputs).mean()
    loss.backward()
    job.step(loss)
""")

    ended = meshmend_run("--elastic", "--mesh", "1x3", str(script))

    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "of its first 30 samples chip (0, 1) has read others than the other 2 chips" in last
    assert "make its __iter__ the same on every chip" in last
