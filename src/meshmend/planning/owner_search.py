"""Searches for the fastest trees hung from owners, for the collectives in which ranks own chunks.

A formula gives the number of slices and how long links let a row wait. It is within 5 % of the
simulator on 8x8, 16x16 and 32x32. Where simulations are cheap, a few pipelines near the one of the
formula are simulated; a large table is simulated only where its whole simulation is asked for.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from meshmend.errors import UnsupportedError
from meshmend.planning.packed_trees import Fastest, Pipelined, TreeShape, packing_of
from meshmend.planning.target import Question
from meshmend.planning.tree_formula import MOST_SLICES, Pipeline
from meshmend.schedule.table import Collective, Schedule, check_n_rows
from meshmend.schedule.trees import owner_tree_schedule
from meshmend.simulator.rules import Simulation
from meshmend.topology.fabric import Fabric
from meshmend.trees.rings import hamiltonian_ring
from meshmend.trees.rooted_trees import SLACK_HOPS, chunk_counts
from meshmend.trees.tree_packing import TreePacking

# Messages that a search simulates before it answers. 32x32 with a hole at 100 MB has six million:
# there the formula's pipeline is taken as it is.
_MAX_MESSAGES: Final = 3_000_000
# Longer ways load the links more evenly: a first simulation says what pays. None is as long as
# that needs. Trees of more chips than this take a second to make.
_FEW_CHIPS: Final = 256
_SLACKS: Final[tuple[int | None, ...]] = (None, 0, 4)
_SLACKS_OF_A_HALF: Final[tuple[int | None, ...]] = (0, SLACK_HOPS, 4)
_MOST_MESSAGES_TO_COMPARE: Final = 300_000  # a tenth of a second for each number of hops
# Links are busy for longer than the longest chain alone would need, so more slices pay than a chain
# of 2 diameters suggests. Found by trying.
_CHAINS_FOR_SLICES: Final = 1.5
# A row waits for the time of this many hops for each hop that it is nearer to its end. From 1.25 to
# 2.5 differ by 1 % in long pipelines. In a half the farthest goes first.
_USUAL_DELAY_HOPS_PER_HOP: Final = 1.5
_OTHER_DELAYS_HOPS_PER_HOP: Final = (1.25, 2.0, 4.0)
_FARTHEST_FIRST_HOPS_PER_HOP: Final = 1000.0
_SLICE_FACTORS: Final = (0.7, 0.5, 0.25, 1.35)
# In a half every link is busy from the start, so fewer slices do. On 10 meshes of `halves.py` at
# 2.5 and 33 MB this part of the formula's number was fastest in 20 of 40 cases.
_SLICES_OF_A_HALF: Final = 0.25
_SLICE_FACTORS_OF_A_HALF: Final = (2.0, 3.0, 4.0)


@dataclass(frozen=True, eq=False)
class OwnerTrees(Pipelined):
    """Trees hung from every owner, for one collective, ready to be simulated."""

    shape: TreeShape
    packing: TreePacking
    collective: Collective

    @cached_property
    def schedule(self) -> Schedule:
        """The collective over the trees."""
        return owner_tree_schedule(self.packing, self.collective)

    @property
    def n_rows(self) -> int:
        """How many rows the schedule has: one for each link of each chunk's tree and way."""
        n_ways = 1 if self.collective in _HALVES else 2
        return n_ways * self.n_chunks * (self.packing.n_ranks - 1)

    @property
    def n_chunks(self) -> int:
        """How many chunks all ranks own together."""
        return self.packing.n_trees


_HALVES: Final = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)


@dataclass(frozen=True)
class OwnerFormula:
    """About how long trees hung from owners take, as a function of the number of slices.

    The busiest link carries `chunks_on_a_link` chunks in every slice. The longest chain has
    `n_hops` hops.
    """

    n_chunks: int
    n_hops: float
    chunks_on_a_link: float
    fabric: Fabric
    payload_bytes: float

    def time_s(self, slices: int) -> float:
        """Return about how long the trees take."""
        hop_s, interval_s = self._hop_and_interval_s(slices)
        return self.n_hops * hop_s + slices * interval_s

    def best_slices(self) -> int:
        """Return the number of slices that suits the payload."""
        chunk_s = self.payload_bytes / self.n_chunks / self.fabric.link_bandwidth_bytes_per_s
        overhead_s = self.fabric.message_overhead_s * self.chunks_on_a_link
        if not chunk_s:
            return 1
        if not overhead_s:
            return MOST_SLICES // 4
        best = math.sqrt(_CHAINS_FOR_SLICES * self.n_hops * chunk_s / overhead_s)
        return max(1, min(MOST_SLICES, round(best)))

    def pipeline(self, slices: int, delay_hops_per_hop: float) -> Pipeline:
        """Return a pipeline whose delay per hop takes the time of so many hops."""
        slices = max(1, min(MOST_SLICES, slices))
        hop_s, interval_s = self._hop_and_interval_s(slices)
        skew = round(delay_hops_per_hop * hop_s / interval_s, 6) if interval_s else 0.0
        return Pipeline(slices, skew, 1.0)

    def _hop_and_interval_s(self, slices: int) -> tuple[float, float]:
        """Return what a hop takes, and the time between slices on the busiest link or chip."""
        size = self.payload_bytes / self.n_chunks / slices
        hold_s = self.fabric.message_overhead_s + size / self.fabric.link_bandwidth_bytes_per_s
        add_s = size / (self.fabric.chip_bandwidth_bytes_per_s or math.inf)
        update_s = size / (self.fabric.update_bytes_per_s or math.inf)
        busy_s = max(self.chunks_on_a_link * hold_s, self.n_chunks * add_s, update_s)
        return self.fabric.hop_latency_s + hold_s + add_s / 2, busy_s


def best_owner_trees(
    question: Question,
    *,
    slices: int | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Fastest[OwnerTrees]:
    """Return the fastest trees found for a payload; with `slices` given, for that number.

    Large tables are not simulated: their time is that of the formula.

    Raises:
        UnsupportedError: the table has too many rows.
    """
    n_ranks = question.mesh.n_live
    check_n_rows("trees", n_ranks, question.n_halves * n_ranks * (n_ranks - 1))
    progress("trees: packing")
    trees, first = _likely_fastest(question, slices)
    progress("trees: simulating")
    return _fastest_pipeline(trees, question, slices, first)


def _likely_fastest(question: Question, slices: int | None) -> tuple[OwnerTrees, Simulation | None]:
    """Return the trees that are likely to be fastest: first how many, then how long ways are.

    By a first simulation, which comes with them, because messages that meet cost more than hops; of
    many messages by the formula.
    """
    n_live = question.mesh.n_live
    simulations: dict[TreeShape, Simulation] = {}

    def likely_s(trees: OwnerTrees) -> float:
        formula = owner_formula(trees, question)
        pipeline = _first_pipeline(trees, formula, slices)
        n_messages = trees.n_rows * pipeline.slices
        if n_messages <= _MOST_MESSAGES_TO_COMPARE:
            if trees.shape not in simulations:
                simulations[trees.shape] = _simulated(trees, question, pipeline)
            return simulations[trees.shape].time_s
        return formula.time_s(slices or formula.best_slices())

    first, *others = _SLACKS_OF_A_HALF if question.collective in _HALVES else _SLACKS
    if n_live > _FEW_CHIPS:
        first, others = None, []
    best = min((_trees_of(question, each, first) for each in chunk_counts(n_live)), key=likely_s)
    each = best.n_chunks // n_live
    best = min([best, *(_trees_of(question, each, slack) for slack in others)], key=likely_s)
    return best, simulations.get(best.shape)


def _trees_of(question: Question, chunks_each: int = 1, slack: int | None = None) -> OwnerTrees:
    """Return trees hung from every owner. In a half each direction of a link counts for itself."""
    mesh, both_ways = question.mesh, question.collective not in _HALVES
    shape = TreeShape(chunks_each * mesh.n_live, slack, rooted=True, both_ways=both_ways)
    return OwnerTrees(mesh, shape, packing_of(mesh, shape), question.collective)


def _simulated(trees: OwnerTrees, question: Question, pipeline: Pipeline) -> Simulation:
    return trees.simulated(question.fabric, question.payload_bytes, pipeline)


def is_ring_faster(question: Question) -> bool:
    """Whether one ring is faster than trees for a half of an allreduce, by formulas."""
    mesh, fabric = question.mesh, question.fabric
    try:
        hamiltonian_ring(mesh)
    except UnsupportedError:
        return False
    n, hop_s = mesh.n_live, fabric.hop_latency_s + fabric.message_overhead_s
    part_s = question.payload_bytes / (2 * n * fabric.link_bandwidth_bytes_per_s)
    formula = owner_formula(_trees_of(question), question)
    return (n - 1) * (hop_s + part_s) <= formula.time_s(formula.best_slices())


def owner_formula(trees: OwnerTrees, question: Question) -> OwnerFormula:
    """Return the formula for these trees."""
    packing, is_half = trees.packing, trees.collective in _HALVES
    load: float = packing.most_trees_up if is_half else packing.max_load * trees.n_chunks
    if trees.mesh.has_slow:
        load = packing.slowest_load(trees.mesh, up_alone=is_half) * trees.n_chunks
    n_hops = float(packing.depths.max() if is_half else 2 * packing.depths.mean())
    return OwnerFormula(trees.n_chunks, n_hops, load, question.fabric, question.payload_bytes)


def _first_pipeline(trees: OwnerTrees, formula: OwnerFormula, slices: int | None) -> Pipeline:
    """Return the pipeline to try first, in so many slices if given."""
    is_half = trees.collective in _HALVES
    delay = _FARTHEST_FIRST_HOPS_PER_HOP if is_half else _USUAL_DELAY_HOPS_PER_HOP
    if slices is None:
        slices = formula.best_slices()
        if is_half and trees.mesh.n_live <= _FEW_CHIPS:
            slices = round(_SLICES_OF_A_HALF * slices)
    return formula.pipeline(slices, delay)


def _fastest_pipeline(
    trees: OwnerTrees, question: Question, slices: int | None, simulation: Simulation | None
) -> Fastest[OwnerTrees]:
    """Return the fastest of a few pipelines; `simulation` is that of the first, if it is known."""
    formula = owner_formula(trees, question)
    is_half = trees.collective in _HALVES
    first = pipeline = _first_pipeline(trees, formula, slices)
    left = _MAX_MESSAGES - trees.n_rows * pipeline.slices
    if left < 0:
        return Fastest(trees, pipeline, formula.time_s(pipeline.slices), None)
    best = simulation or _simulated(trees, question, pipeline)
    tried = {pipeline}

    def others() -> Iterator[Pipeline]:
        if slices is None and is_half:
            for factor in _SLICE_FACTORS_OF_A_HALF:
                yield replace(first, slices=max(1, round(factor * first.slices)))
        elif slices is None:
            for factor in _SLICE_FACTORS:
                if factor > 1 and pipeline != first:  # fewer are faster, so more are not
                    continue
                yield formula.pipeline(round(factor * first.slices), _USUAL_DELAY_HOPS_PER_HOP)
        for delay in () if is_half else _OTHER_DELAYS_HOPS_PER_HOP:
            yield formula.pipeline(pipeline.slices, delay)

    for other in others():
        left -= trees.n_rows * other.slices
        if left < 0 or other in tried:
            continue
        tried.add(other)
        result = _simulated(trees, question, other)
        if result.time_s < best.time_s:
            best, pipeline = result, other
    return Fastest(trees, pipeline, best.time_s, best)
