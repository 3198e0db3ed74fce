"""Compares algorithms: what each costs for one payload, and the physical limit."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshmend.errors import UnsupportedError
from meshmend.planning.choose import choose
from meshmend.planning.kept_limits import kept_or_computed_limit
from meshmend.planning.kept_prices import NamedQuestion, kept_or_found
from meshmend.planning.pricing import (
    BASELINES,
    Price,
    Question,
    checked_names,
    price,
    price_of_choice,
    supported_names,
)
from meshmend.planning.progress import ProgressCallback, ProgressShares, no_progress
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import Collective
from meshmend.simulator.limit import Limit, limit
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import Simulation, simulate
from meshmend.topology.fabric import Fabric
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh

ALL = "all"
_SIDE_BY_SIDE_CHIPS = 1500  # up to here two algorithms are simulated at the same time
AUTO = "auto"


@dataclass(frozen=True, eq=False)
class Comparison:
    """Prices of algorithms on the connected part of a mesh, fastest first.

    `refused` maps each algorithm that does not support this mesh to its reason.
    """

    mesh: Mesh
    part: Mesh
    fabric: Fabric
    payload_bytes: float
    limit: Limit
    prices: tuple[Price, ...]
    refused: dict[str, str]

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
    refused = refusals(part) if ALL in names else {}
    if ALL in names:
        to_price = [*supported_names(part, collective), *(BASELINES if mesh.failures() else ())]
    else:
        to_price = checked_names(name for name in names if name != AUTO)
    shares = ProgressShares(progress, len(to_price) + (AUTO in names))
    asked = [NamedQuestion(question, name, slices) for name in to_price]
    results = _prices(asked, cache_dir, shares, may_refuse=ALL in names)
    prices = [result for result in results if isinstance(result, Price)]
    for name, result in zip(to_price, results, strict=True):
        if isinstance(result, UnsupportedError):
            refused[name] = str(result)
    if AUTO in names:
        prices.append(_price_of_auto(question, prices, cache_dir, shares.of(len(to_price))))
    prices.sort(key=lambda price: price.time_s)
    least = kept_or_computed_limit(
        cache_dir, question, lambda: limit(part, fabric, payload_bytes, collective)
    )
    return Comparison(mesh, part, fabric, payload_bytes, least, tuple(prices), refused)


def _prices(
    asked: Sequence[NamedQuestion],
    cache_dir: Path | None,
    shares: ProgressShares,
    *,
    may_refuse: bool,
) -> list[Price | UnsupportedError]:
    """Return the price of each name, or its refusal if `may_refuse` allows that."""

    def priced(share: int, each: NamedQuestion) -> Price | UnsupportedError:
        def found() -> Price:
            result = price(each.question, each.name, slices=each.slices, progress=shares.of(share))
            assert result is not None, "without a time to beat there is always a price"
            return result

        try:
            return kept_or_found(cache_dir, each, found)
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


def _price_of_auto(
    question: Question, known: Sequence[Price], cache_dir: Path | None, progress: ProgressCallback
) -> Price:
    """Return what `auto` costs: as it was kept on disk, or found now and kept."""
    return kept_or_found(
        cache_dir,
        NamedQuestion(question, AUTO),
        lambda: _found_price_of_auto(question, known, cache_dir, progress),
    )


def _found_price_of_auto(
    question: Question, known: Sequence[Price], cache_dir: Path | None, progress: ProgressCallback
) -> Price:
    choice = choose(
        question.mesh,
        question.fabric,
        question.payload_bytes,
        collective=question.collective,
        cache_dir=cache_dir,
        progress=progress,
    )
    result: Price | None
    if choice.shape is not None:
        result = price_of_choice(question, choice.shape, choice.packing, choice.pipeline)
    else:
        priced = next((price for price in known if price.name == choice.algorithm), None)
        result = priced or price(
            question, choice.algorithm, slices=choice.slices, progress=progress
        )
    assert result is not None, "without a time to beat there is always a price"
    detail = ", ".join(filter(None, (choice.algorithm, result.detail)))
    return replace(result, name=AUTO, detail=detail)


def refusals(mesh: Mesh) -> dict[str, str]:
    """Return the algorithms that do not support a connected mesh, with their reasons."""
    reasons = {}
    for name, algorithm in ALGORITHMS.items():
        try:
            algorithm.check(mesh)
        except UnsupportedError as error:
            reasons[name] = str(error)
    return reasons
