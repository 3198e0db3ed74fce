"""Compares algorithms: what each costs for one payload, and the physical limit."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshmend.errors import UnsupportedError
from meshmend.planning.cache import Cache
from meshmend.planning.choose import choose
from meshmend.planning.packed_trees import TreeShape
from meshmend.planning.pricing import (
    BASELINES,
    Price,
    PriceFigures,
    checked_names,
    price,
    price_of_choice,
    renamed_price,
    supported_names,
)
from meshmend.planning.progress import ProgressCallback, ProgressShares, no_progress
from meshmend.planning.target import Question
from meshmend.planning.tree_formula import Pipeline
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import Collective
from meshmend.simulator.limit import Exit, Limit, limit, rounds_of
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import Simulation, simulate
from meshmend.topology.fabric import Fabric
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.packing_number import PackingNumber
from meshmend.topology.symmetry import stand_in

ALL = "all"
_SIDE_BY_SIDE_CHIPS = 1500  # up to here two algorithms are simulated at the same time
AUTO = "auto"
_CHIPS_OF_QUICK_LIMITS = 256  # up to here a limit is computed as fast as it is read


@dataclass(frozen=True, eq=False)
class Comparison:
    """Prices of algorithms on the connected part of a mesh, fastest first.

    `refused` maps each algorithm that does not support this mesh to its reason. `n_needed` is how
    many chips have something to sum: all of the part, or those in tiles.
    """

    mesh: Mesh
    part: Mesh
    fabric: Fabric
    payload_bytes: float
    limit: Limit
    prices: tuple[Price, ...]
    refused: dict[str, str]
    n_needed: int

    @property
    def winner(self) -> Price:
        """The fastest of those that sum over all chips that have something to sum."""
        whole = (each for each in self.prices if each.n_chips >= self.n_needed)
        return next(whole, self.prices[0])

    def ratio(self, price: Price) -> float:
        """Return the time of a price divided by the limit."""
        return price.time_s / self.limit.time_s if self.limit.time_s else 1.0

    def earlier_ratio(self, price: Price) -> float:
        """Return the time of a price divided by the larger of bandwidth and hops alone."""
        least_s = self.limit.bandwidth_or_latency_s
        return price.time_s / least_s if least_s else 1.0

    def summary(self) -> dict[str, Any]:
        """Return the figures as a JSON value."""
        return {
            "mesh": str(self.mesh),
            "collective": str(self.limit.collective),
            "payload_bytes": self.payload_bytes,
            "limit_s": self.limit.time_s,
            "limit_kind": self.limit.kind,
            "bandwidth_limit_s": self.limit.bandwidth_s,
            "bandwidth_or_latency_limit_s": self.limit.bandwidth_or_latency_s,
            "results": [
                {
                    "algorithm": price.name,
                    "time_s": price.time_s,
                    "ratio_to_limit": self.ratio(price),
                    "ratio_to_bandwidth_or_latency_limit": self.earlier_ratio(price),
                    "slices": price.figures.slices,
                    "max_link_utilisation": price.figures.max_link_utilisation,
                    "chips": price.n_chips,
                    "detail": price.detail,
                    "phases": {
                        phase.name: [phase.start_s, phase.end_s] for phase in price.figures.phases
                    },
                }
                for price in self.prices
            ],
        }

    def traced(self) -> Simulation:
        """Return the fastest simulation again, with a trace of every message."""
        best = self.prices[0].simulation
        schedule = best.schedule
        program = program_of(schedule, hazards_of(schedule), placed(self.part, schedule).routes)
        return simulate(
            program,
            self.fabric,
            payload_bytes=self.payload_bytes,
            slices=best.slices,
            delay_slices=best.delay_slices,
            trace=True,
        )


@dataclass(frozen=True)
class _NamedQuestion:
    """What an algorithm, a baseline or `auto` costs, with the best slices or with so many."""

    question: Question
    name: str
    slices: int | None = None


def compared(
    mesh: Mesh,
    fabric: Fabric,
    payload_bytes: float,
    names: Sequence[str] = (ALL,),
    *,
    collective: Collective = Collective.ALLREDUCE,
    slices: int | None = None,
    cache_dir: Path | None = None,
    progress: ProgressCallback = no_progress,
) -> Comparison:
    """Return the costs of algorithms for a payload, fastest first.

    `all` stands for all algorithms that support the mesh and, on a broken mesh, the baselines.
    `auto` is the choice of `choose`, listed under the name `auto`.

    Raises:
        UnsupportedError: an algorithm that was named does not support this mesh.
        InputError: there is no such algorithm.
    """
    part = largest_part(mesh)
    question = Question(part, payload_bytes, fabric, collective)
    refused = refusals(part, collective) if ALL in names else {}
    if ALL in names:
        has_baselines = mesh.failures() and collective is not Collective.ALL_TO_ALL
        to_price = [*supported_names(part, collective), *(BASELINES if has_baselines else ())]
    else:
        to_price = checked_names(name for name in names if name != AUTO)
    shares = ProgressShares(progress, len(to_price) + (AUTO in names))
    asked = [_NamedQuestion(question, name, slices) for name in to_price]
    results = _prices(asked, cache_dir, shares, may_refuse=ALL in names)
    prices = [result for result in results if isinstance(result, Price)]
    for name, result in zip(to_price, results, strict=True):
        if isinstance(result, UnsupportedError):
            refused[name] = str(result)
    if AUTO in names:
        prices.append(_price_of_auto(question, cache_dir, shares.of(len(to_price))))
    prices.sort(key=lambda price: price.time_s)
    least = lower_bound(question, cache_dir)
    return Comparison(mesh, part, fabric, payload_bytes, least, tuple(prices), refused, part.n_live)


def _prices(
    asked: Sequence[_NamedQuestion],
    cache_dir: Path | None,
    shares: ProgressShares,
    *,
    may_refuse: bool,
) -> list[Price | UnsupportedError]:
    """Return the price of each name, or its refusal if `may_refuse` allows that."""

    def priced(share: int, each: _NamedQuestion) -> Price | UnsupportedError:
        def found() -> Price:
            return price(each.question, each.name, slices=each.slices, progress=shares.of(share))

        try:
            return _cached_price(cache_dir, each, found)
        except UnsupportedError as error:
            if not may_refuse:
                raise
            return error
        finally:
            shares.of(share)(f"{each.name}: done", 1.0)

    # The event loop runs without the interpreter's lock; large tables are simulated one at a time.
    n_chips = max((each.question.mesh.n_live for each in asked), default=0)
    with ThreadPoolExecutor(2 if n_chips <= _SIDE_BY_SIDE_CHIPS else 1) as pool:
        return list(pool.map(priced, range(len(asked)), asked))


def _price_of_auto(question: Question, cache_dir: Path | None, progress: ProgressCallback) -> Price:
    """Return what `auto` costs: as it was kept on disk, or found now and kept."""
    return _cached_price(
        cache_dir,
        _NamedQuestion(question, AUTO),
        lambda: _found_price_of_auto(question, cache_dir, progress),
    )


def _found_price_of_auto(
    question: Question, cache_dir: Path | None, progress: ProgressCallback
) -> Price:
    like = stand_in(question.mesh)
    choice = choose(question, cache_dir=cache_dir, progress=progress)
    asked = replace(question, mesh=like.mesh)
    if choice.shape is not None:
        result = price_of_choice(asked, choice.shape, choice.packing, choice.pipeline)
    else:
        result = price(asked, choice.algorithm, slices=choice.slices, progress=progress)
    detail = ", ".join(filter(None, (choice.algorithm, result.detail)))
    return renamed_price(replace(result, name=AUTO, detail=detail), like)


def refusals(mesh: Mesh, collective: Collective = Collective.ALLREDUCE) -> dict[str, str]:
    """Return the algorithms that do not support a connected mesh, with their reasons.

    Those of another collective are left out.
    """
    reasons = {}
    for name, algorithm in ALGORITHMS.items():
        if collective not in algorithm.collectives:
            continue
        try:
            algorithm.check(mesh)
        except UnsupportedError as error:
            reasons[name] = str(error)
    return reasons


@dataclass(frozen=True)
class _StoredPrice:
    """A price as a file holds it: the figures that are shown, without the simulation."""

    name: str
    figures: PriceFigures
    n_chips: int
    pipeline: Pipeline
    detail: str
    shape: TreeShape | None


def _cached_price(
    cache_dir: Path | None, asked: _NamedQuestion, find: Callable[[], Price]
) -> Price:
    """Return the price that was kept for exactly this payload, or find it and keep it.

    A kept price has no simulation: whoever needs one, such as a trace, has it found again.
    """

    def encoded(price: Price) -> bytes:
        fields = (price.name, price.figures, price.n_chips, price.pipeline)
        return msgspec.json.encode(_StoredPrice(*fields, price.detail, price.shape))

    def decoded(content: bytes) -> Price:
        stored = msgspec.json.decode(content, type=_StoredPrice)
        return Price(
            stored.name,
            stored.figures,
            lambda: find().simulation,
            stored.n_chips,
            stored.pipeline,
            stored.detail,
            stored.shape,
        )

    cache = Cache(cache_dir and cache_dir / "prices", "price", encoded, decoded)
    return cache.get_or_make((*asked.question.key, asked.name, asked.slices), find)


@dataclass(frozen=True)
class _StoredLimit:
    """What is computed of a limit; the fabric and the mesh are the question's own."""

    packing_lower: float
    part_of: list[int]
    exits: tuple[Exit, ...]
    bandwidth_s: float
    latency_s: float
    chip_s: float | None
    update_s: float | None


def lower_bound(question: Question, cache_dir: Path | None = None) -> Limit:
    """Return the limit of a question.

    On thousands of chips its packing number takes longer than all the rest of an answer, so it is
    kept.
    """
    mesh, fabric, payload_bytes = question.mesh, question.fabric, question.payload_bytes

    def encoded(found: Limit) -> bytes:
        seconds = (found.bandwidth_s, found.latency_s, found.chip_s, found.update_s)
        part_of = found.packing.part_of.tolist()
        return msgspec.json.encode(
            _StoredLimit(found.packing.lower, part_of, found.exits, *seconds)
        )

    def decoded(content: bytes) -> Limit:
        stored = msgspec.json.decode(content, type=_StoredLimit)
        if not all(0 <= way.rank < mesh.n_live for way in stored.exits):
            raise ValueError(f"exits need chips of {mesh}")
        part_of = np.array(stored.part_of, dtype=np.int32)
        return Limit(
            fabric,
            payload_bytes,
            PackingNumber(mesh, stored.packing_lower, part_of),
            stored.bandwidth_s,
            stored.latency_s,
            stored.chip_s,
            stored.update_s,
            question.collective,
            stored.exits,
            rounds_of(mesh, question.collective),
        )

    folder = cache_dir and cache_dir / "limits"
    if mesh.n_live <= _CHIPS_OF_QUICK_LIMITS:
        folder = None
    return Cache(folder, "limit", encoded, decoded).get_or_make(
        question.key, lambda: limit(mesh, fabric, payload_bytes, question.collective)
    )


@dataclass(frozen=True)
class Crossover:
    """From about this payload on, `after` is faster than `before`."""

    payload_bytes: float
    before: str
    after: str


def crossovers(results: Sequence[Comparison]) -> tuple[Crossover, ...]:
    """Return the changes of the winner between neighbouring payloads of a rising sweep.

    Between two payloads, times are taken to be straight lines on logarithmic axes. Where two names
    stand for one time, as `auto` and what it chose, the winner does not change.
    """
    found = []
    for low, high in pairwise(results):
        before, after = low.winner.name, high.winner.name
        times_low, times_high = _times_s(low), _times_s(high)
        if before == after or not {before, after} <= times_low.keys() & times_high.keys():
            continue
        at_low = math.log(times_low[before] / times_low[after])
        at_high = math.log(times_high[before] / times_high[after])
        if at_low == 0 or at_high == 0:
            continue
        share = at_low / (at_low - at_high)
        ends = math.log(low.payload_bytes), math.log(high.payload_bytes)
        payload = math.exp(ends[0] + share * (ends[1] - ends[0]))
        found.append(Crossover(payload, before, after))
    return tuple(found)


def _times_s(result: Comparison) -> dict[str, float]:
    """Return the times that are not zero, by name."""
    return {price.name: price.time_s for price in result.prices if price.time_s > 0}
