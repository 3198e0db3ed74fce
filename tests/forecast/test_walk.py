"""The compiled walk does what a slow, plain simulator does, to the nanosecond but for rounding."""

import numpy as np
import pytest

from forecasts import DAY_S, HOUR_S, prices_of, scenario
from meshmend.forecast.answers import FOUR, Answer, answer_named
from meshmend.forecast.forecasting import (
    CAUSES,
    YearRunner,
    forecast,
    outages_of_year,
    year_runner,
)
from meshmend.forecast.machine import machine_of
from meshmend.forecast.scenario import JobModel, RepairModel, Scenario
from meshmend.forecast.walk_arrays import (
    BETWEEN_FAILURES_NS,
    DETECTION_NS,
    FIRST_RULE,
    INTERVAL_NS,
    RECOVERY_NS,
    RESTART_NS,
    SWITCH_IN_NS,
    WRITE_NS,
    Ints,
)
from slow_forecast import SlowJob, slow_walk

JOB = JobModel(
    detection_s=120.0,
    restart_s=900.0,
    recovery_s=30.0,
    checkpoint_every=1800.0,
    checkpoint_write_s=60.0,
)
MIXTURES = tuple(
    map(answer_named, ("spares+sub-mesh", "spares+fault-tolerant", "fault-tolerant:1+spares"))
)
SLOW_REPAIR = RepairModel(1.5 * DAY_S, automatic_s=HOUR_S, automatic_success=0.3)
CASES = {
    "hosts": scenario(
        "8x4", per_1000_days={"host": 60}, repair=SLOW_REPAIR, job=JOB, spares=1, unit=(4, 2)
    ),
    "chips and boards": scenario(
        "4x4",
        per_1000_days={"chip": 20, "board": 20},
        repair=SLOW_REPAIR,
        job=JOB,
        spares=2,
        unit=(2, 2),
    ),
    "links": scenario(
        "3x4",
        per_1000_days={"chip": 15, "link": 15},
        repair=SLOW_REPAIR,
        job=JOB,
        unit=(1, 1),
        spares=1,
    ),
    "torus": scenario(
        "4x5",
        wrap="all",
        per_1000_days={"chip": 20, "link": 10},
        repair=SLOW_REPAIR,
        job=JOB,
        unit=(1, 1),
        spares=2,
    ),
    "three axes": scenario(
        "3x2x4", per_1000_days={"chip": 25}, repair=SLOW_REPAIR, job=JOB, unit=(1, 1, 2), spares=1
    ),
    "a line": scenario("1x8", per_1000_days={"chip": 20}, repair=SLOW_REPAIR, job=JOB, unit=(1, 1)),
    "racks": scenario(
        "4x8",
        per_1000_days={"chip": 5, "rack": 40},
        repair=SLOW_REPAIR,
        job=JOB,
        rack=(4, 2),
        unit=(4, 2),
        spares=1,
    ),
}


def slow_totals(
    runner: YearRunner, asked: Scenario, answer: Answer, events: Ints, start: int, end: int
) -> list[int]:
    rules = runner.rules_of(answer)
    names = {
        "detection": DETECTION_NS,
        "restart": RESTART_NS,
        "recovery": RECOVERY_NS,
        "switch": SWITCH_IN_NS,
        "every": INTERVAL_NS,
        "write": WRITE_NS,
        "between": BETWEEN_FAILURES_NS,
    }
    times = {name: int(rules[place - FIRST_RULE]) for name, place in names.items()}
    job = SlowJob(runner.machine, prices_of(asked, extra_s=0.002), answer, times)
    return slow_walk(job, events, start, end)


@pytest.mark.parametrize("answer", [*FOUR, *MIXTURES], ids=lambda answer: answer.name)
@pytest.mark.parametrize("case", CASES)
def test_every_answer_spends_its_time_as_the_slow_simulator_says(case: str, answer: Answer) -> None:
    asked = CASES[case]
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
    for asked in CASES.values():
        found = forecast(asked, prices_of(asked, extra_s=0.002), [*FOUR, *MIXTURES], n_years=3)

        for each in found.answers:
            assert (each.years_ns >= 0).all()
            assert set(each.years_ns.sum(axis=1)) == {round(365.25 * DAY_S * 1e9)}
            assert list(each.lost) == list(CAUSES)
            assert abs(each.goodput + sum(each.lost.values()) - 1) < 1e-12


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    asked = CASES["hosts"]
    prices = prices_of(asked)

    def years(seed: int) -> list[Ints]:
        found = forecast(asked, prices, n_years=5, seed=seed)
        return [each.years_ns for each in found.answers]

    first, again, other = years(4), years(4), years(5)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not all((a == b).all() for a, b in zip(first, other, strict=True))


def test_all_answers_and_all_rates_see_the_same_failures() -> None:
    """An answer's figures do not depend on which others are asked, nor its luck on its rate."""
    asked = CASES["hosts"]
    prices = prices_of(asked)
    together = forecast(asked, prices, FOUR, n_years=4)

    for each in together.answers:
        (alone,) = forecast(asked, prices, [each.answer], n_years=4).answers
        assert (alone.years_ns == each.years_ns).all()
