"""What is told of work under way: parts add up and never fall."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.planning.progress import ProgressShares, no_progress


@given(st.lists(st.tuples(st.integers(0, 2), st.none() | st.floats(0, 1)), max_size=30))
def test_pieces_side_by_side_are_told_as_one_part_that_never_falls(
    events: list[tuple[int, float | None]],
) -> None:
    told: list[float | None] = []
    shares = ProgressShares(lambda step, part=None: told.append(part), 3)

    for share, part in events:
        shares.of(share)("step", part)

    parts = [part for part in told if part is not None]
    assert len(parts) == len(events)
    assert parts == sorted(parts)
    assert all(0 <= part <= 1 + 1e-12 for part in parts)


def test_of_pieces_in_turn_the_one_before_is_done() -> None:
    told: list[tuple[str, float | None]] = []

    for name, progress in zip(
        "ab",
        ProgressShares(lambda *each: told.append((each[0], each[1])), 2).in_turn(),
        strict=True,
    ):
        progress(name)
        progress(name, 0.5)

    assert told == [("a", 0.0), ("a", 0.25), ("b", 0.5), ("b", 0.75)]


def test_work_that_tells_nobody_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    shares = ProgressShares(no_progress, 2)

    shares.of(0)("step")
    shares.of(1)("step", 0.5)

    assert capfd.readouterr() == ("", "")
