"""The compiled walk does what a slow, plain simulator does, to the nanosecond but for rounding."""

from dataclasses import replace

import numpy as np
import pytest

from forecasts import DAY_S, WALK_CASES, prices_of, scenario
from meshmend.forecast.compile_engine import compile_engine
from meshmend.forecast.forecasting import (
    CAUSES,
    FOUR,
    Answer,
    answer_named,
    forecast,
    outages_of_year,
    year_runner,
)
from meshmend.forecast.machine import machine_of
from meshmend.forecast.outages import fill_outages
from meshmend.forecast.records import Ints
from meshmend.forecast.scenario import JobModel, RepairModel
from meshmend.forecast.walk import walk_year
from slow_forecast import slow_totals

MIXTURES = tuple(
    map(answer_named, ("spares+sub-mesh", "spares+fault-tolerant", "fault-tolerant:1+spares"))
)


@pytest.mark.parametrize("answer", [*FOUR, *MIXTURES], ids=lambda answer: answer.name)
@pytest.mark.parametrize("case", WALK_CASES)
def test_every_answer_spends_its_time_as_the_slow_simulator_says(case: str, answer: Answer) -> None:
    asked = WALK_CASES[case]
    runner = year_runner(machine_of(asked), prices_of(asked, extra_s=0.002), year_s=60 * DAY_S)
    start, end = runner.warm_up_ns, runner.warm_up_ns + runner.year_ns
    outages = runner.outages(with_spares=True)
    for year in range(2):
        outages, n = outages_of_year(runner, outages, 3, year)
        events = outages.events[: 3 * n]
        assert n > 20

        quick = runner.walk(runner.rules_of(answer), events, n, start, end)

        slow = slow_totals(runner, asked, answer, events, start, end)
        assert sum(quick) == sum(slow) == runner.year_ns
        assert max(abs(quick - np.array(slow))) <= 20_000  # each rounds parts of a nanosecond


def test_the_time_lost_by_cause_and_the_useful_time_add_up_exactly() -> None:
    for asked in WALK_CASES.values():
        found = forecast(asked, prices_of(asked, extra_s=0.002), [*FOUR, *MIXTURES], n_years=3)

        for each in found.answers:
            assert (each.years_ns >= 0).all()
            assert set(each.years_ns.sum(axis=1)) == {round(365.25 * DAY_S * 1e9)}
            assert list(each.lost) == [cause.name for cause in CAUSES]
            assert abs(each.goodput + sum(each.lost.values()) - 1) < 1e-12


def test_a_thousand_years_add_up_too() -> None:
    """Their nanoseconds are more than 64 bits hold."""
    asked = scenario("2x2", per_1000_days={"chip": 1.0}, repair=RepairModel(DAY_S), unit=(1, 1))

    found = forecast(asked, prices_of(asked), n_years=1000)

    for each in found.answers:
        assert abs(each.goodput + sum(each.lost.values()) - 1) < 1e-12
        assert each.goodput == pytest.approx(each.goodputs.mean(), abs=1e-12)


def test_rates_that_divide_badly_never_give_more_time_than_there_is() -> None:
    """A step of 321 and 20.5 us once gave a rate above 1, and chips that were less than missing."""
    asked = scenario("4x4", per_1000_days={"chip": 2.0}, repair=RepairModel(DAY_S), unit=(1, 1))
    for compute_s in (321e-6, 0.1, 1 / 3, 362.0e-6):
        prices = prices_of(asked, compute_s=compute_s, full_s=20.5e-6)

        for each in forecast(replace(asked, job=JobModel()), prices, n_years=3).answers:
            assert (each.years_ns >= 0).all()


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    asked = WALK_CASES["hosts"]
    prices = prices_of(asked)

    def years(seed: int) -> list[Ints]:
        found = forecast(asked, prices, n_years=5, seed=seed)
        return [each.years_ns for each in found.answers]

    first, again, other = years(4), years(4), years(5)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not all((a == b).all() for a, b in zip(first, other, strict=True))


def test_all_answers_and_all_rates_see_the_same_failures() -> None:
    """An answer's figures do not depend on which others are asked, nor its luck on its rate."""
    asked = WALK_CASES["hosts"]
    prices = prices_of(asked)
    together = forecast(asked, prices, FOUR, n_years=4)

    for each in together.answers:
        (alone,) = forecast(asked, prices, [each.answer], n_years=4).answers
        assert (alone.years_ns == each.years_ns).all()


def test_what_is_compiled_ahead_serves_every_forecast() -> None:
    compile_engine()
    before = [list(kernel.overloads) for kernel in (walk_year, fill_outages)]

    for asked in WALK_CASES.values():
        forecast(asked, prices_of(asked), [*FOUR, *MIXTURES], n_years=1)

    assert [list(kernel.overloads) for kernel in (walk_year, fill_outages)] == before
