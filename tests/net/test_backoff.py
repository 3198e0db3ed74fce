"""Waits grow up to a longest one, and differ between those who wait."""

import random

from hypothesis import given
from hypothesis import strategies as st

from meshmend.net.backoff import Backoff


@given(st.integers(0, 1000))
def test_waits_double_up_to_the_longest_and_begin_anew(seed: int) -> None:
    backoff = Backoff(0.1, 5.0, random.Random(seed))

    waits = [backoff.next_s() for _ in range(20)]

    for number, wait_s in enumerate(waits):
        most_s = min(0.1 * 2**number, 5.0)
        assert most_s / 2 <= wait_s <= most_s
    backoff.reset()
    assert backoff.next_s() <= 0.1


def test_two_that_begin_together_do_not_stay_together() -> None:
    one, other = Backoff(0.1, 5.0, random.Random(1)), Backoff(0.1, 5.0, random.Random(2))

    assert one.next_s() != other.next_s()
