"""Rates that fit a failure trace: how often a node fails, how lives and repairs are spread."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshmend.errors import InputError
from meshmend.forecast.failure_trace import FailureTrace
from meshmend.forecast.scenario import DAY_S
from meshmend.forecast.walk_arrays import Floats
from meshmend.units import counted, format_duration


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
            f"--failure-shape {self.failure_shape:.2f}\n"
            f"--repair {self.repair_s / 3600:.3g}h --repair-spread lognormal "
            f"--repair-sigma {self.repair_sigma:.2f}  # mean {format_duration(self.repair_s)}"
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
