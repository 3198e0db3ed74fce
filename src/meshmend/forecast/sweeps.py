"""The same forecast for other repair times, failure rates, spares and sizes of the machine.

All points see the same draws, so curves are smooth, and answers change places where they should.
Each point simulates about as many failures, not as many years, so that rare failures are not
simulated coarsely and frequent ones not for ever.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshmend.forecast.forecasting import Answer, Forecast, forecast
from meshmend.forecast.hole_prices import StepPrices
from meshmend.forecast.machine import machine_of
from meshmend.forecast.scenario import DAY_S, WRONG, YEAR_S, Scenario
from meshmend.planning.progress import ProgressCallback, no_progress
from meshmend.topology.mesh import Mesh
from meshmend.units import counted, format_duration

CURVE_FACTORS = tuple(2.0 ** (k / 2) for k in range(-6, 7))
MAP_FACTORS = tuple(2.0 ** (k * 2 / 3) for k in range(-3, 4))
_CURVE_FAILURES, _MAP_FAILURES = 1500, 500
_N_PARTS = 4
_MOST_SPARES = 12
_MOST_CHIPS = 16384
CHECK_INTERVALS = tuple(4**k for k in range(1, 10))
_CHECK_EVENTS, _MOST_CHECK_YEARS = 200, 400  # wrong chips


@dataclass(frozen=True)
class Curve:
    """The goodput of each answer at each value of one input."""

    values: tuple[float, ...]
    goodputs: dict[str, tuple[float, ...]]

    def best(self, at: int) -> str:
        """Return the best answer at a value; of equals the first."""
        return max(self.goodputs, key=lambda name: self.goodputs[name][at])


@dataclass(frozen=True)
class BreakEven:
    """The value of one input at which the best answer changes."""

    value: float
    below: str
    above: str


def with_failures(scenario: Scenario, factor: float) -> Scenario:
    """Return the scenario with everything failing so many times as often."""
    model = scenario.failures
    rates = {kind: rate * factor for kind, rate in model.per_1000_days.items()}
    return replace(scenario, failures=replace(model, per_1000_days=rates))


def with_repair(scenario: Scenario, factor: float) -> Scenario:
    """Return the scenario with every repair taking so many times as long."""
    model = scenario.repair
    slower = replace(
        model, manual_s=model.manual_s * factor, automatic_s=model.automatic_s * factor
    )
    return replace(scenario, repair=slower)


def with_spares(scenario: Scenario, n_units: int) -> Scenario:
    """Return the scenario with so many spares."""
    return replace(scenario, spares=replace(scenario.spares, n_units=n_units))


def with_chips(scenario: Scenario, doublings: int) -> Scenario | None:
    """Return the scenario on a machine doubled or halved so often, or None if it cannot be.

    The longest axis is halved and the shortest doubled; spares grow in proportion.
    """
    shape, parts = list(scenario.mesh.shape), scenario.spares.unit
    for _ in range(abs(doublings)):
        if doublings > 0:
            axis = min(range(len(shape)), key=lambda a: shape[a])
            shape[axis] *= 2
        else:
            axis = max(range(len(shape)), key=lambda a: shape[a])
            shape[axis] //= 2
    n_chips, share = math.prod(shape), 2.0**doublings
    fits = all(
        size >= 2 * part and size % part == 0 for size, part in zip(shape, parts, strict=True)
    )
    if not fits or n_chips > _MOST_CHIPS or scenario.rack != scenario.mesh.shape:
        return None
    spares = replace(scenario.spares, n_units=max(1, round(scenario.spares.n_units * share)))
    mesh = Mesh(tuple(shape), scenario.mesh.wrap)
    return replace(scenario, mesh=mesh, rack=mesh.shape, spares=spares)


@dataclass(frozen=True)
class Sweeper:
    """Runs sweeps around one forecast."""

    base: Forecast
    seed: int = 0

    @property
    def _answers(self) -> list[Answer]:
        return [each.answer for each in self.base.answers]

    def repair_curve(self, progress: ProgressCallback = no_progress) -> Curve:
        """Return goodput against the mean repair time, in seconds."""
        mean_s = self.base.scenario.repair.mean_s
        return self._curve(
            [(mean_s * f, with_repair(self.base.scenario, f)) for f in CURVE_FACTORS], progress
        )

    def failure_curve(self, progress: ProgressCallback = no_progress) -> Curve:
        """Return goodput against the failures of the whole mesh in a day."""
        per_day = self.base.n_failures_per_day
        return self._curve(
            [(per_day * f, with_failures(self.base.scenario, f)) for f in CURVE_FACTORS], progress
        )

    def spares_curve(self, progress: ProgressCallback = no_progress) -> Curve:
        """Return goodput against the number of spares."""
        most = max(4, min(_MOST_SPARES, 2 * self.base.scenario.spares.n_units))
        points = [(float(n), with_spares(self.base.scenario, n)) for n in range(most + 1)]
        return self._curve(points, progress)

    def chips_curve(self, progress: ProgressCallback = no_progress) -> Curve:
        """Return goodput against the chips of the mesh, hosts and rates as they are."""
        points = []
        for doublings in range(-3, 4):
            scenario = with_chips(self.base.scenario, doublings)
            if scenario is not None:
                points.append((float(scenario.mesh.n_chips), scenario))
        return self._curve(points, progress)

    def checks_curve(self, progress: ProgressCallback = no_progress) -> Curve | None:
        """Return goodput against how seldom shares are checked, the last without any: infinite.

        None if no chip computes wrong numbers.
        """
        scenario = self.base.scenario
        per_year = scenario.failures.per_1000_days.get(WRONG, 0.0) * scenario.mesh.n_chips * 0.36525
        if not per_year:
            return None
        n_years = min(max(_N_PARTS, math.ceil(_CHECK_EVENTS / per_year)), _MOST_CHECK_YEARS)
        found = []
        for at, every in enumerate((*CHECK_INTERVALS, 0)):
            asked = replace(scenario, wrong=replace(scenario.wrong, check_every=every))
            found.append(
                forecast(asked, self.base.prices, self._answers, n_years=n_years, seed=self.seed)
            )
            progress("checking more seldom", (at + 1) / (len(CHECK_INTERVALS) + 1))
        return Curve((*map(float, CHECK_INTERVALS), math.inf), self._goodputs(found))

    def slow_curve(self, progress: ProgressCallback = no_progress) -> Curve | None:
        """Return goodput if slow chips and links are not known (0), and if they are (1).

        None if none gets slow, and for tiles, whose shares are equal.
        """
        scenario = self.base.scenario
        if not scenario.has_slow_parts or scenario.job.tile:
            return None
        found = []
        for is_known in (False, True):
            asked = replace(scenario, slow=replace(scenario.slow, is_known=is_known))
            prices, n_years = self.base.prices, self.base.n_periods
            found.append(forecast(asked, prices, self._answers, n_years=n_years, seed=self.seed))
            progress("simulating slow parts", (1 + is_known) / 2)
        return Curve((0.0, 1.0), self._goodputs(found))

    def winner_map(self, progress: ProgressCallback = no_progress) -> list[list[str]]:
        """Return the best answer for each failure rate (row) and repair time, by MAP_FACTORS."""
        rows = []
        for row, failures in enumerate(MAP_FACTORS):
            names = []
            for repairs in MAP_FACTORS:
                scenario = with_repair(with_failures(self.base.scenario, failures), repairs)
                names.append(self._run(scenario, _MAP_FAILURES).best.answer.name)
            progress("comparing rates and repair times", (row + 1) / len(MAP_FACTORS))
            rows.append(names)
        return rows

    def _curve(self, points: Sequence[tuple[float, Scenario]], progress: ProgressCallback) -> Curve:
        found = []
        for at, (_, scenario) in enumerate(points):
            found.append(self._run(scenario, _CURVE_FAILURES))
            progress("simulating other machines", (at + 1) / len(points))
        return Curve(tuple(value for value, _ in points), self._goodputs(found))

    def _goodputs(self, found: Sequence[Forecast]) -> dict[str, tuple[float, ...]]:
        return {
            answer.name: tuple(each.answers[i].goodput for each in found)
            for i, answer in enumerate(self._answers)
        }

    def _run(self, scenario: Scenario, n_failures: int) -> Forecast:
        per_s = machine_of(scenario).failures_per_s
        whole_s = n_failures / per_s if per_s else YEAR_S
        part_s = min(max(whole_s / _N_PARTS, 20 * DAY_S), 5 * YEAR_S)
        prices = self._prices(scenario)
        return forecast(
            scenario, prices, self._answers, n_years=_N_PARTS, seed=self.seed, year_s=part_s
        )

    def _prices(self, scenario: Scenario) -> StepPrices:
        """Return the prices of the base; on a machine of another size all holes cost their mean."""
        prices = self.base.prices
        if scenario.mesh == self.base.scenario.mesh:
            return prices
        n = len(machine_of(scenario).holes)
        extra = np.full(n, prices.extra_s.mean() if len(prices.extra_s) else 0.0)
        return replace(prices, extra_s=extra, is_supported=(all(prices.is_supported),) * n)


def break_evens(
    curve: Curve,
    bend: Callable[[float], float] = math.log,
    back: Callable[[float], float] = math.exp,
) -> list[BreakEven]:
    """Return where the best answer changes, between points by a straight line over `bend`."""
    found = []
    for at in range(len(curve.values) - 1):
        below, above = curve.best(at), curve.best(at + 1)
        if below == above or curve.values[at] == curve.values[at + 1]:
            continue
        before = curve.goodputs[below][at] - curve.goodputs[above][at]
        after = curve.goodputs[below][at + 1] - curve.goodputs[above][at + 1]
        share = before / (before - after) if before != after else 0.5
        low, high = bend(curve.values[at]), bend(curve.values[at + 1])
        found.append(BreakEven(back(low + share * (high - low)), below, above))
    return found


def slow_lines(slow: Curve) -> list[str]:
    """Return what it is worth to know of slow chips and links, a sentence for each answer."""
    return [
        f"slow chips and links known: {known:.2%} with {name}, up {known - unknown:.2%} from not"
        for name, (unknown, known) in slow.goodputs.items()
    ]


def check_lines(checks: Curve) -> list[str]:
    """Return what checking shares is worth to the best answer, and how often, as sentences."""
    at = max(range(len(checks.values)), key=lambda i: checks.goodputs[checks.best(i)][i])
    goodputs = checks.goodputs[checks.best(at)]
    told = [
        f"check-shares {every:.0f}: {goodput:.2%}"
        for every, goodput in zip(checks.values[:-1], goodputs, strict=False)
    ]
    unchecked = goodputs[-1]
    pays = [
        every for every, goodput in zip(checks.values, goodputs, strict=True) if goodput > unchecked
    ]
    if not pays:
        verdict = "checking shares does not pay here"
    else:
        verdict = (
            f"checking shares pays from {pays[0]:.0f} on; of these, {checks.values[at]:.0f} is "
            f"best with {checks.best(at)}, up {goodputs[at] - unchecked:.2%} from no checks"
        )
    return [*told, f"no checks: {unchecked:.2%}", verdict]


def change_lines(repairs: Curve, failures: Curve, spares: Curve) -> list[str]:
    """Return where the best answer changes, as sentences; none if it stays the same."""
    lines = [
        f"repair in {format_duration(each.value)}: below it {each.below} is best, above it "
        f"{each.above}"
        for each in break_evens(repairs)
    ]
    lines += [
        f"{each.value:.3g} failures a day: below it {each.below} is best, above it {each.above}"
        for each in break_evens(failures)
    ]
    lines += [
        f"{counted(math.floor(each.value) + 1, 'spare')}: with fewer {each.below} is best, with as "
        f"many {each.above}"
        for each in break_evens(spares, float, float)
    ]
    return lines
