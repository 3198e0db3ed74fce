"""Runs a job through many years for each answer, and says where the time went.

Every simulated year is independent of the others and begins, after a warm-up that is not counted,
in the state of a machine that has run for long. All answers see the same years.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshmend.errors import InputError
from meshmend.forecast.answers import FOUR, Answer
from meshmend.forecast.hole_prices import StepPrices
from meshmend.forecast.machine import (
    Machine,
    check_failures,
    hole_arrays,
    machine_of,
    neighbors,
    padded,
    warm_up_s,
)
from meshmend.forecast.outages import TOO_MANY, OutageArrays, fill_outages, outage_arrays
from meshmend.forecast.scenario import DALY, SPREADS, YEAR_S, YOUNG, Scenario
from meshmend.forecast.walk import walk_year
from meshmend.forecast.walk_arrays import (
    ANY_HOLES,
    BETWEEN_FAILURES_NS,
    BIT_OF,
    CHAINS,
    CUT_HOLES,
    CUT_PARTS,
    CUT_TABLES,
    DEAD,
    DETECTION_NS,
    DOMAIN_UNITS,
    DOWN_LINKS,
    FIRST_RULE,
    GRID,
    HOLE_AT,
    HOLE_BOXES,
    HOLE_CHIPS,
    HOLE_EXTRA_NS,
    HOLE_FIRST,
    HOLE_FLAGS,
    HOLES,
    HOLES_BEFORE_SPARES,
    IDLE,
    INTERVAL_NS,
    KEEPS_BATCH,
    LINE,
    LINK_OF,
    MOST_LOG,
    N_ALL_HOLES,
    N_CAUSES,
    N_CHIPS,
    N_CUT_HOLES,
    N_CUT_PARTS,
    N_MESH_DOMAINS,
    N_RULES,
    N_SLOTS,
    N_UNITS,
    NEIGHBORS,
    ON_HOLES,
    PAIRED_HOLES,
    PART,
    PLANE,
    QUEUE,
    RECOVERY_NS,
    RESTART_NS,
    SHAPE,
    SLOT_UNIT,
    SUPPORT,
    SUPPORTED,
    SWITCH_IN_NS,
    TABLE_SIZE,
    UNIT_DOWN,
    UNIT_FIRST,
    UNIT_SLOT,
    USEFUL,
    USES_SPARES,
    WRAP,
    WRITE_NS,
    Floats,
    Ints,
    packed,
)
from meshmend.forecast.year_threads import run_years
from meshmend.planning.progress import ProgressCallback, no_progress

CAUSES = (
    "detection",
    "restart",
    "lost_work",
    "slow_down",
    "missing_chips",
    "waiting",
    "checkpoints",
)  # in the order of the places in `totals`, after the useful time
_NS = 1e9
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
        return {cause: self.sums_ns[at] / whole for at, cause in enumerate(CAUSES, 1)}

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
    """Runs years of one machine: what does not change from year to year, and one array to walk.

    Not for two threads at the same time.
    """

    machine: Machine
    own: Ints
    fig: Floats
    outage_figures: Floats
    warm_up_ns: int
    year_ns: int

    def rules_of(self, answer: Answer) -> Ints:
        """Return the rules of an answer as the array wants them."""
        scenario = self.machine.scenario
        job, rules = scenario.job, np.zeros(N_RULES, dtype=np.int64)
        between_s = _between_s(self.machine)
        figures = {
            DETECTION_NS: job.detection_s,
            RESTART_NS: job.restart_s,
            RECOVERY_NS: job.recovery_s,
            SWITCH_IN_NS: scenario.spares.switch_in_s,
            INTERVAL_NS: checkpoint_interval_s(scenario, between_s),
            WRITE_NS: job.checkpoint_write_s,
            BETWEEN_FAILURES_NS: between_s,
            ON_HOLES: answer.on_holes / _NS,
            USES_SPARES: answer.uses_spares / _NS,
            HOLES_BEFORE_SPARES: answer.holes_before_spares / _NS,
            KEEPS_BATCH: job.keeps_batch / _NS,
            SUPPORT: (PAIRED_HOLES if job.algorithm == "ft-two-d" else ANY_HOLES) / _NS,
        }
        for place, seconds in figures.items():
            rules[place - FIRST_RULE] = round(min(seconds * _NS, 4e18))
        return rules

    def outages(self, *, with_spares: bool, n_most: int | None = None) -> OutageArrays:
        """Return empty arrays for the outages of a year."""
        machine = self.machine
        n_domains = len(machine.kind_of) if with_spares else len(machine.domains)
        if n_most is None:
            time_s = (self.warm_up_ns + self.year_ns) / _NS
            expected = machine.n_failures(time_s, with_spares=with_spares)
            n_most = int(2.4 * expected + 24 * math.sqrt(expected) + 100)
        return outage_arrays(self.outage_figures, machine.kind_of[:n_domains], n_most)

    def walk(self, rules: Ints, events: Ints, n_events: int, start_ns: int, end_ns: int) -> Ints:
        """Return where the time between two moments went, with the rules of an answer."""
        self.own[FIRST_RULE : FIRST_RULE + N_RULES] = rules
        walk_year(self.own, self.fig, events, n_events, start_ns, end_ns)
        return self.own[:N_CAUSES].copy()


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
    repair, failures = machine.scenario.repair, machine.scenario.failures
    figures = [repair.automatic_s * _NS, repair.automatic_success, repair.manual_s * _NS]
    figures += [SPREADS.index(repair.spread), repair.sigma, repair.crews, failures.burst]
    step = np.array([1e-9, 1e-9, prices.compute_s, prices.full_s, *prices.box_s])
    return YearRunner(
        machine,
        _own_array(machine, prices, n_log),
        np.concatenate([step * _NS, np.zeros(3 * n_log)]),
        np.array([*figures, failures.burst_window_s * _NS, *machine.lives]),
        round(warm_up_s(repair) * _NS),
        round(year_s * _NS),
    )


def _own_array(machine: Machine, prices: StepPrices, n_log: int) -> Ints:
    """Return the array of `walk_arrays` for a machine."""
    mesh, holes = machine.scenario.mesh, hole_arrays(machine)
    shape = padded(mesh.shape, 1)
    wraps = padded([w and n > 2 for w, n in zip(mesh.wrap, mesh.shape, strict=True)], 0)
    n_chips, n_holes, n_slots = mesh.n_chips, len(holes.boxes), machine.n_slots
    supported = np.array(prices.is_supported, dtype=bool)
    flags = np.where(supported, holes.flags, holes.flags & ~SUPPORTED)
    singles = {SHAPE + axis: extent for axis, extent in enumerate(shape)}
    singles |= {WRAP + axis: wrap for axis, wrap in enumerate(wraps)}
    singles |= {N_CHIPS: n_chips, N_ALL_HOLES: n_holes, N_MESH_DOMAINS: n_holes - n_slots}
    singles |= {N_UNITS: machine.n_units, N_SLOTS: n_slots, MOST_LOG: n_log}
    singles |= {TABLE_SIZE: max(shape) + 1}
    parts: dict[int, Sequence[int] | Ints] = {
        HOLE_BOXES: holes.boxes.ravel(),
        HOLE_FIRST: holes.first,
        HOLE_CHIPS: holes.chips,
        HOLE_EXTRA_NS: np.rint(prices.extra_s * _NS).astype(np.int64),
        HOLE_FLAGS: flags,
        LINK_OF: holes.link_of,
        UNIT_FIRST: machine.unit_first,
        DOMAIN_UNITS: machine.domain_units,
        CHAINS: np.zeros(2 * n_holes, dtype=np.int64),
        CUT_PARTS: np.zeros(N_CUT_PARTS, dtype=np.int64),
        CUT_HOLES: np.zeros(N_CUT_HOLES, dtype=np.int64),
        CUT_TABLES: np.zeros(6 * (max(shape) + 1), dtype=np.int64),
        GRID: np.zeros(8 * n_chips, dtype=np.int64),
        PLANE: np.zeros(4 * shape[1] * shape[2], dtype=np.int64),
        LINE: np.zeros(2 * shape[2], dtype=np.int64),
        NEIGHBORS: neighbors(shape, wraps).ravel(),
        DOWN_LINKS: np.zeros(3 * n_chips, dtype=np.int64),
        SLOT_UNIT: np.zeros(n_slots, dtype=np.int64),
    }
    parts |= {part: np.zeros(n_holes, dtype=np.int64) for part in (HOLE_AT, HOLES, BIT_OF)}
    parts |= {part: np.zeros(n_chips, dtype=np.int64) for part in (DEAD, PART, QUEUE)}
    of_units = (UNIT_DOWN, UNIT_SLOT, IDLE)  # a bit for each would do for the last
    parts |= {part: np.zeros(machine.n_units + 1, dtype=np.int64) for part in of_units}
    return packed(singles, parts)


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
            own_runner = replace(runner, own=runner.own.copy(), fig=runner.fig.copy())
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
        n_events = fill_outages(outages.own, outages.fig, seed, year, horizon_ns)
        if n_events != TOO_MANY:
            return outages, int(n_events)
        with_spares = outages.n_domains > len(runner.machine.domains)
        outages = runner.outages(with_spares=with_spares, n_most=2 * outages.n_most)


def replay(
    runner: YearRunner, answers: Sequence[Answer], events: Ints, periods: Sequence[tuple[int, int]]
) -> tuple[AnswerForecast, ...]:
    """Return what each answer gives on given transitions, one row for each period.

    Events are flat: time in ns, domain, 1 if it comes up. Periods are pairs of moments in ns; each
    is walked from time 0 on.
    """
    results = []
    for answer in answers:
        rules = runner.rules_of(answer)
        rows = [runner.walk(rules, events, len(events) // 3, *period) for period in periods]
        results.append(AnswerForecast(answer, np.array(rows)))
    return tuple(results)
