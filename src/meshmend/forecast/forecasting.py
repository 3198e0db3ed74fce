"""Runs a job through many years for each answer, and says where the time went.

Every simulated year is independent of the others and begins, after a warm-up that is not counted,
in the state of a machine that has run for long. All answers see the same years.
"""

import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshmend.errors import InputError
from meshmend.forecast.hole_prices import StepPrices
from meshmend.forecast.machine import NS, Machine, check_failures, machine_of, warm_up_s
from meshmend.forecast.outages import (
    OF_KINDS,
    TOO_MANY,
    OutageArrays,
    fill_outages,
    outage_arrays,
)
from meshmend.forecast.records import Figures, Floats, Ints
from meshmend.forecast.scenario import (
    DALY,
    KINDS,
    SLOW_KINDS,
    SPREADS,
    WRONG,
    YEAR_S,
    YOUNG,
    Scenario,
)
from meshmend.forecast.walk import walk_year
from meshmend.forecast.walk_arrays import (
    ANY_HOLES,
    GO_ON,
    IN_LARGEST_BOX,
    PAIRED_HOLES,
    USEFUL,
    WAIT,
    WalkArrays,
    walk_arrays,
)
from meshmend.planning.progress import ProgressCallback, no_progress

_MIXTURE = re.compile(r"fault-tolerant:(\d{1,4})\+spares")


@dataclass(frozen=True)
class Answer:
    """What a job does about holes: wait, run in a box or go on; whether and when spares fill them.

    `words` say that to a reader. Spares are switched in when there are more than
    `holes_before_spares` holes.
    """

    name: str
    on_holes: int
    words: str
    uses_spares: bool = False
    holes_before_spares: int = 0


FIRE_FIGHTER = Answer("fire-fighter", WAIT, "wait until all is repaired")
SUB_MESH = Answer("sub-mesh", IN_LARGEST_BOX, "train in the largest intact box")
SPARES = Answer("spares", WAIT, "switch in spares; wait if there are none", uses_spares=True)
FAULT_TOLERANT = Answer("fault-tolerant", GO_ON, "go on around the hole")
FOUR = (FIRE_FIGHTER, SUB_MESH, SPARES, FAULT_TOLERANT)
_SPARES_FIRST = "switch in spares; without any, {}".format
_NAMED = {
    answer.name: answer
    for answer in (
        *FOUR,
        Answer("spares+sub-mesh", IN_LARGEST_BOX, _SPARES_FIRST(SUB_MESH.words), uses_spares=True),
        Answer(
            "spares+fault-tolerant", GO_ON, _SPARES_FIRST(FAULT_TOLERANT.words), uses_spares=True
        ),
    )
}


def answer_named(name: str) -> Answer:
    """Return the answer of this name; `fault-tolerant:2+spares` goes on with up to 2 holes.

    Raises:
        InputError: there is no such answer.
    """
    if name in _NAMED:
        return _NAMED[name]
    if match := _MIXTURE.fullmatch(name):
        most = int(match[1])
        words = f"go on with up to {most} holes, then switch in spares"
        return Answer(name, GO_ON, words, uses_spares=True, holes_before_spares=most)
    known = ", ".join([*_NAMED, "fault-tolerant:2+spares"])
    raise InputError(f"--answer needs one of {known}, but got {name!r}")


def answers_named(names: Iterable[str]) -> tuple[Answer, ...]:
    """Return the answers of these names, each once."""
    return tuple(dict.fromkeys(answer_named(name) for name in names))


@dataclass(frozen=True)
class Cause:
    """Where time goes that is not useful: its name, its head in a table, and in words."""

    name: str
    head: str
    words: str


CAUSES = (
    Cause("detection", "detection", "noticing the failure"),
    Cause("restart", "restart", "restart"),
    Cause("lost_work", "lost work", "work done again"),
    Cause("slow_down", "slow sum", "slower sum"),
    Cause("missing_chips", "no chips", "missing chips"),
    Cause("waiting", "waiting", "waiting for repair"),
    Cause("checkpoints", "saving", "checkpoints"),
    Cause("checks", "checking", "checking shares"),
    Cause("slow_parts", "slow parts", "slow chips and links"),
)  # in the order of the places in `totals`, after the useful time
_MOST_YEARS = 1_000_000
_LONGEST_S = 100 * YEAR_S  # between failures


@dataclass(frozen=True, eq=False)
class AnswerForecast:
    """What one answer gives: the time of each year by cause, as whole nanoseconds.

    Column 0 of `years_ns` is useful time, the others go by `CAUSES`.
    """

    answer: Answer
    years_ns: Ints

    @property
    def goodputs(self) -> Floats:
        """The goodput of each year."""
        shares: Floats = self.years_ns[:, USEFUL] / self.years_ns.sum(axis=1)
        return shares

    @cached_property
    def sums_ns(self) -> tuple[int, ...]:
        """The time of all years by cause; 300 years are more than 64 bits of nanoseconds hold."""
        return tuple(sum(column.tolist()) for column in self.years_ns.T)

    @property
    def goodput(self) -> float:
        return self.sums_ns[USEFUL] / sum(self.sums_ns)

    @property
    def standard_error(self) -> float:
        n = len(self.years_ns)
        return float(np.std(self.goodputs, ddof=1)) / math.sqrt(n) if n > 1 else 0.0

    @property
    def lost(self) -> dict[str, float]:
        """The share of all time that each cause took."""
        whole = sum(self.sums_ns)
        return {cause.name: self.sums_ns[at] / whole for at, cause in enumerate(CAUSES, 1)}

    def percentile(self, percent: float) -> float:
        """Return the goodput that so many percent of the years stay below."""
        return float(np.percentile(self.goodputs, percent))

    def summary(self) -> dict[str, Any]:
        """Return the figures as a JSON value."""
        return {
            "name": self.answer.name,
            "goodput": self.goodput,
            "p10": self.percentile(10),
            "p90": self.percentile(90),
            "standard_error": self.standard_error,
            "lost": self.lost,
        }


@dataclass(frozen=True, eq=False)
class Forecast:
    """What each answer gives on the same years, in the order in which they were asked."""

    scenario: Scenario
    prices: StepPrices
    n_periods: int
    answers: tuple[AnswerForecast, ...]
    period: str = "year"  # or `day`
    is_traced: bool = False  # the periods are those of a trace

    @property
    def best(self) -> AnswerForecast:
        """The answer of the highest goodput; of equals the first."""
        return max(self.answers, key=lambda each: each.goodput)

    @property
    def n_failures_per_day(self) -> float:
        """How many parts of the mesh fail in a day, in the mean, while all of it is up."""
        return machine_of(self.scenario).failures_per_s * 86400

    @property
    def checkpoint_every_s(self) -> float:
        """The training time between two checkpoints."""
        return checkpoint_interval_s(self.scenario, _between_s(machine_of(self.scenario)))

    def of(self, name: str) -> AnswerForecast:
        """Return the forecast of the answer with this name."""
        return next(each for each in self.answers if each.answer.name == name)


@dataclass(frozen=True, eq=False)
class YearRunner:
    """Runs years of one machine: what does not change from year to year, and the arrays to walk.

    Not for two threads at the same time.
    """

    machine: Machine
    arrays: WalkArrays
    outage_figures: Figures
    warm_up_ns: int
    year_ns: int

    def rules_of(self, answer: Answer) -> dict[str, int]:
        """Return the rules of an answer, by the fields of the record."""
        scenario = self.machine.scenario
        job, between_s = scenario.job, _between_s(self.machine)
        times_s = {
            "detection_ns": job.detection_s,
            "restart_ns": job.restart_s,
            "recovery_ns": job.recovery_s,
            "switch_in_ns": scenario.spares.switch_in_s,
            "interval_ns": checkpoint_interval_s(scenario, between_s),
            "write_ns": job.checkpoint_write_s,
            "between_failures_ns": between_s,
        }
        times_ns = {name: round(min(time_s * NS, 4e18)) for name, time_s in times_s.items()}
        return times_ns | {
            "on_holes": answer.on_holes,
            "uses_spares": answer.uses_spares,
            "holes_before_spares": answer.holes_before_spares,
            "keeps_batch": job.keeps_batch,
            "support": PAIRED_HOLES if job.algorithm == "ft-two-d" else ANY_HOLES,
        }

    def outages(self, *, with_spares: bool, n_most: int | None = None) -> OutageArrays:
        """Return empty arrays for the outages of a year."""
        machine = self.machine
        n_domains = len(machine.kind_of) if with_spares else len(machine.domains)
        if n_most is None:
            time_s = (self.warm_up_ns + self.year_ns) / NS
            expected = machine.n_failures(time_s, with_spares=with_spares)
            n_most = int(2.4 * expected + 24 * math.sqrt(expected) + 100)
        return outage_arrays(self.outage_figures, machine.kind_of[:n_domains], n_most)

    def walk(
        self, rules: Mapping[str, int], events: Ints, n_events: int, start_ns: int, end_ns: int
    ) -> Ints:
        """Return where the time between two moments went, with the rules of an answer."""
        self.arrays.set_rules(rules)
        walk_year(self.arrays.walk, self.arrays.cells, events, n_events, start_ns, end_ns)
        return self.arrays.spent()


def _between_s(machine: Machine) -> float:
    """Return the mean time between failures of anything in the mesh."""
    rate = machine.failures_per_s
    return min(1.0 / rate, _LONGEST_S) if rate else _LONGEST_S


def checkpoint_interval_s(scenario: Scenario, between_failures_s: float) -> float:
    """Return the training time between two checkpoints: given, Young's, or Daly's."""
    every, write_s = scenario.job.checkpoint_every, scenario.job.checkpoint_write_s
    if not isinstance(every, str):
        return every
    young = math.sqrt(2.0 * write_s * between_failures_s)
    return max(1.0, {YOUNG: young, DALY: young - write_s}[every])


def year_runner(
    machine: Machine, prices: StepPrices, *, year_s: float = YEAR_S, n_log: int = 0
) -> YearRunner:
    """Return what runs years of this machine, each so long; `n_log` changes are written down."""
    checked_s = prices.compute_s * (1.0 + machine.scenario.wrong.compute_share) + prices.full_s
    return YearRunner(
        machine,
        walk_arrays(machine, prices, n_log),
        _outage_figures(machine, checked_s),
        round(warm_up_s(machine.scenario) * NS),
        round(year_s * NS),
    )


def _outage_figures(machine: Machine, step_s: float) -> Figures:
    """Return the figures of failures and repairs by the fields of the record of `outages`."""
    scenario = machine.scenario
    repair, failures = scenario.repair, scenario.failures
    silent_s, least_silent_s = scenario.wrong.silent_s(step_s)
    slow_kinds = [number for kind in SLOW_KINDS if (number := machine.number_of(kind)) >= 0]
    of_kinds = np.zeros((4, len(KINDS)))
    if machine.lives:  # something fails
        of_kinds[:, : len(machine.lives)] = np.transpose(machine.lives)
    return {
        "auto_ns": repair.automatic_s * NS,
        "auto_success": repair.automatic_success,
        "manual_ns": repair.manual_s * NS,
        "spread": SPREADS.index(repair.spread),
        "sigma": repair.sigma,
        "crews": repair.crews,
        "burst": failures.burst,
        "burst_ns": failures.burst_window_s * NS,
        "wrong_kind": machine.number_of(WRONG),
        "silent_ns": silent_s * NS,
        "least_silent_ns": least_silent_s * NS,
        "first_slow_kind": min(slow_kinds, default=len(KINDS)),
        "slow_ns": scenario.slow.lasts_s * NS,
        **dict(zip(OF_KINDS, of_kinds.tolist(), strict=True)),
    }


def check_run(n_years: int, seed: int) -> None:
    """Raise InputError unless the years and the seed are in range."""
    if not 1 <= n_years <= _MOST_YEARS:
        raise InputError(f"--years needs a number from 1 to {_MOST_YEARS}, but got {n_years}")
    if not 0 <= seed < 2**31:
        raise InputError(f"--seed needs a number from 0 to {2**31 - 1}, but got {seed}")


def forecast(
    scenario: Scenario,
    prices: StepPrices,
    answers: Sequence[Answer] = FOUR,
    *,
    n_years: int = 100,
    seed: int = 0,
    year_s: float = YEAR_S,
    progress: ProgressCallback = no_progress,
) -> Forecast:
    """Return what each answer gives over so many years; the same seed gives the same bits.

    Raises:
        InputError: less than one year, a negative seed, or far too many failures.
    """
    check_run(n_years, seed)
    machine = machine_of(scenario)
    check_failures(machine, year_s=year_s)
    runner = year_runner(machine, prices, year_s=year_s)
    rules = [runner.rules_of(answer) for answer in answers]
    results = np.zeros((len(answers), n_years, 1 + len(CAUSES)), dtype=np.int64)
    start_ns, end_ns = runner.warm_up_ns, runner.warm_up_ns + runner.year_ns
    # With spares there is more to repair; where crews are few, that delays all repairs.
    splits = scenario.repair.crews > 0 and scenario.spares.n_units > 0
    for with_spares in (True, False) if splits else (True,):
        chosen = [i for i, a in enumerate(answers) if not splits or a.uses_spares == with_spares]

        def walk(
            years: Iterator[int], chosen: list[int] = chosen, with_spares: bool = with_spares
        ) -> None:
            own_runner = replace(runner, arrays=runner.arrays.copy())
            outages = own_runner.outages(with_spares=with_spares)
            for year in years:
                outages, n = outages_of_year(own_runner, outages, seed, year)
                for i in chosen:
                    found = own_runner.walk(rules[i], outages.events, n, start_ns, end_ns)
                    results[i, year] = found

        run_years(n_years if chosen else 0, walk, progress)
    pairs = zip(answers, results, strict=True)
    return Forecast(scenario, prices, n_years, tuple(AnswerForecast(a, r) for a, r in pairs))


def outages_of_year(
    runner: YearRunner, outages: OutageArrays, seed: int, year: int
) -> tuple[OutageArrays, int]:
    """Return arrays with the transitions of a year, larger ones if need be, and their number."""
    while True:
        horizon_ns = runner.warm_up_ns + runner.year_ns
        n_events = fill_outages(outages.draws, outages.cells, seed, year, horizon_ns)
        if n_events != TOO_MANY:
            return outages, int(n_events)
        with_spares = outages.n_domains > len(runner.machine.domains)
        outages = runner.outages(with_spares=with_spares, n_most=2 * outages.n_most)


def replay(
    runner: YearRunner, answers: Sequence[Answer], events: Ints, periods: Sequence[tuple[int, int]]
) -> tuple[AnswerForecast, ...]:
    """Return what each answer gives on given transitions, one row for each period.

    Events are flat: time in ns, domain, what happens to it. Periods are pairs of moments in ns;
    each is walked from time 0 on.
    """
    results = []
    for answer in answers:
        rules = runner.rules_of(answer)
        rows = [runner.walk(rules, events, len(events) // 3, *period) for period in periods]
        results.append(AnswerForecast(answer, np.array(rows)))
    return tuple(results)


def run_years(
    n_years: int, run: Callable[[Iterator[int]], None], progress: ProgressCallback
) -> None:
    """Call `run` once in each of some threads, together with all years.

    Years do not depend on each other, and the loops run without the interpreter's lock, so which
    thread runs a year changes nothing in its result. If one of them raises, or the user
    interrupts, the others stop after their current year.
    """
    n_threads = max(1, min(len(os.sched_getaffinity(0)), n_years))
    is_over = threading.Event()

    def years(first: int) -> Iterator[int]:
        for year in range(first, n_years, n_threads):
            if is_over.is_set():
                return
            if first == 0 and year // n_threads % 8 == 0:
                progress("simulating years", year / n_years)
            yield year

    with ThreadPoolExecutor(n_threads) as pool:
        try:
            others = [pool.submit(run, years(first)) for first in range(1, n_threads)]
            run(years(0))
            for other in others:
                other.result()
        finally:
            is_over.set()


def chips_bought(scenario: Scenario, answer: AnswerForecast) -> int:
    """Return the chips of the mesh and, where the answer uses them, of the spares."""
    spares = scenario.spares
    extra = spares.n_units * math.prod(spares.unit) if answer.answer.uses_spares else 0
    return scenario.mesh.n_chips + extra


def cost_per_step(result: Forecast, answer: AnswerForecast, price: float) -> float:
    """Return what a step of training costs: all chips bought, for the time it takes in the mean."""
    step_s = result.prices.compute_s + result.prices.full_s
    hours = step_s / 3600.0 / max(answer.goodput, 1e-12)
    return price * chips_bought(result.scenario, answer) * hours


def pricing_words(result: Forecast) -> list[str]:
    """Return what is assumed about the prices of holes and about moving to another box."""
    return [
        f"{result.prices.words}; others cost what the nearest does, several the sum",
        "a job on a sub-mesh moves to a larger box if that pays within the mean time between "
        "failures",
    ]
