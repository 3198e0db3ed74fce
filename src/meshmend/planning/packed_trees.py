"""Makes packings from their parameters: trees of the overlay, prepared for the simulator.

A `TreeShape` is small enough for a file and, with the mesh, gives the same trees again. Of whatever
is `Pipelined`, searches ask how long it takes in one pipeline and another.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property, lru_cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.tree_formula import SPREAD_OVERLAP, Pipeline, TreeFigures
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.table import Collective, Schedule
from meshmend.schedule.trees import spread_schedule, tree_schedule
from meshmend.simulator.network_program import Program, program_of
from meshmend.simulator.rules import Progress, Simulation, simulate
from meshmend.topology.fabric import Fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.trees.rooted_trees import rooted_packing
from meshmend.trees.spread_trees import SpreadTrees, spread_trees
from meshmend.trees.straight_trees import GAP
from meshmend.trees.tree_counts import pace
from meshmend.trees.tree_packing import (
    TreePacking,
    disjoint_packing,
    gap_packing,
    straight_packing,
    tree_packing,
)


@dataclass(frozen=True, eq=False)
class Pipelined(ABC):
    """A schedule to simulate in several pipelines; what they have in common is computed once."""

    mesh: Mesh

    @property
    @abstractmethod
    def schedule(self) -> Schedule:
        """The moves that are pipelined."""

    @cached_property
    def _program_and_remaining_hops(self) -> tuple[Program, NDArray[np.int32]]:
        schedule = self.schedule
        hazards, routes = hazards_of(schedule), placed(self.mesh, schedule).routes
        return program_of(schedule, hazards, routes), remaining_hops(schedule, hazards, routes)

    def simulated(
        self,
        fabric: Fabric,
        payload_bytes: float,
        pipeline: Pipeline,
        progress: Progress | None = None,
    ) -> Simulation:
        """Return the simulation of the schedule in a pipeline."""
        program, remaining = self._program_and_remaining_hops
        return simulate(
            program,
            fabric,
            payload_bytes=payload_bytes,
            slices=pipeline.slices,
            delay_slices=pipeline.delays(program.schedule, remaining),
            progress=progress,
        )


_Found = TypeVar("_Found", bound=Pipelined)


@dataclass(frozen=True, eq=False)
class Fastest(Generic[_Found]):
    """The fastest trees that a search found, their pipeline, and its time.

    `known` is None if the search may estimate and has more messages than it simulates; then the
    time is estimated from the first slices, or is that of the formula.
    """

    trees: _Found
    pipeline: Pipeline
    time_s: float
    known: Simulation | None

    @property
    def simulation(self) -> Simulation:
        """The simulation, of a search that may not estimate."""
        assert self.known is not None, "whoever allows an estimate must not need a simulation"
        return self.known


class TreeKind(Enum):
    """How the trees of a packing share the links."""

    BALANCED = auto()
    DISJOINT = auto()
    GAP_FILLING = auto()
    STRAIGHT = auto()
    ROOTED = auto()
    SPREAD = auto()
    MEETING = auto()


@dataclass(frozen=True)
class TreeShape:
    """The parameters of a packing: with the mesh they give the same trees again.

    `depth_slack` is how many hops deeper than the radius the trees may be, or how many hops longer
    than the shortest a way of `rooted` trees; with None they are as deep as even loads need. With a
    `window` there are as many channel-disjoint trees as possible instead. All slices then pass a
    channel within the time of `window` hops. With a `gap` the leaves of the trees fill the gaps of
    the channels. With a seed in `straight` the branches are straight lines. `rooted` trees are made
    for owners all over the mesh, for one way or `both_ways`. `spread` trees have one or two roots
    each, all over the mesh, and all start at once. With `equal` they are made as if all links were
    equally fast.
    """

    n_trees: int
    depth_slack: int | None = None
    window: int | None = None
    gap: float | None = None
    straight: int | None = None
    rooted: bool = False
    both_ways: bool = False
    spread: int = 0
    equal: bool = False

    @property
    def is_disjoint(self) -> bool:
        """Whether the shape asks for channel-disjoint trees."""
        return self.window is not None

    @property
    def is_quick(self) -> bool:
        """Whether the trees are quicker to make again than to keep."""
        return self.rooted or self.spread > 0

    @property
    def kind(self) -> TreeKind:
        """What the trees are good at: the formula's error is alike for trees of one kind."""
        if self.is_disjoint:
            return TreeKind.DISJOINT
        if self.straight is not None:
            return TreeKind.STRAIGHT
        if self.rooted:
            return TreeKind.ROOTED
        if self.spread:
            return TreeKind.SPREAD if self.spread == 1 else TreeKind.MEETING
        return TreeKind.BALANCED if self.gap is None else TreeKind.GAP_FILLING


@dataclass(frozen=True, eq=False)
class Trees(Pipelined):
    """A packing of a mesh, ready to be simulated."""

    shape: TreeShape
    packing: TreePacking | SpreadTrees

    @cached_property
    def figures(self) -> TreeFigures:
        """The depth, and the load of both directions together.

        For disjoint trees it is the load upwards only, for trees that fill gaps the pace.
        """
        packing = self.packing
        if isinstance(packing, SpreadTrees):
            return TreeFigures(
                packing.n_trees, packing.hops / 2, packing.load, SPREAD_OVERLAP, packing.passed
            )
        load: float = round(packing.max_load * packing.n_trees)
        if self.mesh.has_slow:
            up_alone = self.shape.is_disjoint
            load = packing.n_trees * packing.slowest_load(self.mesh, up_alone=up_alone)
        gap = GAP if self.shape.kind is TreeKind.STRAIGHT else self.shape.gap
        if self.shape.is_disjoint and not self.mesh.has_slow:
            load = packing.most_trees_up
        elif gap is not None and not self.mesh.has_slow:
            goal = pace(mesh_figures(self.mesh), packing.n_trees, gap)
            load = packing.needed_pace(goal, gap)
        overlap = SPREAD_OVERLAP if self.shape.rooted else 0.0
        return TreeFigures(packing.n_trees, packing.depth, load, overlap)

    @cached_property
    def schedule(self) -> Schedule:
        """The allreduce over the trees."""
        if isinstance(self.packing, SpreadTrees):
            return spread_schedule(self.packing)
        return tree_schedule(self.packing, Collective.ALLREDUCE)

    @property
    def n_rows(self) -> int:
        """How many rows the schedule has: one up and one down for each link of a tree.

        Of trees whose sums meet there are two less each way, and four from roots to gates.
        """
        return 2 * self.packing.n_trees * (self.packing.n_ranks - (self.shape.spread != 2))


@lru_cache(maxsize=16)
def trees_of(mesh: Mesh, shape: TreeShape) -> Trees:
    """Return the trees of a shape; the last 16 are kept in memory.

    If no disjoint or straight trees are found, the trees are balanced instead, as their figures
    show.
    """
    packing = None
    seen = with_equal_links(mesh) if shape.equal else mesh
    if shape.spread:
        found = spread_trees(seen, n_trees=shape.n_trees, n_roots=shape.spread)
        return Trees(mesh, shape, found)
    if shape.rooted:
        packing = rooted_packing(
            seen,
            n_trees=shape.n_trees,
            both_ways=shape.both_ways,
            slack=shape.depth_slack,
        )
    if shape.window is not None:
        packing = disjoint_packing(seen, window=shape.window)
    if shape.gap is not None and shape.depth_slack is not None:
        packing = gap_packing(
            seen, n_trees=shape.n_trees, depth_slack=shape.depth_slack, gap=shape.gap
        )
    if shape.straight is not None and shape.depth_slack is not None:
        packing = _straight(seen, shape.n_trees, shape.depth_slack, shape.straight)
    if packing is None:
        packing = tree_packing(seen, n_trees=shape.n_trees, depth_slack=shape.depth_slack)
    return Trees(mesh, shape, packing)


def packing_of(mesh: Mesh, shape: TreeShape) -> TreePacking:
    """Return the trees of a shape that go up and down the same ways."""
    packing = trees_of(mesh, shape).packing
    assert isinstance(packing, TreePacking), "spread trees go down other ways than up"
    return packing


def with_equal_links(mesh: Mesh) -> Mesh:
    """Return a mesh without its slow links' speeds."""
    return replace(mesh, slow=frozenset())


def is_straight(mesh: Mesh, shape: TreeShape) -> bool:
    """Whether straight trees are found for a shape that asks for them."""
    assert shape.straight is not None, "the shape asks for straight trees"
    assert shape.depth_slack is not None, "roots are drawn within a slack"
    return _straight(mesh, shape.n_trees, shape.depth_slack, shape.straight) is not None


@lru_cache(maxsize=16)
def _straight(mesh: Mesh, n_trees: int, depth_slack: int, seed: int) -> TreePacking | None:
    return straight_packing(mesh, n_trees=n_trees, depth_slack=depth_slack, seed=seed)
