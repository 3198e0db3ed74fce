"""Searches for the fastest trees: packings come from the overlay, times from the simulator.

`tree_finalists` picks a few packings by formula. Each is simulated with the pipeline of the
formula, then with a few others near it. Once a pipeline is full,
every further slice takes the same time. So a few slices of the right size show how long all of them
take; only the answer is simulated completely. The search is deterministic, and it simulates a
bounded number of messages.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from meshmend.planning.packed_trees import (
    Fastest,
    TreeKind,
    Trees,
    TreeShape,
    trees_of,
    with_equal_links,
)
from meshmend.planning.straight_finalists import need_no_others, straight_finalists
from meshmend.planning.target import Question
from meshmend.planning.tree_finalists import LONG_GAP, finalists
from meshmend.planning.tree_formula import MOST_SLICES, Pipeline, PipelineRequest, TreeFormula
from meshmend.simulator.rules import Simulation
from meshmend.topology.fabric import Fabric
from meshmend.trees.tree_counts import MOST_TREES

MAX_MESSAGES = 6_000_000  # simulated by the search; those of the answer come on top
_MAX_MESSAGES_IF_GAPS_ARE_LONG = (
    14_000_000  # six tries of 32x32 at 10 MB, where the first is 1 % slower
)
_MESSAGES_TO_IMPROVE_STRAIGHT = 5_000_000  # after their first tries, three to six
# Above this the answer is not simulated completely but from as many slices as fill the pipeline:
# 16x16x16 less a board at 100 MB has 14 million messages, which take a quarter of a minute.
_MOST_MESSAGES_WHOLE = 8_000_000
# The first slices do not show what leaves put off: those of 32x32 less 4x2 at 1 GB have 14 million.
_MOST_MESSAGES_WHOLE_WITH_GAPS = 16_000_000
# Later slices take this many times as long as the formula says: 1.015 on 16x16x16 less a board at
# 100 MB, 1.012 on 32x32 less 4x2 at 1 GB.
_LATER_SLICES = 1.0135

_FILL_GAPS = (TreeKind.GAP_FILLING, TreeKind.STRAIGHT)  # their leaves go last

# Found by trying. Losses and gains are what `benchmarks/tune_trees.py` finds on small meshes.
#
# More trees than usual fill the links with fewer slices: 16x16x16 less 2x2x1 at 100 MB takes 1.5 %
# less time with this part of the formula's number.
_SLICES_OF_MANY_TREES = 0.7
# Straight trees take fewer slices than the formula says where the gap is short, because leaves wait
# for it. So found on 32x32 less 4x2 from 2 to 14 MB.
_STRAIGHT_SLICES, _STRAIGHT_SLICES_PER_GAP = 0.55, 0.4
# Up to here trees that know nothing of slow links are tried too: for short payloads they may be
# faster. 5x2 less a chip with three slow links at 100 KB takes 4 % longer without them.
_MOST_RANKS_WITH_EQUAL = 128
_LEAST_FINALISTS = 2  # even if their first simulations take more than half of the messages
_MESSAGES_SIMULATED_WHOLE = 120_000  # up to here all slices are simulated, not estimated
_SLICES_BEYOND_FULL = 8  # simulated after as many as fill the pipeline
# On large tables fewer: 16x16x16 less 2x2x1 at 100 MB differs by 0.2 %, and takes 2/3 of the time.
_LARGE_ROWS, _SLICES_BEYOND_FULL_IF_LARGE = 400_000, 3
# From the best number of slices so far to the next: first coarse, then fine, each up to three
# times in its direction. Without them schedules are up to 3.3 % slower.
_SLICE_FACTORS = (1.1, 0.91, 1.04, 0.96)
_MOST_STEPS_PER_FACTOR = 3
# Up to so many times the slices are tried so that messages and latency are aligned.
_MOST_ALIGNED = 1.3
# For each hop by which a row is nearer to the end of its chain than the farthest row, its delay is
# longer by the time of this many hops. Zero loses up to 6 %; from 1.0 to 1.6 nothing changes.
USUAL_DELAY_HOPS_PER_HOP = 1.25
# Delays to try after that one. Without delay a long pipeline drifts apart, which its first slices
# do not show: so none below 1 where only those are simulated. Trying none loses up to 1.4 %.
_OTHER_DELAYS_HOPS_PER_HOP = (1.0, 1.4, 1.6, 2.0, 0.5, 0.0)
_OTHER_DELAYS_IF_ESTIMATED = (1.0, 1.6)


def best_trees(
    question: Question,
    *,
    slices: int | None = None,
    may_estimate: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> Fastest[Trees]:
    """Return the fastest trees found for an allreduce; with `slices` given, for that number.

    If it `may_estimate`, an answer of more messages than the search simulates is not simulated.
    """
    mesh = question.mesh
    request = PipelineRequest(question.fabric, question.payload_bytes, mesh.n_live, slices)
    progress("trees: packing")
    straight = straight_finalists(mesh, request)
    best_straight = _best_straight(straight, request, progress)
    if best_straight is not None and need_no_others(straight, request):
        return best_straight
    progress("trees: packing")
    candidates = finalists(mesh, request)
    if mesh.has_slow and mesh.n_live <= _MOST_RANKS_WITH_EQUAL:
        usual = finalists(with_equal_links(mesh), request)
        candidates += [trees_of(mesh, replace(each.shape, equal=True)) for each in usual]
    progress("trees: simulating")
    best = _best_of(candidates, request, may_estimate=may_estimate)
    if best_straight is not None and best_straight.time_s < best.time_s:
        return best_straight
    return best


def _best_straight(
    straight: list[Trees], request: PipelineRequest, progress: Callable[[str], None]
) -> Fastest[Trees] | None:
    """Return the fastest of straight trees, if there are any."""
    if not straight:
        return None
    progress("trees: simulating")
    search = _PipelineSearch(request)
    tries = sorted(map(search.first_try, straight), key=lambda attempt: attempt[0])
    search.messages_left = _MESSAGES_TO_IMPROVE_STRAIGHT
    improved = [search.improved(*attempt) for attempt in tries]
    _, trees, pipeline = min(improved, key=lambda attempt: attempt[0])
    simulation = search.simulated_whole(trees, pipeline)
    return Fastest(trees, pipeline, simulation.time_s, simulation)


def _best_of(
    candidates: list[Trees], request: PipelineRequest, *, may_estimate: bool
) -> Fastest[Trees]:
    """Return the fastest of other trees."""
    search = _PipelineSearch(request)
    n_messages = search.n_messages(candidates[0])
    if n_messages > MAX_MESSAGES // 2:  # nothing left to compare it with
        trees, pipeline = candidates[0], search.first_pipeline(candidates[0])
        if may_estimate and not is_simulated_whole(trees, pipeline):
            likely_s = request.formula(trees.figures).time_s(pipeline.slices)
            return Fastest(trees, pipeline, likely_s, None)
    else:
        if (candidates[0].shape.gap or 0) >= LONG_GAP:
            search.messages_left = _MAX_MESSAGES_IF_GAPS_ARE_LONG
        n_tries = max(_LEAST_FINALISTS, search.messages_left // 2 // max(1, n_messages))
        tries = [search.first_try(trees) for trees in candidates[:n_tries]]
        tries.sort(key=lambda attempt: attempt[0])
        improved = [search.improved(*attempt) for attempt in tries]
        time_s, trees, pipeline = min(improved, key=lambda attempt: attempt[0])
        if may_estimate and trees.n_rows * pipeline.slices > MAX_MESSAGES:
            return Fastest(trees, pipeline, time_s, None)
    simulation = search.simulated_whole(trees, pipeline)
    return Fastest(trees, pipeline, simulation.time_s, simulation)


def _straight_slices(formula: TreeFormula) -> int:
    """Return about how many slices straight trees need."""
    best = formula.best_slices()
    part = min(1.0, _STRAIGHT_SLICES + _STRAIGHT_SLICES_PER_GAP * formula.gap(best))
    return max(1, round(part * best))


def is_simulated_whole(trees: Trees, pipeline: Pipeline) -> bool:
    """Whether an answer is simulated with all its slices, not only with the first."""
    fills_gaps = trees.shape.kind in _FILL_GAPS
    most = _MOST_MESSAGES_WHOLE_WITH_GAPS if fills_gaps else _MOST_MESSAGES_WHOLE
    return trees.n_rows * pipeline.slices <= most


def best_pipeline(trees: Trees, fabric: Fabric, payload_bytes: float) -> Pipeline:
    """Return the fastest pipeline found for these trees and a payload."""
    search = _PipelineSearch(PipelineRequest(fabric, payload_bytes, trees.mesh.n_live))
    return search.improved(*search.first_try(trees))[2]


def simulated_trees(
    trees: Trees, fabric: Fabric, payload_bytes: float, pipeline: Pipeline
) -> Simulation:
    """Return what trees cost in a pipeline, as `best_trees` finds it."""
    search = _PipelineSearch(PipelineRequest(fabric, payload_bytes, trees.mesh.n_live))
    return search.simulated_whole(trees, pipeline)


def _pipeline(trees: Trees, formula: TreeFormula, slices: int, delay: float) -> Pipeline:
    """Return a pipeline that suits the kind of the trees."""
    pipeline = formula.pipeline(slices, delay)
    if trees.shape.kind in _FILL_GAPS:
        pipeline = replace(pipeline, stagger=1.0, leaves_last=True)
    return pipeline


@dataclass
class _PipelineSearch:
    """One search: its request, the messages that may still be simulated, and the results."""

    request: PipelineRequest
    messages_left: int = MAX_MESSAGES
    known: dict[tuple[TreeShape, Pipeline], Simulation] = field(default_factory=dict)

    def first_pipeline(self, trees: Trees) -> Pipeline:
        """Return the pipeline that the formula gives for trees."""
        formula, slices = self._formula(trees), self.request.slices
        if slices is None and trees.shape.window is not None:
            slices = formula.slices_within(trees.shape.window)
        elif slices is None and trees.shape.kind is TreeKind.GAP_FILLING:
            best = formula.best_slices()
            aligned = formula.aligned_slices(best)
            slices = aligned if aligned <= _MOST_ALIGNED * best else best
        elif slices is None and trees.shape.kind is TreeKind.STRAIGHT:
            slices = _straight_slices(formula)
        elif slices is None and trees.figures.n_trees > MOST_TREES:
            slices = max(1, round(_SLICES_OF_MANY_TREES * formula.best_slices()))
        return _pipeline(trees, formula, slices or formula.best_slices(), USUAL_DELAY_HOPS_PER_HOP)

    def first_try(self, trees: Trees) -> tuple[float, Trees, Pipeline]:
        """Return the estimated time of trees in the pipeline of the formula."""
        pipeline = self.first_pipeline(trees)
        return self.estimated_s(trees, pipeline), trees, pipeline

    def n_messages(self, trees: Trees) -> int:
        """Return how many messages a first try of these trees takes."""
        return trees.n_rows * self._n_simulated(trees, self.first_pipeline(trees))

    def improved(
        self, time_s: float, trees: Trees, pipeline: Pipeline
    ) -> tuple[float, Trees, Pipeline]:
        """Return the fastest pipeline near this one: other numbers of slices, then other delays."""
        formula = self._formula(trees)
        for factor in _SLICE_FACTORS if self.request.slices is None else ():
            for _ in range(_MOST_STEPS_PER_FACTOR):
                slices = round(pipeline.slices * factor)
                slices += slices == pipeline.slices and (1 if factor > 1 else -1)
                other = _pipeline(trees, formula, slices, USUAL_DELAY_HOPS_PER_HOP)
                if not (1 <= slices <= MOST_SLICES and self._is_affordable(trees, other)):
                    break
                other_s = self.estimated_s(trees, other)
                if other_s >= time_s:
                    break
                time_s, pipeline = other_s, other
        is_whole = self._n_simulated(trees, pipeline) == pipeline.slices
        for delay in _OTHER_DELAYS_HOPS_PER_HOP if is_whole else _OTHER_DELAYS_IF_ESTIMATED:
            other = _pipeline(trees, formula, pipeline.slices, delay)
            if not self._is_affordable(trees, other):
                continue
            if (other_s := self.estimated_s(trees, other)) < time_s:
                time_s, pipeline = other_s, other
        return time_s, trees, pipeline

    def estimated_s(self, trees: Trees, pipeline: Pipeline) -> float:
        """Return a time estimated from as many slices as fill the pipeline and a few more."""
        n_simulated = self._n_simulated(trees, pipeline)
        part_bytes = self.request.payload_bytes * n_simulated / pipeline.slices
        result = trees.simulated(
            self.request.fabric, part_bytes, replace(pipeline, slices=n_simulated)
        )
        self.messages_left -= result.n_messages
        if n_simulated == pipeline.slices:
            self.known[trees.shape, pipeline] = result
        interval_s = self._formula(trees).slice_interval_s(pipeline.slices)
        return result.time_s + (pipeline.slices - n_simulated) * interval_s

    def simulated_whole(self, trees: Trees, pipeline: Pipeline) -> Simulation:
        """Return the simulation of all slices; of a very large table, as its first ones show it."""
        if (trees.shape, pipeline) in self.known:
            return self.known[trees.shape, pipeline]
        if not is_simulated_whole(trees, pipeline):
            return self._extended(trees, pipeline)
        return trees.simulated(self.request.fabric, self.request.payload_bytes, pipeline)

    def _extended(self, trees: Trees, pipeline: Pipeline) -> Simulation:
        """Return a simulation of the first slices, with the times and work of all of them."""
        n_simulated = self._n_simulated(trees, pipeline)
        part_bytes = self.request.payload_bytes * n_simulated / pipeline.slices
        first = trees.simulated(
            self.request.fabric, part_bytes, replace(pipeline, slices=n_simulated)
        )
        interval_s = _LATER_SLICES * self._formula(trees).slice_interval_s(pipeline.slices)
        later_s = (pipeline.slices - n_simulated) * interval_s
        return replace(
            first,
            payload_bytes=self.request.payload_bytes,
            slices=pipeline.slices,
            time_s=first.time_s + later_s,
            phases=tuple(replace(phase, end_s=phase.end_s + later_s) for phase in first.phases),
            channel_busy_s=first.channel_busy_s * (pipeline.slices / n_simulated),
        )

    def _formula(self, trees: Trees) -> TreeFormula:
        return self.request.formula(trees.figures)

    def _is_affordable(self, trees: Trees, pipeline: Pipeline) -> bool:
        return self.messages_left >= trees.n_rows * self._n_simulated(trees, pipeline)

    def _n_simulated(self, trees: Trees, pipeline: Pipeline) -> int:
        """Return how many slices an estimate simulates: all, if the first do not show the rest."""
        if trees.shape.kind is TreeKind.STRAIGHT:
            return pipeline.slices
        n_cheap = _MESSAGES_SIMULATED_WHOLE // max(1, trees.n_rows)
        n_full = self._formula(trees).slices_in_flight(pipeline.slices)
        is_large = trees.n_rows > _LARGE_ROWS
        n_beyond = _SLICES_BEYOND_FULL_IF_LARGE if is_large else _SLICES_BEYOND_FULL
        return min(pipeline.slices, max(n_cheap, n_beyond + n_full))
