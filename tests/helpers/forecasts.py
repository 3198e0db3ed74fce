"""Scenarios for the tests of forecasts: small machines, and prices that need no planning."""

from dataclasses import replace
from typing import Any

import numpy as np

from meshmend.forecast.hole_prices import StepPrices
from meshmend.forecast.machine import machine_of
from meshmend.forecast.scenario import (
    FailureModel,
    JobModel,
    RepairModel,
    Scenario,
    Shape,
    SlowModel,
    SpareModel,
    WrongModel,
)
from meshmend.topology.text import parse_mesh

HOUR_S, DAY_S = 3600.0, 86400.0
# A job that loses nothing but what failures take: no pauses, and saved every second.
FREE_JOB = JobModel(
    detection_s=0.0,
    restart_s=0.0,
    recovery_s=0.0,
    checkpoint_every=1.0,
    checkpoint_write_s=0.0,
    keeps_batch=False,
)


def scenario(
    mesh: str = "8x8",
    *,
    per_1000_days: dict[str, float],
    repair: RepairModel,
    job: JobModel = FREE_JOB,
    spares: int = 0,
    unit: Shape = (4, 2),
    host: Shape = (4, 2),
    wrap: str = "none",
    shape: float = 1.0,
    burst: float = 0.0,
    rack: Shape = (),
    wrong: WrongModel | None = None,
    slow: SlowModel | None = None,
) -> Scenario:
    """Return a scenario whose spares are switched in at once."""
    return Scenario(
        parse_mesh(mesh, wrap=wrap),
        FailureModel(per_1000_days, shape, burst),
        repair,
        job,
        SpareModel(spares, unit, 0.0),
        host=host,
        rack=rack,
        wrong=wrong or WrongModel(),
        slow=slow or SlowModel(),
    )


def prices_of(
    asked: Scenario, *, compute_s: float = 0.094, full_s: float = 0.006, extra_s: float = 0.0
) -> StepPrices:
    """Return prices by which every hole adds the same, rising with its number."""
    n = len(machine_of(asked).holes)
    extra = np.round(extra_s * (1.0 + np.arange(n) / n), 9)  # whole nanoseconds
    box_s = tuple(full_s * (1.0 + 0.1 * (7 - spanned)) for spanned in range(8))
    return StepPrices(compute_s, full_s, box_s, extra, (True,) * n, "made up", 0.004)


JOB = JobModel(
    detection_s=120.0,
    restart_s=900.0,
    recovery_s=30.0,
    checkpoint_every=1800.0,
    checkpoint_write_s=60.0,
)
SLOW_REPAIR = RepairModel(1.5 * DAY_S, automatic_s=HOUR_S, automatic_success=0.3)


def _often(
    mesh: str, per_1000_days: dict[str, float], unit: Shape, tile: Shape = (), **more: Any
) -> Scenario:
    """Return a small machine that fails often."""
    job = replace(JOB, tile=tile)
    return scenario(
        mesh, per_1000_days=per_1000_days, repair=SLOW_REPAIR, job=job, unit=unit, **more
    )


# Every kind of domain.
WALK_CASES = {
    "hosts": _often("8x4", {"host": 60}, (4, 2), spares=1),
    "chips and boards": _often("4x4", {"chip": 20, "board": 20}, (2, 2), spares=2),
    "links": _often("3x4", {"chip": 15, "link": 15}, (1, 1), spares=1),
    "torus": _often("4x5", {"chip": 20, "link": 10}, (1, 1), spares=2, wrap="all"),
    "three axes": _often("3x2x4", {"chip": 25}, (1, 1, 2), spares=1),
    "a line": _often("1x8", {"chip": 20}, (1, 1)),
    "wrong chips": _often(
        "4x4",
        {"chip": 10, "host": 20, "wrong": 15},
        (2, 2),
        host=(2, 2),
        spares=2,
        wrong=WrongModel(found_s=4 * DAY_S),
    ),
    "wrong chips and checks": _often(
        "4x5",
        {"link": 10, "wrong": 40},
        (1, 1),
        spares=1,
        wrong=WrongModel(one_in=5, check_every=20_000),
    ),
    "tiles": _often("6x6", {"chip": 90, "link": 4}, (1, 1), (2, 2), spares=1),
    "tiles on three axes": _often("3x4x3", {"chip": 60}, (1, 1, 3), (1, 2, 1), spares=1),
    "slow parts": _often(
        "4x5",
        {"chip": 15, "link": 10, "slow-chip": 25, "slow-link": 12},
        (1, 1),
        spares=2,
        slow=SlowModel(0.33, 0.25, 2 * DAY_S),
    ),
    "slow parts that are known": _often(
        "4x4",
        {"host": 30, "slow-chip": 40, "slow-link": 20},
        (2, 2),
        host=(2, 2),
        spares=1,
        wrap="all",
        wrong=WrongModel(check_every=16),
        slow=SlowModel(0.5, 0.25, 3 * DAY_S, is_known=True),
    ),
    "racks": _often("4x8", {"chip": 5, "rack": 40}, (4, 2), spares=1, rack=(4, 2)),
}
