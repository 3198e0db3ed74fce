"""Finds the fastest trees for the sums of a tiling: `colours`.

A formula ranks how many trees each colour should have, the simulator decides between the best few
and how they are pipelined. Deterministic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.packed_trees import Pipelined
from meshmend.planning.tree_formula import MOST_SLICES, Pipeline, PipelineRequest, TreeFigures
from meshmend.schedule.table import Schedule
from meshmend.schedule.trees import colour_schedule
from meshmend.simulator.colour_limit import colour_packing
from meshmend.topology.fabric import Fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.tiles import Tiling
from meshmend.trees.colour_trees import ColourTrees, colour_trees

_MOST_TREES_EACH: Final = 16
_QUICK_TREES_EACH: Final = 2
_COUNTS_TO_TRY: Final = 3
_DEPTH_PRICES: Final = (0.4, 1.0)
# Where the hops take longer than this part of the time of the bytes, trees that load links more
# than they need to, but are shallower, are tried as well: so many times the least load.
_SHORT: Final = 0.2
_LOOSE_GOALS: Final = (1.2, 1.5, 3.0)
_DEPTH_PRICE_OF_LOOSE: Final = 8.0
_FINALISTS: Final = 3  # of each kind of trees, that are simulated
_IMPROVED: Final = 2  # for which other pipelines than the formula's are tried
_MOST_MESSAGES: Final = 3_000_000  # simulated by the search
_DELAYS_HOPS_PER_HOP: Final = (1.25, 0.5, 2.0)
_SLICE_FACTORS: Final = (1.3, 0.77, 1.15, 0.87)


@dataclass(frozen=True, eq=False)
class PackedColours(Pipelined):
    """Trees of colours on a mesh, ready to be simulated."""

    trees: ColourTrees

    @property
    def figures(self) -> TreeFigures:
        """The number of trees of all colours, their depth, and how many share a link."""
        return TreeFigures(self.trees.n_trees, self.trees.depth, self.trees.max_trees)

    @cached_property
    def schedule(self) -> Schedule:
        """The sums of all colours."""
        return colour_schedule(self.trees)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Colours to sum on a mesh, and how much of the payload the busiest link carries at least."""

    mesh: Mesh
    colour_of: NDArray[np.int32]
    least_load: float

    @property
    def n_colours(self) -> int:
        return int(self.colour_of.max()) + 1

    def goal(self, trees_each: int) -> int:
        """Return how many trees the busiest link carries at least."""
        return max(1, math.ceil(self.n_colours * trees_each * self.least_load - 1e-9))

    def packed(self, trees_each: int, depth_price: float, looseness: float = 1.0) -> PackedColours:
        """Return so many trees for each colour; a link may carry the goal, times a looseness."""
        trees = colour_trees(
            self.mesh,
            self.colour_of,
            trees_each=trees_each,
            goal=math.ceil(looseness * self.goal(trees_each)),
            depth_price=depth_price,
        )
        return PackedColours(self.mesh, trees)

    def fastest(self, request: PipelineRequest) -> tuple[PackedColours, Pipeline]:
        """Return the trees and the pipeline that are fastest for a payload."""
        radius = mesh_figures(self.mesh).radius

        def likely_s(trees_each: int) -> float:
            n_trees = self.n_colours * trees_each
            return request.likely_s(TreeFigures(n_trees, radius, self.goal(trees_each)))

        counts = sorted(range(1, _MOST_TREES_EACH + 1), key=likely_s)[:_COUNTS_TO_TRY]
        # The formula errs alike on trees of one kind only, so each kind has its own finalists.
        even = [self.packed(count, price) for count in counts for price in _DEPTH_PRICES]
        shallow = []
        if self._is_short(request, radius):
            few = range(1, _COUNTS_TO_TRY + 1)
            shallow = [
                self.packed(count, _DEPTH_PRICE_OF_LOOSE, looseness)
                for count in sorted({*few, *counts})
                for looseness in _LOOSE_GOALS
            ]
        finalists = []
        for kind in (even, shallow):
            kind.sort(key=lambda each: request.likely_s(each.figures))
            finalists += kind[:_FINALISTS]
        finalists.sort(key=lambda each: _first_try_s(each, request))
        found = [_fastest_pipeline(each, request) for each in finalists[:_IMPROVED]]
        _, best, pipeline = min(found, key=lambda attempt: attempt[0])
        return best, pipeline

    def _is_short(self, request: PipelineRequest, radius: int) -> bool:
        """Whether hops take so long that shallow trees may be faster than even ones."""
        fabric = request.fabric
        hops_s = 2 * radius * (fabric.hop_latency_s + fabric.message_overhead_s)
        bytes_s = self.least_load * request.payload_bytes / fabric.link_bandwidth_bytes_per_s
        return hops_s > _SHORT * bytes_s


@lru_cache(maxsize=16)
def fastest_colours(
    tiling: Tiling, fabric: Fabric, payload_bytes: float
) -> tuple[PackedColours, Pipeline]:
    """Return the trees and the pipeline that sum all colours of a tiling fastest.

    `payload_bytes` is that of all colours together.
    """
    sums = _Sums(tiling.mesh, tiling.colour_of, 1 / colour_packing(tiling).upper)
    return sums.fastest(PipelineRequest(fabric, payload_bytes, tiling.mesh.n_live))


def quick_colours(tiling: Tiling) -> Schedule:
    """Return sums of all colours that suit most payloads, made without a search."""
    sums = _Sums(tiling.mesh, tiling.colour_of, 1 / colour_packing(tiling).upper)
    return sums.packed(_QUICK_TREES_EACH, _DEPTH_PRICES[0]).schedule


def independent_colours(
    tiling: Tiling, fabric: Fabric, payload_bytes: float
) -> tuple[PackedColours, Pipeline]:
    """Return trees for each colour that are laid as if there were no other, to be run at once.

    They show what it is worth to plan all colours together. How many trees a colour has, and their
    pipeline, is what is fastest for the first colour alone.
    """
    mesh, n_colours = tiling.mesh, tiling.n_colours
    request = PipelineRequest(fabric, payload_bytes / n_colours, mesh.n_live)
    alone = []
    for colour in range(n_colours):
        is_own = tiling.colour_of == colour
        fewest_links = max(1, int(mesh_figures(mesh).degrees[is_own].min()))
        alone.append(_Sums(mesh, np.where(is_own, 0, -1).astype(np.int32), 1 / fewest_links))
    first, pipeline = alone[0].fastest(request)
    trees_each = first.trees.n_trees
    parents = [each.packed(trees_each, _DEPTH_PRICES[0]).trees.parents for each in alone]
    colour_of_tree = np.repeat(np.arange(n_colours, dtype=np.int32), trees_each)
    trees = ColourTrees(tiling.colour_of.copy(), colour_of_tree, np.concatenate(parents))
    return PackedColours(mesh, trees), pipeline


def _first_try_s(packed: PackedColours, request: PipelineRequest) -> float:
    """Return how long trees take in the pipeline of the formula."""
    formula = request.formula(packed.figures)
    pipeline = formula.pipeline(formula.best_slices(), _DELAYS_HOPS_PER_HOP[0])
    return packed.simulated(request.fabric, request.payload_bytes, pipeline).time_s


def _fastest_pipeline(
    packed: PackedColours, request: PipelineRequest
) -> tuple[float, PackedColours, Pipeline]:
    """Return the fastest pipeline found: the formula's, then other delays, then other slices."""
    formula, left = request.formula(packed.figures), _MOST_MESSAGES
    slices = formula.best_slices()
    best_s, best = math.inf, formula.pipeline(slices, _DELAYS_HOPS_PER_HOP[0])
    tried: set[Pipeline] = set()

    def attempt(pipeline: Pipeline) -> bool:
        nonlocal best_s, best, left
        n_messages = packed.schedule.n_rows * pipeline.slices
        is_first = not tried
        if pipeline in tried or (n_messages > left and not is_first):
            return False
        tried.add(pipeline)
        left -= n_messages
        time_s = packed.simulated(request.fabric, request.payload_bytes, pipeline).time_s
        if time_s >= best_s:
            return False
        best_s, best = time_s, pipeline
        return True

    delay = _DELAYS_HOPS_PER_HOP[0]
    for other in _DELAYS_HOPS_PER_HOP:
        if attempt(formula.pipeline(slices, other)):
            delay = other
    for factor in _SLICE_FACTORS:
        while attempt(_with_slices(formula.pipeline, best.slices, factor, delay)):
            pass
    return best_s, packed, best


def _with_slices(
    pipeline: Callable[[int, float], Pipeline], slices: int, factor: float, delay: float
) -> Pipeline:
    other = round(slices * factor)
    other += (other == slices) * (1 if factor > 1 else -1)
    return pipeline(max(1, min(MOST_SLICES, other)), delay)
