"""Forecasts agree with theory wherever theory has a formula, within their own intervals."""

import math
from dataclasses import replace

import numpy as np
import pytest

from forecasts import DAY_S, FREE_JOB, HOUR_S, prices_of, scenario
from meshmend.forecast.forecasting import (
    FAULT_TOLERANT,
    FIRE_FIGHTER,
    SPARES,
    Answer,
    AnswerForecast,
    forecast,
    outages_of_year,
    year_runner,
)
from meshmend.forecast.machine import machine_of
from meshmend.forecast.scenario import (
    DALY,
    TRUSTED_CHECKS,
    YEAR_S,
    YOUNG,
    JobModel,
    RepairModel,
    Scenario,
    SlowModel,
    WrongModel,
)
from meshmend.forecast.sweeps import Curve, Sweeper, check_lines

INTERVAL = 3.3  # standard errors: 99.9 %


def answer_of(
    asked: Scenario, answer: Answer, *, n_years: int, year_s: float = YEAR_S
) -> AnswerForecast:
    found = forecast(asked, prices_of(asked), [answer], n_years=n_years, seed=17, year_s=year_s)
    return found.answers[0]


def assert_within(found: AnswerForecast, exact: float, *, bias: float = 2e-5) -> None:
    """Assert that theory lies in the interval; `bias` allows for checkpoints every second."""
    assert 0.0 < found.standard_error < 0.02
    assert abs(found.goodput - exact) <= INTERVAL * found.standard_error + bias


def down_share(rate_per_1000_days: float, repair_s: float) -> float:
    up_s = 1000 * DAY_S / rate_per_1000_days
    return repair_s / (up_s + repair_s)


def repair(mean_s: float = DAY_S, spread: str = "exponential", **more: float) -> RepairModel:
    return RepairModel(mean_s, spread, **more)  # type: ignore[arg-type]  # numbers only


@pytest.mark.parametrize(
    ("rate", "model", "shape"),
    [
        (6.5, repair(), 1.0),
        (20.0, repair(2 * DAY_S), 1.0),
        (6.5, repair(DAY_S, "lognormal"), 1.0),
        (6.5, repair(DAY_S, "fixed"), 1.0),
        (6.5, repair(DAY_S, "lognormal", sigma=1.5), 0.7),
        (20.0, repair(DAY_S), 2.0),
        (6.5, repair(2 * DAY_S, automatic_s=2 * HOUR_S, automatic_success=0.8), 1.0),
        (20.0, repair(DAY_S, "lognormal", automatic_s=6 * HOUR_S, automatic_success=0.3), 0.8),
    ],
)
def test_all_hosts_are_up_as_often_as_their_mean_times_say(
    rate: float, model: RepairModel, shape: float
) -> None:
    """Alternating renewal: the share of time up depends on the means alone."""
    asked = scenario(per_1000_days={"host": rate}, repair=model, shape=shape)

    found = answer_of(asked, FIRE_FIGHTER, n_years=200)

    assert_within(found, (1 - down_share(rate, model.mean_s)) ** 8)


@pytest.mark.parametrize(
    ("n_spares", "rate", "repair_s"),
    [(0, 20, DAY_S), (1, 20, DAY_S), (2, 20, 2 * DAY_S), (3, 40, 2 * DAY_S), (1, 6.5, 3 * DAY_S)],
)
def test_spares_cover_as_many_failures_as_the_binomial_says(
    n_spares: int, rate: float, repair_s: float
) -> None:
    asked = scenario(per_1000_days={"host": rate}, repair=repair(repair_s), spares=n_spares)
    q, n = down_share(rate, repair_s), 8 + n_spares
    exact = sum(math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(n_spares + 1))

    assert_within(answer_of(asked, SPARES, n_years=200), exact)


def repairman(n: int, crews: int, failing: float, repairing: float) -> list[float]:
    """Return the probabilities of k machines down in M/M/c//N."""
    weights = [1.0]
    for k in range(n):
        weights.append(weights[-1] * (n - k) * failing / (min(k + 1, crews) * repairing))
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(
    ("crews", "n_spares", "rate"),
    [(1, 0, 20.0), (2, 0, 60.0), (1, 2, 40.0), (2, 1, 60.0), (3, 3, 100.0)],
)
def test_few_crews_make_failures_wait_as_in_the_machine_repairman_model(
    crews: int, n_spares: int, rate: float
) -> None:
    model = repair(DAY_S, crews=crews)
    asked = scenario(per_1000_days={"host": rate}, repair=model, spares=n_spares)
    down = repairman(8 + n_spares, crews, rate / 1000, 1.0)

    found = answer_of(asked, SPARES if n_spares else FIRE_FIGHTER, n_years=200)

    assert_within(found, sum(down[: n_spares + 1]))


@pytest.mark.parametrize(("rate", "repair_s"), [(6.5, DAY_S), (10.0, 2 * DAY_S)])
def test_going_on_costs_the_chips_that_are_missing(rate: float, repair_s: float) -> None:
    asked = scenario("16x16", per_1000_days={"host": rate}, repair=repair(repair_s))

    found = answer_of(asked, FAULT_TOLERANT, n_years=100)

    assert_within(found, 1 - down_share(rate, repair_s), bias=2e-4)  # a part may be cut off


@pytest.mark.parametrize(
    ("per_day", "every_s", "write_s", "restart_s"),
    [
        (2.0, HOUR_S, 60.0, 600.0),
        (10.0, HOUR_S / 2, 30.0, 300.0),
        (10.0, 2 * HOUR_S, 300.0, 1200.0),
        (0.5, 6 * HOUR_S, 600.0, 0.0),
        (24.0, HOUR_S, 60.0, 60.0),
    ],
)
def test_lost_work_restarts_and_checkpoints_follow_the_renewal_formula(
    per_day: float, every_s: float, write_s: float, restart_s: float
) -> None:
    """Of each time between failures, the whole cycles after the restart are kept."""
    job = JobModel(
        detection_s=0.0,
        restart_s=restart_s,
        checkpoint_every=every_s,
        checkpoint_write_s=write_s,
    )
    asked = scenario(per_1000_days={"host": 1000 * per_day / 8}, repair=repair(0.0), job=job)
    rate, cycle_s = per_day / DAY_S, every_s + write_s
    kept_s = every_s * math.exp(-rate * restart_s) / math.expm1(rate * cycle_s)

    found = answer_of(asked, FIRE_FIGHTER, n_years=20)

    assert_within(found, rate * kept_s)


@pytest.mark.parametrize("every", [YOUNG, DALY])
def test_young_and_daly_choose_an_interval_that_half_and_double_do_not_beat(every: str) -> None:
    def goodput(interval: float | str) -> float:
        job = JobModel(detection_s=0.0, restart_s=300.0, checkpoint_every=interval)
        asked = scenario(per_1000_days={"host": 500.0}, repair=repair(0.0), job=job)
        return answer_of(asked, FIRE_FIGHTER, n_years=20).goodput

    chosen_s = math.sqrt(2 * 60.0 * DAY_S / 4)

    assert goodput(every) > goodput(chosen_s / 2)
    assert goodput(every) > goodput(chosen_s * 2)


@pytest.mark.parametrize(("per_day", "restart_s"), [(0.5, 300.0), (1.0, 600.0)])
def test_the_published_formula_of_effective_time_holds_where_failures_are_rare(
    per_day: float, restart_s: float
) -> None:
    """E[ETTR] = (1 - N r (u0 + i/2)) / (1 + w/i), exact to first order."""
    every_s, write_s = HOUR_S, 60.0
    job = JobModel(
        detection_s=0.0,
        restart_s=restart_s,
        checkpoint_every=every_s,
        checkpoint_write_s=write_s,
    )
    asked = scenario(per_1000_days={"host": 1000 * per_day / 8}, repair=repair(0.0), job=job)
    expected = (1 - per_day / DAY_S * (restart_s + every_s / 2)) / (1 + write_s / every_s)

    found = answer_of(asked, FIRE_FIGHTER, n_years=50)

    assert abs(found.goodput - expected) < 1e-3


@pytest.mark.parametrize(("rate", "check_every"), [(2.0, 0), (10.0, 0), (5.0, 500), (5.0, 40_000)])
def test_only_work_during_which_no_chip_was_wrong_is_kept(rate: float, check_every: int) -> None:
    """Chips go wrong and are found independently of each other; repair takes no time here."""
    model = WrongModel(found_s=3 * DAY_S, one_in=5, check_every=check_every)
    asked = scenario("4x4", per_1000_days={"wrong": rate}, repair=repair(0.0), wrong=model)
    compute_s, full_s = 0.094, 0.006
    step_s = compute_s * (1 + model.compute_share) + full_s
    mean_s, least_s = model.silent_s(step_s)
    silent_s = least_s + mean_s * math.exp(-least_s / mean_s)
    assert least_s == TRUSTED_CHECKS * check_every * step_s
    up_s = 1000 * DAY_S / rate
    exact = (up_s / (up_s + silent_s)) ** 16 * 0.1 / step_s

    found = answer_of(asked, FAULT_TOLERANT, n_years=60)

    assert_within(found, exact, bias=1e-4)
    assert found.lost["checks"] > 0 or not check_every


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("keeps_batch", [False, True])
def test_slow_chips_cost_what_their_number_says(keeps_batch: bool, is_known: bool) -> None:
    """Chips get slow independently of each other, and die of nothing."""
    rate, speed, lasts_s = 20.0, 0.4, 3 * DAY_S
    asked = scenario(
        "4x4",
        per_1000_days={"slow-chip": rate},
        repair=repair(0.0),
        job=replace(FREE_JOB, keeps_batch=keeps_batch),
        slow=SlowModel(chip_speed=speed, lasts_s=lasts_s, is_known=is_known),
    )
    is_slow = lasts_s / (1000 * DAY_S / rate + lasts_s)

    def step_s(n_slow: int) -> float:
        if is_known:
            return 0.094 * 16 / (16 - n_slow * (1 - speed)) + 0.006
        return 0.094 / (speed if n_slow else 1.0) + 0.006

    exact = math.fsum(
        math.comb(16, n) * is_slow**n * (1 - is_slow) ** (16 - n) * 0.1 / step_s(n)
        for n in range(17)
    )

    found = answer_of(asked, FAULT_TOLERANT, n_years=60)

    assert_within(found, exact, bias=1e-4)
    assert found.lost["slow_parts"] == pytest.approx(1 - found.goodput, abs=1e-9)


@pytest.mark.parametrize("is_known", [False, True])
def test_slow_links_make_a_sum_longer(is_known: bool) -> None:
    rate, speed, lasts_s, n_links = 10.0, 0.25, 3 * DAY_S, 24
    asked = scenario(
        "4x4",
        per_1000_days={"slow-link": rate},
        repair=repair(0.0),
        slow=SlowModel(link_speed=speed, lasts_s=lasts_s, is_known=is_known),
    )
    is_slow = lasts_s / (1000 * DAY_S / rate + lasts_s)

    def sum_s(n_slow: int) -> float:
        unknown = 0.006 / speed if n_slow else 0.006
        return min(unknown, 0.006 + 0.004 * n_slow) if is_known else unknown

    exact = math.fsum(
        math.comb(n_links, n)
        * is_slow**n
        * (1 - is_slow) ** (n_links - n)
        * 0.1
        / (0.094 + sum_s(n))
        for n in range(n_links + 1)
    )

    found = answer_of(asked, FAULT_TOLERANT, n_years=60)

    assert_within(found, exact, bias=1e-4)


def test_checks_are_weighed_against_what_they_find() -> None:
    asked = scenario("4x4", per_1000_days={"wrong": 5.0}, repair=repair(0.0), unit=(1, 1))
    base = forecast(asked, prices_of(asked), [FAULT_TOLERANT], n_years=1)

    curve = Sweeper(base).checks_curve()

    assert curve is not None
    goodputs = curve.goodputs["fault-tolerant"]
    best = curve.values[goodputs.index(max(goodputs))]
    # A check costs 0.94 of a step in K; a wrong chip 6.84 K steps, 16 x 5 in 1000 days.
    in_theory = math.sqrt(0.94 / (6.84 * 0.1 * 16 * 5 / (1000 * DAY_S)))
    assert in_theory / 2 <= best <= in_theory * 2
    assert check_lines(curve)[-1] == (
        f"checking shares pays from 4 on; of these, {best:.0f} is best with fault-tolerant, up "
        f"{max(goodputs) - goodputs[-1]:.2%} from no checks"
    )
    seldom = Curve((4.0, math.inf), {"fault-tolerant": (0.8, 0.9)})
    assert check_lines(seldom)[-1] == "checking shares does not pay here"


@pytest.mark.parametrize(("shape", "burst"), [(1.0, 0.0), (0.6, 0.0), (2.0, 0.0), (1.0, 0.3)])
def test_as_many_fail_in_a_year_as_the_rates_say(shape: float, burst: float) -> None:
    """The renewal theorem, from the first day on: no machine starts as if it were new."""
    model, rates = repair(HOUR_S), {"host": 5.0}
    asked = scenario("16x16", per_1000_days=rates, repair=model, shape=shape, burst=burst)
    runner = year_runner(machine_of(asked), prices_of(asked))
    outages, counts = runner.outages(with_spares=False), []
    for year in range(300):
        outages, n_events = outages_of_year(runner, outages, 5, year)
        counts.append(int((outages.events[2 : 3 * n_events : 3] == 0).sum()))
    expected = 32 * 5.0 / 1000 * (runner.warm_up_ns + runner.year_ns) / 1e9 / DAY_S

    error = np.std(counts) / math.sqrt(len(counts))

    assert abs(np.mean(counts) - expected) <= INTERVAL * error + 0.01 * expected


def test_a_free_job_on_a_machine_that_never_fails_loses_nothing() -> None:
    asked = scenario(per_1000_days={"host": 0.0}, repair=repair(), job=FREE_JOB)

    assert answer_of(asked, FIRE_FIGHTER, n_years=2).goodput == 1.0
