"""Failure traces: when the nodes of a real machine went down and came up, read, replayed, fitted.

Two formats. The plain one is CSV with a header that names the columns node, down and up; times are
ISO dates or seconds. The other is the file of LANL's failures of 1996 to 2005, known by its columns
nodenumz, Prob Started and Prob Fixed. Both ends are needed: a line without an end is refused in a
plain file and left out of LANL's, which has some.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.errors import InputError
from meshmend.forecast.forecasting import Answer, Forecast, replay, year_runner
from meshmend.forecast.hole_prices import StepPrices
from meshmend.forecast.machine import Machine
from meshmend.forecast.records import Floats, Ints
from meshmend.forecast.scenario import DAY_S, YEAR_S
from meshmend.units import counted, format_duration

_LANL_TIME = "%m/%d/%Y %H:%M"


@dataclass(frozen=True)
class Outage:
    """One node was down from one moment to another, in seconds."""

    node: str
    down_s: float
    up_s: float


@dataclass(frozen=True)
class FailureTrace:
    """Outages of the nodes of a machine, in order; those of one node do not overlap."""

    outages: tuple[Outage, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that ever failed, in a natural order."""
        names = {outage.node for outage in self.outages}
        return tuple(sorted(names, key=lambda name: (len(name), name)))

    @property
    def start_s(self) -> float:
        return self.outages[0].down_s

    @property
    def end_s(self) -> float:
        return max(outage.up_s for outage in self.outages)


def read_trace(path: Path) -> FailureTrace:
    """Return the outages of a file; outages of a node that overlap become one.

    Raises:
        InputError: it has other columns, or an outage ends before it starts.
    """
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = list(csv.reader(file))
    except csv.Error as error:
        raise InputError(f"{path} needs to be CSV, but {error}") from None
    heads = [head.strip().lower() for head in rows[0]] if rows else []
    if {"node", "down", "up"} <= set(heads):
        outages = list(_plain(path, heads, rows[1:]))
    elif "nodenumz" in heads and any(head.startswith("prob started") for head in heads):
        outages = list(_lanl(path, heads, rows[1:]))
    else:
        raise InputError(
            f"{path} needs a header with node, down and up, or LANL's columns, but got "
            f"{str(heads[:6])[:200]}"
        )
    if not outages:
        raise InputError(f"{path} needs one outage or more, but has none")
    return FailureTrace(tuple(_merged(outages)))


def _plain(path: Path, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Outage]:
    node, down, up = (heads.index(name) for name in ("node", "down", "up"))
    for number, row in enumerate(rows, 2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) <= max(node, down, up):
            raise InputError(f"{path}, line {number}: needs node, down and up, but got {row}")
        start, end = (_moment(path, number, row[at]) for at in (down, up))
        yield _checked(path, number, Outage(row[node].strip(), start, end))


def _moment(path: Path, number: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text.strip())
        except ValueError:
            raise InputError(
                f"{path}, line {number}: a time is an ISO date or seconds, but got {text!r}"
            ) from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(value):
        raise InputError(f"{path}, line {number}: a time needs to be finite, but got {text!r}")
    return value


def _checked(path: Path, number: int, outage: Outage) -> Outage:
    if outage.up_s < outage.down_s:
        raise InputError(f"{path}, line {number}: the outage ends before its start")
    return outage


def _lanl(path: Path, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Outage]:
    """Yield LANL's outages; a node is named by its system and its number."""
    place: Mapping[str, int] = {
        name: next(i for i, head in enumerate(heads) if head.startswith(name))
        for name in ("nodenumz", "prob started", "prob fixed")
    }
    system = heads.index("system") if "system" in heads else None
    for number, row in enumerate(rows, 2):
        if len(row) <= max(place.values()) or not row[place["prob fixed"]].strip():
            continue
        try:
            start, end = (
                datetime.strptime(row[place[name]].strip(), _LANL_TIME).replace(tzinfo=UTC)
                for name in ("prob started", "prob fixed")
            )
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}") from None
        prefix = "" if system is None else f"{row[system].strip()}."
        name = prefix + row[place["nodenumz"]].strip()
        yield _checked(path, number, Outage(name, start.timestamp(), end.timestamp()))


def _merged(outages: Sequence[Outage]) -> list[Outage]:
    """Return outages in order of their starts, those of one node that overlap as one."""
    last: dict[str, Outage] = {}
    done: list[Outage] = []
    for outage in sorted(outages, key=lambda each: (each.down_s, each.node)):
        before = last.get(outage.node)
        if before is not None and outage.down_s <= before.up_s:
            last[outage.node] = Outage(outage.node, before.down_s, max(before.up_s, outage.up_s))
            continue
        if before is not None:
            done.append(before)
        last[outage.node] = outage
    return sorted([*done, *last.values()], key=lambda each: (each.down_s, each.node))


def hosts_for(trace: FailureTrace, machine: Machine) -> list[int]:
    """Return the domains that are hosts; there is one or more for each node of the trace.

    Raises:
        InputError: there are fewer.
    """
    hosts = [i for i, domain in enumerate(machine.domains) if domain.kind == "host"]
    if len(trace.nodes) > len(hosts):
        raise InputError(
            f"--trace has {len(trace.nodes)} nodes that failed, but the mesh has {len(hosts)} "
            "hosts that can; give a larger mesh or smaller hosts"
        )
    return hosts


def replayed(
    trace: FailureTrace, machine: Machine, prices: StepPrices, answers: Sequence[Answer]
) -> Forecast:
    """Return what each answer gives on the very outages of a trace; node i is host i.

    A trace of more than two years is cut into years, a shorter one into days.

    Raises:
        InputError: hosts do not fail in this scenario, or the trace has more nodes than the mesh
            has hosts.
    """
    hosts = hosts_for(trace, machine)
    host_of = dict(zip(trace.nodes, hosts, strict=False))
    moments: list[tuple[int, int, int]] = []
    for outage in trace.outages:
        start, end = (round((t - trace.start_s) * 1e9) for t in (outage.down_s, outage.up_s))
        moments += [
            (start, host_of[outage.node], 0),
            (max(end, start + 1), host_of[outage.node], 1),
        ]
    events: Ints = np.array(sorted(moments, key=lambda m: (m[0], -m[2], m[1])), dtype=np.int64)
    length_s = trace.end_s - trace.start_s
    period = "year" if length_s > 2 * YEAR_S else "day"
    part_s = {"year": YEAR_S, "day": DAY_S}[period]
    cuts = [round(k * part_s * 1e9) for k in range(max(1, int(length_s // part_s)))]
    cuts.append(round(max(length_s, 1e-3) * 1e9))
    runner = year_runner(machine, prices)
    results = replay(runner, answers, events.ravel(), list(pairwise(cuts)))
    return Forecast(machine.scenario, prices, len(cuts) - 1, results, period, is_traced=True)


@dataclass(frozen=True)
class TraceFit:
    """What fits a trace; the nodes are those that ever failed."""

    n_outages: int
    n_nodes: int
    days: float
    failures_per_1000_host_days: float
    failure_shape: float
    repair_s: float
    repair_sigma: float

    def summary(self) -> dict[str, Any]:
        """Return the figures as a JSON value, by the names of the inputs."""
        return {
            "outages": self.n_outages,
            "nodes": self.n_nodes,
            "days": self.days,
            "failures-per-1000-host-days": self.failures_per_1000_host_days,
            "failure-shape": self.failure_shape,
            "repair_s": self.repair_s,
            "repair-sigma": self.repair_sigma,
        }

    def describe(self) -> str:
        """Return the figures as options of `meshmend forecast`."""
        return (
            f"# {counted(self.n_outages, 'outage')} of {counted(self.n_nodes, 'node')} in "
            f"{self.days:.0f} days; nodes that never failed are not in the trace\n"
            f"--failures-per-1000-host-days {self.failures_per_1000_host_days:.3g} "
            f"--set failure-shape={self.failure_shape:.2f}\n"
            f"--repair {self.repair_s / 3600:.3g}h --set repair-spread=lognormal "
            f"--set repair-sigma={self.repair_sigma:.2f}  # mean {format_duration(self.repair_s)}"
        )


def fitted(trace: FailureTrace) -> TraceFit:
    """Return the rates that fit a trace: maximum likelihood for the spreads, counts for the rate.

    Raises:
        InputError: fewer than three outages.
    """
    if len(trace.outages) < 3:
        raise InputError(f"--fit needs three outages or more, but got {len(trace.outages)}")
    repairs = np.array([max(1.0, outage.up_s - outage.down_s) for outage in trace.outages])
    lives: list[float] = []
    last_up: dict[str, float] = {}
    for outage in trace.outages:
        if outage.node in last_up:
            lives.append(max(1.0, outage.down_s - last_up[outage.node]))
        last_up[outage.node] = outage.up_s
    days = (trace.end_s - trace.start_s) / DAY_S
    up_days = len(trace.nodes) * days - repairs.sum() / DAY_S
    return TraceFit(
        len(trace.outages),
        len(trace.nodes),
        days,
        1000.0 * len(trace.outages) / max(up_days, 1e-9),
        weibull_shape(np.array(lives)) if len(lives) >= 3 else 1.0,
        float(repairs.mean()),
        float(np.std(np.log(repairs))),
    )


def weibull_shape(lives: Floats) -> float:
    """Return the Weibull shape of greatest likelihood, from 0.2 to 10, by bisection."""
    logs = np.log(lives / lives.max())

    def slope(shape: float) -> float:
        weights = np.exp(shape * logs)
        return float((weights * logs).sum() / weights.sum() - 1.0 / shape - logs.mean())

    low, high = 0.2, 10.0
    if slope(low) > 0:
        return low
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return high
