"""What a hole costs a step: priced by the simulator on the mesh with that very hole, and kept.

Planning around a hole takes seconds, so a bounded number of holes is priced exactly. The rule for
all others, which docs/forecast.md states and the tests measure:

- A hole that mirrors or, on an axis that wraps, moves into a priced one costs the same.
- A hole that was not priced costs what the nearest priced one of its shape does.
- Several holes cost the sum of what each costs alone.
- No hole makes a sum faster.

A sum that has a plan for slow links takes longer by what one in the middle of the mesh adds, for
each of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshmend.errors import InputError, UnsupportedError
from meshmend.forecast.machine import Machine
from meshmend.forecast.records import Floats
from meshmend.forecast.scenario import SLOW_KINDS, SLOW_LINK, Scenario
from meshmend.planning.comparison import AUTO, compared
from meshmend.planning.plan import plan
from meshmend.planning.progress import ProgressCallback, ProgressShares, no_progress
from meshmend.schedule.algorithms import algorithm
from meshmend.simulator.colour_limit import colour_limit
from meshmend.simulator.limit import limit
from meshmend.topology.failures import Failure, Link, SlowLink
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.tiles import Tiling, box_tiling, upright_boxes

# Chips up to which so many holes of one machine are priced; two minutes on one core.
_BUDGETS = ((64, 32), (256, 12), (1024, 3), (2048, 2))
_LEAST_BUDGET = 1

Place = tuple[object, ...]


@dataclass(frozen=True, eq=False)
class StepPrices:
    """How long a step computes and sums; for each hole what it adds, and if it is supported.

    `box_s` holds the sum in an intact box for each set of axes that still wrap, as bits.
    `slow_link_s` is what a slow link adds to a sum whose plan knows of it.
    """

    compute_s: float
    full_s: float
    box_s: tuple[float, ...]
    extra_s: Floats
    is_supported: tuple[bool, ...]
    words: str
    slow_link_s: float = 0.0


def step_prices(
    machine: Machine,
    *,
    n_most: int | None = None,
    cache_dir: Path | None = None,
    progress: ProgressCallback = no_progress,
) -> StepPrices:
    """Return what steps cost on the machine of a scenario, with at most `n_most` holes priced.

    Raises:
        UnsupportedError: the algorithm does not support the full mesh.
    """
    scenario = machine.scenario
    book = _PriceBook(scenario, cache_dir)
    places = [_place(scenario.mesh, hole) for hole in machine.holes]
    slow = [number for number, each in enumerate(machine.domains) if each.kind in SLOW_KINDS]
    numbers = sorted(set(range(len(places))) - set(slow), reverse=True)  # what is slow is no hole
    example = {places[number]: machine.holes[number] for number in numbers}
    supported = {place: book.supports(hole) for place, hole in example.items()}
    possible = [place for place in dict.fromkeys(places) if supported.get(place)]
    to_price = _chosen(possible, _budget(machine, n_most))
    slowed = _slowed(scenario)
    shares = ProgressShares(progress, 1 + len(to_price) + (slowed is not None)).in_turn()
    full_s = book.price(scenario.mesh, next(shares))
    extra: dict[Place, float] = {}
    for place in to_price:
        broken = largest_part(scenario.mesh.without(example[place]))
        extra[place] = max(0.0, book.price(broken, next(shares)) - full_s)
    for place in example:
        extra.setdefault(place, _nearest(place, extra))
    for place in places:
        extra.setdefault(place, 0.0)
        supported.setdefault(place, True)
    share = scenario.job.allreduce_share
    compute_s = scenario.job.compute_s or full_s * (1.0 - share) / share
    return StepPrices(
        compute_s,
        full_s,
        _box_prices(scenario, full_s),
        np.array([extra[place] for place in places]),
        tuple(supported[place] for place in places),
        f"{len(to_price)} of {len(example)} holes that differ were priced by the simulator",
        max(0.0, book.price(slowed, next(shares)) - full_s) if slowed is not None else 0.0,
    )


def _slowed(scenario: Scenario) -> Mesh | None:
    """Return the mesh with a slow link in its middle, if links get slow."""
    mesh, slow = scenario.mesh, scenario.slow
    if scenario.job.tile or not scenario.failures.per_1000_days.get(SLOW_LINK):
        return None
    axis = max(range(len(mesh.shape)), key=lambda each: mesh.shape[each])
    second = tuple(extent // 2 for extent in mesh.shape)
    first = tuple(at - (number == axis) for number, at in enumerate(second))
    return mesh.slowed(SlowLink(Link.between(first, second), slow.link_speed))


def _budget(machine: Machine, n_most: int | None) -> int:
    if n_most is not None:
        return n_most
    n_chips = machine.scenario.mesh.n_chips
    return next((n for chips, n in _BUDGETS if n_chips <= chips), _LEAST_BUDGET)


def _place(mesh: Mesh, hole: Failure) -> Place:
    """Return what holes that mirror or move into each other have in common: shape and place."""
    if isinstance(hole, Link):
        axis = next(a for a in range(len(mesh.shape)) if hole.first[a] != hole.second[a])
        shape, origin = tuple(2 if a == axis else 1 for a in range(len(mesh.shape))), hole.first
        if hole.second[axis] - hole.first[axis] > 1:
            origin = hole.second
        kind = "link"
    else:
        shape, origin, kind = hole.shape, hole.origin, "block"
    at = tuple(
        start % 2 if wraps else min(start, size - start - part)
        for start, part, size, wraps in zip(origin, shape, mesh.shape, mesh.wrap, strict=True)
    )
    return (kind, shape, at)


def _distance(one: Place, other: Place) -> float:
    if one[:2] != other[:2]:
        return math.inf
    return math.dist(one[2], other[2])  # type: ignore[arg-type]  # the third is the place


def _chosen(places: Sequence[Place], n_most: int) -> list[Place]:
    """Return the places to price: the last of each shape, then always the farthest from all.

    The last place in order is the one nearest to the middle of the mesh.
    """
    last = {place[:2]: place for place in sorted(places, key=lambda p: (p[:2], p[2]))}
    chosen = list(last.values())[: max(1, n_most)] if places else []
    while len(chosen) < min(n_most, len(places)):
        rest = [place for place in places if place not in chosen]
        chosen.append(max(rest, key=lambda p: (min(_distance(p, c) for c in chosen), p[2])))
    return chosen


def _nearest(place: Place, prices: dict[Place, float]) -> float:
    """Return the price of the nearest hole of the same shape, or of the dearest of all."""
    near = min(prices, key=lambda other: (_distance(place, other), other[2]), default=None)
    if near is None:
        return 0.0
    return max(prices.values()) if math.isinf(_distance(place, near)) else prices[near]


def _box_prices(scenario: Scenario, full_s: float) -> tuple[float, ...]:
    """Return the sum in a box for each set of spanned axes, by the ratio of physical limits.

    On a torus a box of half the machine stands for all boxes that span the same axes. On a mesh
    without wrap-around links a box sums as fast as the whole mesh.
    """
    mesh, job = scenario.mesh, scenario.job
    prices = []
    least = _limit_s(scenario, mesh)
    for spanned in range(8):
        keeps = [bool(spanned >> axis & 1) for axis in range(3)][3 - len(mesh.shape) :]
        if not any(mesh.wrap) or all(k or not w for k, w in zip(keeps, mesh.wrap, strict=True)):
            prices.append(full_s)
            continue
        shape = tuple(
            size if keep else max(2, part, size // 2 // part * part)
            for size, part, keep in zip(
                mesh.shape, job.tile or (1,) * len(mesh.shape), keeps, strict=True
            )
        )
        wrap = tuple(w and k for w, k in zip(mesh.wrap, keeps, strict=True))
        prices.append(full_s * max(1.0, _limit_s(scenario, Mesh(shape, wrap)) / least))
    return tuple(prices)


def _limit_s(scenario: Scenario, mesh: Mesh) -> float:
    job = scenario.job
    if job.tile:
        return colour_limit(box_tiling(mesh, job.tile), job.fabric, job.payload_bytes).time_s
    return limit(mesh, job.fabric, job.payload_bytes).time_s


class _PriceBook:
    """Prices of meshes, kept on disk; which holes an algorithm supports."""

    def __init__(self, scenario: Scenario, cache_dir: Path | None) -> None:
        self._scenario, self._cache_dir = scenario, cache_dir

    def supports(self, hole: Failure) -> bool:
        """Whether the algorithm runs on the mesh with this hole alone."""
        name, mesh = self._scenario.job.algorithm, self._scenario.mesh
        if not isinstance(hole, Link) and hole.shape == mesh.shape:
            return False
        broken = largest_part(mesh.without(hole))
        if self._scenario.job.tile:
            return bool(upright_boxes(broken, self._scenario.job.tile))
        if name in (AUTO, "trees"):
            return True
        try:
            algorithm(name).check(broken)
        except (UnsupportedError, InputError):
            return False
        return True

    def price(self, mesh: Mesh, progress: ProgressCallback) -> float:
        """Return the seconds that a sum takes on a connected mesh."""
        job = self._scenario.job
        if job.tile:
            return self._price_of_tiles(box_tiling(mesh, job.tile), progress)
        result = compared(
            mesh,
            job.fabric,
            job.payload_bytes,
            [job.algorithm],
            cache_dir=self._cache_dir,
            progress=lambda step, part=None, /: progress(f"{mesh}: {step}", part),
        )
        return result.prices[0].time_s

    def _price_of_tiles(self, tiling: Tiling, progress: ProgressCallback) -> float:
        job = self._scenario.job
        if tiling.n_tiles == 1:  # which has nobody to sum with
            return 0.0
        made = plan(
            tiling.mesh,
            tile=tiling,
            payload=job.payload_bytes,
            fabric=job.fabric,
            progress=lambda step, part=None, /: progress(f"{tiling.mesh}: {step}", part),
        )
        return made.predicted().time_s
