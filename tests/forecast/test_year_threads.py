"""Years run in threads: each once, and none after a mistake."""

from collections.abc import Iterator

import pytest

from meshmend.forecast.forecasting import run_years
from meshmend.planning.progress import no_progress


@pytest.mark.parametrize("n_years", [0, 1, 7, 100])
def test_every_year_is_run_once(n_years: int) -> None:
    done: list[int] = []

    run_years(n_years, done.extend, no_progress)

    assert sorted(done) == list(range(n_years))


def test_after_a_mistake_no_thread_goes_on_for_ever() -> None:
    def run(years: Iterator[int]) -> None:
        for year in years:
            if year == 10:
                raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        run_years(10_000, run, no_progress)
