"""Searches for the fastest trees hung from owners, for the collectives in which ranks own chunks.

A formula gives the number of slices and how long links let a row wait. It is within 5 % of the
simulator on 8x8, 16x16 and 32x32. Where simulations are cheap, a few pipelines near the one of the
formula are simulated; a large table is simulated only where its whole simulation is asked for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from meshmend.errors import UnsupportedError
from meshmend.planning.packed_trees import Pipelined, TreeShape, trees_of
from meshmend.planning.tree_formula import MOST_SLICES, Pipeline
from meshmend.schedule.table import Collective, Schedule
from meshmend.schedule.trees import owner_tree_counts, owner_tree_schedule
from meshmend.simulator.rules import Simulation
from meshmend.topology.fabric import Fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.trees.rings import hamiltonian_ring
from meshmend.trees.rooted_trees import rooted_chunks_each
from meshmend.trees.tree_packing import TreePacking

# Messages that a search simulates before it answers. 32x32 with a hole at 100 MB has six million:
# there the formula's pipeline is taken as it is.
_MAX_MESSAGES: Final = 3_000_000
_FEW_CHIPS: Final = 128  # up to here two numbers of trees are tried
# Links are busy for longer than the longest chain alone would need, so more slices pay than a chain
# of 2 diameters suggests. Found by trying.
_CHAINS_FOR_SLICES: Final = 1.5
# A row waits for the time of this many hops for each hop that it is nearer to its end. From 1.25 to
# 1.75 differ by 0.5 % in long pipelines. In a half of a short payload the farthest goes first.
_USUAL_DELAY_HOPS_PER_HOP: Final = 1.25
_OTHER_DELAYS_HOPS_PER_HOP: Final = (1.5, 2.0, 4.0, 1000.0)
_SLICE_FACTORS: Final = (1.35, 0.74)


@dataclass(frozen=True, eq=False)
class OwnerTrees(Pipelined):
    """Trees hung from every owner, for one collective, ready to be simulated."""

    shape: TreeShape
    packing: TreePacking
    collective: Collective

    @cached_property
    def schedule(self) -> Schedule:
        """The collective over the trees."""
        return owner_tree_schedule(
            self.packing, self.collective, chunks_each=self.shape.chunks_each
        )

    @property
    def n_rows(self) -> int:
        """How many rows the schedule has: one for each link of each chunk's tree and way."""
        n_ways = 1 if self.collective in _HALVES else 2
        return n_ways * self.n_chunks * (self.packing.n_ranks - 1)

    @property
    def n_chunks(self) -> int:
        """How many chunks all ranks own together."""
        return self.shape.chunks_each * self.packing.n_ranks


_HALVES: Final = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)


@dataclass(frozen=True)
class OwnerFormula:
    """About how long trees hung from owners take, as a function of the number of slices.

    The busiest link carries `chunks_on_a_link` chunks in every slice. The longest chain has
    `n_hops` hops.
    """

    n_chunks: int
    n_hops: int
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


@dataclass(frozen=True, eq=False)
class FastestOwnerTrees:
    """The fastest trees found, their pipeline, and their time: simulated, or by the formula."""

    trees: OwnerTrees
    pipeline: Pipeline
    time_s: float
    simulation: Simulation | None


def owner_trees_of(mesh: Mesh, shape: TreeShape, collective: Collective) -> OwnerTrees:
    """Return the trees of a shape, hung from every owner."""
    return OwnerTrees(mesh, shape, trees_of(mesh, shape).packing, collective)


def best_owner_trees(
    mesh: Mesh,
    fabric: Fabric,
    payload_bytes: float,
    collective: Collective,
    *,
    slices: int | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> FastestOwnerTrees:
    """Return the fastest trees found for a payload; with `slices` given, for that number.

    Large tables are not simulated: their time is that of the formula.
    """
    progress("trees: packing")
    found = [owner_trees_of(mesh, shape, collective) for shape in _shapes(mesh, collective)]
    progress("trees: simulating")
    tried = [_fastest_pipeline(trees, fabric, payload_bytes, slices) for trees in found]
    return min(tried, key=lambda each: each.time_s)


def _shapes(mesh: Mesh, collective: Collective) -> list[TreeShape]:
    """Return the shapes worth trying, the most promising first.

    In a half each direction of a link counts for itself, so the trees are made for their owners.
    """
    if collective in _HALVES:
        each = rooted_chunks_each(mesh)
        return [TreeShape(each * mesh.n_live, chunks_each=each, rooted=True)]
    counts = owner_tree_counts(mesh)[: 2 if mesh.n_live <= _FEW_CHIPS else 1]
    return [TreeShape(n_trees, chunks_each=chunks_each) for n_trees, chunks_each in counts]


def is_ring_faster(
    mesh: Mesh, fabric: Fabric, payload_bytes: float, collective: Collective
) -> bool:
    """Whether one ring is faster than trees for a half of an allreduce, by formulas."""
    try:
        hamiltonian_ring(mesh)
    except UnsupportedError:
        return False
    n, hop_s = mesh.n_live, fabric.hop_latency_s + fabric.message_overhead_s
    ring_s = (n - 1) * (hop_s + payload_bytes / (2 * n * fabric.link_bandwidth_bytes_per_s))
    trees = owner_trees_of(mesh, _shapes(mesh, collective)[0], collective)
    formula = owner_formula(trees, fabric, payload_bytes)
    return ring_s <= formula.time_s(formula.best_slices())


def owner_formula(trees: OwnerTrees, fabric: Fabric, payload_bytes: float) -> OwnerFormula:
    """Return the formula for these trees."""
    diameter, is_half = mesh_figures(trees.mesh).diameter, trees.collective in _HALVES
    packing, rooted = trees.packing, trees.shape.rooted
    load: float = packing.most_trees_up if rooted else packing.max_load * trees.n_chunks
    if trees.mesh.has_slow:
        load = packing.slowest_load(trees.mesh, up_alone=rooted) * trees.n_chunks
    return OwnerFormula(
        trees.n_chunks,
        diameter if is_half else 2 * diameter,
        load,
        fabric,
        payload_bytes,
    )


def _fastest_pipeline(
    trees: OwnerTrees, fabric: Fabric, payload_bytes: float, slices: int | None
) -> FastestOwnerTrees:
    formula = owner_formula(trees, fabric, payload_bytes)
    usual = _USUAL_DELAY_HOPS_PER_HOP
    pipeline = formula.pipeline(slices or formula.best_slices(), usual)
    left = _MAX_MESSAGES - trees.n_rows * pipeline.slices
    if left < 0:
        return FastestOwnerTrees(trees, pipeline, formula.time_s(pipeline.slices), None)
    best = trees.simulated(fabric, payload_bytes, pipeline)
    factors = _SLICE_FACTORS if slices is None else ()
    changes = [(factor, usual) for factor in factors]
    for factor, delay in (*changes, *((1.0, delay) for delay in _OTHER_DELAYS_HOPS_PER_HOP)):
        first = formula.best_slices() if delay == usual else pipeline.slices
        other = formula.pipeline(round(factor * first), delay)
        left -= trees.n_rows * other.slices
        if left < 0 or other == pipeline:
            continue
        result = trees.simulated(fabric, payload_bytes, other)
        if result.time_s < best.time_s:
            best, pipeline = result, other
    return FastestOwnerTrees(trees, pipeline, best.time_s, best)
