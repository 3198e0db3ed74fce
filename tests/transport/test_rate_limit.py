"""Floods pass in few lines, and the last line says how many there were."""

from hypothesis import given
from hypothesis import strategies as st

from meshmend.transport.pacing import RateLimit


def test_the_first_of_a_second_pass_and_the_next_line_counts_the_others() -> None:
    limit = RateLimit(2)

    assert [limit.text_of("no", 10.0 + n / 10) for n in range(5)] == ["no", "no", "", "", ""]
    assert limit.text_of("no", 11.0) == "no; 3 more before it"
    assert limit.text_of("no", 11.1) == "no"


@given(st.lists(st.floats(0, 5), max_size=60).map(sorted), st.integers(1, 5))
def test_no_second_has_more_than_twice_the_limit(times: list[float], most: int) -> None:
    limit = RateLimit(most)

    passed = [at for at in times if limit.lets_pass(at)]

    assert all(sum(at <= other < at + 1.0 for other in passed) <= 2 * most for at in passed)
