"""The search for the fastest trees: which packing, how many slices, how much lag.

Packings are ranked by formula, packed in the order of that ranking until no other can win, and
the best few are simulated. Time grows by the same step with every slice once a pipeline is
full, so a few slices of the right size progress how long all of them take; only what comes out in
the end is simulated whole. Deterministic, and bounded in messages.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from meshmend.overlay.tree_packing import TreePacking, disjoint_packing, tree_packing
from meshmend.planning import tree_choice
from meshmend.planning.tree_choice import (
    MOST_SLICES,
    Pipeline,
    TreeFigures,
    TreeShape,
    figures_of,
    likely_shapes,
)
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.priority import delay_slices, remaining_hops
from meshmend.schedule.table import Collective
from meshmend.schedule.trees import tree_schedule
from meshmend.simulator.network_program import Program, program_of
from meshmend.simulator.rules import Simulation, simulate
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh

MAX_MESSAGES = 6_000_000  # to look around with, beside the last simulation
_SMALL, _HUGE = 128, 2048  # ranks
_FEW_MESSAGES = 120_000  # up to this many are simulated whole
_FINALISTS = (2, 9)  # at least and at most, as far as first tries take half of the messages
_NOT_FAR = 1.04  # what the formula puts farther than this behind its best is not simulated
_MOST_EFFORT = 4
_WORK_PER_EFFORT = 3_700  # ranks x trees: smaller forests are tried more often anyway
_MOST_HARD_WORK = 30_000  # ranks x trees up to which more effort is worth its time, ...
_MOST_SMALL_WORK = 500  # ... and on small meshes
_LONG = 300  # times the hops to the middle: from then on depth is not worth more effort
_STEPS = (1.1, 0.91, 1.04, 0.96)
_MOST_STEPS = 3  # in one direction
_LAGS = (1.25, 1.0, 1.6, 0.5, 0.0)
_LONG_LAGS = (1.25, 1.0, 1.6)  # without lag a pipeline drifts, which few slices do not show


@dataclass(frozen=True, eq=False)
class Trees:
    """A packing of a mesh, ready to be simulated."""

    mesh: Mesh
    shape: TreeShape
    packing: TreePacking

    @cached_property
    def figures(self) -> TreeFigures:
        return figures_of(self.packing, disjoint=self.shape.window is not None)

    @cached_property
    def _program_and_priority(self) -> tuple[Program, NDArray[np.int32]]:
        schedule = tree_schedule(self.packing, Collective.ALLREDUCE)
        hazards, routes = hazards_of(schedule), placed(self.mesh, schedule).routes
        return program_of(schedule, hazards, routes), remaining_hops(schedule, hazards, routes)

    def simulated(self, fabric: Fabric, payload_bytes: float, pipeline: Pipeline) -> Simulation:
        """Return what the trees cost."""
        program, remaining = self._program_and_priority
        return simulate(
            program,
            fabric,
            payload_bytes=payload_bytes,
            slices=pipeline.slices,
            delay_slices=delay_slices(remaining, pipeline.skew),
        )

    @property
    def n_rows(self) -> int:
        return 2 * self.packing.n_trees * (self.packing.n_ranks - 1)


@lru_cache(maxsize=16)
def trees_of(mesh: Mesh, shape: TreeShape) -> Trees:
    """Return the trees of a shape; those asked for last are kept.

    Where no disjoint trees are found it is other trees, whose figures then say so.
    """
    packing = None
    if shape.window is not None:
        packing = disjoint_packing(mesh, window=shape.window)
    if packing is None:
        packing = tree_packing(
            mesh, n_trees=shape.n_trees, depth_slack=shape.depth_slack, effort=shape.effort
        )
    return Trees(mesh, shape, packing)


@dataclass(frozen=True, eq=False)
class Found:
    """The fastest trees found, how to pipeline them, and what that costs."""

    trees: Trees
    pipeline: Pipeline
    simulation: Simulation


def best_trees(
    mesh: Mesh,
    fabric: Fabric,
    payload_bytes: float,
    *,
    slices: int | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Found:
    """Return the fastest trees found for a payload; with `slices` given, for that number."""
    search = _Search(fabric, payload_bytes, slices)
    progress("trees: packing")
    finalists = _finalists(mesh, search)
    progress("trees: simulating")
    if search.n_messages(finalists[0]) > MAX_MESSAGES // 2:  # nothing left to compare it with
        trees, pipeline = finalists[0], search.first_pipeline(finalists[0])
    else:
        tries = sorted((search.first_try(trees) for trees in finalists), key=lambda each: each[0])
        around = [search.looked_around(*each) for each in tries]
        _, trees, pipeline = min(around, key=lambda each: each[0])
    return Found(trees, pipeline, search.whole(trees, pipeline))


def best_pipeline(trees: Trees, fabric: Fabric, payload_bytes: float) -> Pipeline:
    """Return the fastest pipeline found for these trees and a payload."""
    search = _Search(fabric, payload_bytes, None)
    return search.looked_around(*search.first_try(trees))[2]


def _finalists(mesh: Mesh, search: "_Search") -> list[Trees]:
    """Return the packings that the formula likes best once their figures are known."""
    question = (mesh, search.fabric, search.payload_bytes, search.slices)
    shapes = [*likely_shapes(mesh), *tree_choice.disjoint_shapes(*question)]
    open_ = {shape: search.formula_s(figures) for shape, figures in shapes}
    packed: dict[TreeShape, float] = {}
    while open_ and sum(each.window is None for each in packed) < _most_packings(mesh):
        shape = min(open_, key=lambda each: (open_[each], each.n_trees))
        if not _is_far(open_.pop(shape), shape, packed):
            packed[shape] = search.formula_s(trees_of(mesh, shape).figures)
    usual = sorted((each for each in packed if each.window is None), key=lambda each: packed[each])
    # A hop less does not show where the links are busy for hundreds of times as long.
    hops_s = tree_choice.radius_of(mesh) * search.fabric.hop_latency_s
    is_long = search.payload_bytes > _LONG * hops_s * search.fabric.link_bandwidth_bytes_per_s
    n_hard = 0 if is_long else 1 if mesh.n_live > _SMALL else _FINALISTS[1]
    for shape in usual[:n_hard]:
        if (harder := _harder(mesh, shape)) is not None and harder not in packed:
            packed[harder] = search.formula_s(trees_of(mesh, harder).figures)
    order = sorted(packed, key=lambda each: packed[each])
    near = [shape for shape in order if not _is_far(packed[shape], shape, packed)]
    best_of_a_kind = {each.window is None: each for each in reversed(near)}.values()
    near.sort(key=lambda each: each not in best_of_a_kind)
    finalists = [trees_of(mesh, shape) for shape in near[: _FINALISTS[1]]]
    n_tries = MAX_MESSAGES // 2 // max(1, search.n_messages(finalists[0]))
    return finalists[: max(_FINALISTS[0], n_tries)]


def _is_far(time_s: float, shape: TreeShape, packed: dict[TreeShape, float]) -> bool:
    """Whether a shape is too far behind the best of its kind to win.

    The formula is off, most of all on small meshes, and not alike for disjoint trees and others.
    """
    kin = (packed[each] for each in packed if (each.window is None) == (shape.window is None))
    return time_s > _NOT_FAR * min(kin, default=math.inf)


def _most_packings(mesh: Mesh) -> int:
    """Return how many packings to make at most: their time grows with the mesh."""
    return 2 if mesh.n_live > _HUGE else 5 if mesh.n_live > _SMALL else 25


def _harder(mesh: Mesh, shape: TreeShape) -> TreeShape | None:
    """Return a shape one hop shallower to be searched for with more effort, if that is worth it.

    On large meshes there are too few ranks in the middle for trees without any slack.
    """
    slack = trees_of(mesh, shape).figures.depth - tree_choice.radius_of(mesh) - 1
    work = mesh.n_live * shape.n_trees
    if mesh.n_live <= _SMALL:
        hopeful = slack >= 0 and work < _MOST_SMALL_WORK
        return TreeShape(shape.n_trees, slack, _MOST_EFFORT) if hopeful else None
    effort = min(_MOST_EFFORT, work // _WORK_PER_EFFORT)
    if slack < 1 or effort < 2 or work > _MOST_HARD_WORK:
        return None
    return TreeShape(shape.n_trees, slack, effort)


@dataclass
class _Search:
    """What is asked, how many messages may still be simulated, and what has been."""

    fabric: Fabric
    payload_bytes: float
    slices: int | None
    messages_left: int = MAX_MESSAGES
    known: dict[tuple[TreeShape, Pipeline], Simulation] = field(default_factory=dict)

    def formula_s(self, figures: TreeFigures) -> float:
        question = (figures, self.fabric, self.payload_bytes)
        return tree_choice.likely_time_s(
            *question, self.slices or tree_choice.likely_slices(*question)
        )

    def first_try(self, trees: Trees) -> tuple[float, Trees, Pipeline]:
        """Return about what trees cost, pipelined as the formula has it."""
        pipeline = self.first_pipeline(trees)
        return self.about_s(trees, pipeline), trees, pipeline

    def n_messages(self, trees: Trees) -> int:
        """Return how many messages a first try of these trees takes."""
        return trees.n_rows * self._n_tried(trees, self.first_pipeline(trees))

    def looked_around(
        self, time_s: float, trees: Trees, pipeline: Pipeline
    ) -> tuple[float, Trees, Pipeline]:
        """Return the best near a pipeline: other numbers of slices, then other delay_slices."""
        for factor in _STEPS if self.slices is None else ():
            for _ in range(_MOST_STEPS):
                slices = round(pipeline.slices * factor)
                slices += slices == pipeline.slices and (1 if factor > 1 else -1)
                other = self._pipeline(trees, slices, _LAGS[0])
                if not (1 <= slices <= MOST_SLICES and self._may_try(trees, other)):
                    break
                other_s = self.about_s(trees, other)
                if other_s >= time_s:
                    break
                time_s, pipeline = other_s, other
        whole = self._n_tried(trees, pipeline) == pipeline.slices
        for lag in _LAGS[1:] if whole else _LONG_LAGS[1:]:
            other = self._pipeline(trees, pipeline.slices, lag)
            if self._may_try(trees, other) and (other_s := self.about_s(trees, other)) < time_s:
                time_s, pipeline = other_s, other
        return time_s, trees, pipeline

    def about_s(self, trees: Trees, pipeline: Pipeline) -> float:
        """Return a time from as many slices as fill the pipeline and a few more."""
        n_tried = self._n_tried(trees, pipeline)
        part = self.payload_bytes * n_tried / pipeline.slices
        result = trees.simulated(self.fabric, part, Pipeline(n_tried, pipeline.skew))
        self.messages_left -= result.n_messages
        if n_tried == pipeline.slices:
            self.known[trees.shape, pipeline] = result
        pace_s = tree_choice.slice_pace_s(
            trees.figures, self.fabric, self.payload_bytes, pipeline.slices
        )
        return result.time_s + (pipeline.slices - n_tried) * pace_s

    def whole(self, trees: Trees, pipeline: Pipeline) -> Simulation:
        """Return the simulation of all slices."""
        if (trees.shape, pipeline) not in self.known:
            return trees.simulated(self.fabric, self.payload_bytes, pipeline)
        return self.known[trees.shape, pipeline]

    def _may_try(self, trees: Trees, pipeline: Pipeline) -> bool:
        return self.messages_left >= trees.n_rows * self._n_tried(trees, pipeline)

    def _n_tried(self, trees: Trees, pipeline: Pipeline) -> int:
        question = (trees.figures, self.fabric, self.payload_bytes, pipeline.slices)
        n_few = _FEW_MESSAGES // max(1, trees.n_rows)
        return min(pipeline.slices, max(n_few, 8 + tree_choice.slices_to_fill(*question)))

    def first_pipeline(self, trees: Trees) -> Pipeline:
        """Return the pipeline that the formula has for trees."""
        question = (trees.figures, self.fabric, self.payload_bytes)
        if self.slices is None and trees.shape.window is not None:
            slices = tree_choice.slices_within(trees.shape.window, *question)
        else:
            slices = self.slices or tree_choice.likely_slices(*question)
        return self._pipeline(trees, slices, _LAGS[0])

    def _pipeline(self, trees: Trees, slices: int, lag: float) -> Pipeline:
        slices = max(1, slices)
        question = (trees.figures, self.fabric, self.payload_bytes, slices)
        return Pipeline(slices, tree_choice.likely_skew(*question, lag=lag))
