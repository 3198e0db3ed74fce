"""A stream read by place: each place has one sample, however often it is asked for."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

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
