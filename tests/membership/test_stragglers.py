"""Who keeps the others waiting, by given times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.membership.stragglers import Stragglers

A, B, C = (0, 0), (0, 1), (1, 0)


def test_who_is_behind_for_too_long_is_stuck() -> None:
    stragglers = Stragglers(10.0)
    for chip in (A, B, C):
        stragglers.note(chip, (1, 5))
    stragglers.note(A, (1, 6))
    stragglers.note(C, (1, 6))

    assert stragglers.stuck([A, B, C], 100.0) == []
    assert stragglers.stuck([A, B, C], 110.0) == []
    assert stragglers.stuck([A, B, C], 111.0) == [(B, 11.0)]
    assert stragglers.stuck([A, C], 111.0) == []  # B is no member


def test_a_long_step_of_all_is_nobody_s_fault() -> None:
    stragglers = Stragglers(10.0)
    stragglers.note(A, (1, 5))
    stragglers.note(B, (1, 5))

    assert stragglers.stuck([A, B], 0.0) == []
    assert stragglers.stuck([A, B], 1000.0) == []
    stragglers.note(A, (1, 6))  # A is done first: only now B keeps it waiting
    assert stragglers.stuck([A, B], 1001.0) == []
    assert stragglers.stuck([A, B], 1012.0) == [(B, 11.0)]


def test_who_does_not_take_up_a_new_generation_is_behind() -> None:
    stragglers = Stragglers(10.0)
    stragglers.note(A, (2, 0))
    stragglers.note(B, (1, 7))

    stragglers.stuck([A, B], 0.0)
    assert stragglers.stuck([A, B], 11.0) == [(B, 11.0)]


@pytest.mark.parametrize("event", ["moves", "goes", "is excused", "is no member"])
def test_the_time_begins_anew_when_a_worker(event: str) -> None:
    stragglers = Stragglers(10.0)
    stragglers.note(A, (1, 9))
    stragglers.note(B, (1, 5))
    stragglers.stuck([A, B], 0.0)

    if event == "moves":
        stragglers.note(B, (1, 6))
    elif event == "goes":
        stragglers.forget(B)
    elif event == "is no member":
        stragglers.stuck([A], 10.0)
    else:
        stragglers.restart_clocks()

    assert stragglers.stuck([A, B], 11.0) == []


def test_without_patience_nobody_is_ever_stuck() -> None:
    stragglers = Stragglers(0.0)
    stragglers.note(A, (1, 9))
    stragglers.note(B, (1, 5))

    stragglers.stuck([A, B], 0.0)
    assert stragglers.stuck([A, B], 1e9) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.tuples(st.integers(0, 2), st.integers(0, 5))), max_size=40
    )
)
def test_the_furthest_is_never_stuck(notes: list[tuple[int, tuple[int, int]]]) -> None:
    stragglers = Stragglers(1.5)
    latest: dict[tuple[int, ...], tuple[int, int]] = {}
    for now, (number, turn) in enumerate(notes):
        stragglers.note((number,), turn)
        latest[(number,)] = turn
        furthest = max(latest.values())
        for chip, behind_s in stragglers.stuck(list(latest), float(now)):
            assert latest[chip] < furthest
            assert 1.5 < behind_s <= now
