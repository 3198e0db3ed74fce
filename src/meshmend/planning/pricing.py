"""Finds what an algorithm costs on a mesh and fabric: builds, places and simulates it.

Knows every algorithm and, for comparison, the baselines on an intact part of a broken mesh.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import UnsupportedError
from meshmend.planning.least_times import (
    EXPRESS,
    REGIONS,
    RINGS_ND,
    SCATTERED_AXES,
    TWO_ROOTS,
    Delays,
    exchange_skew,
    least_time,
    n_exchange_rows,
    optimistic_tree_s,
    skewed_delays,
)
from meshmend.planning.owner_search import OwnerTrees, best_owner_trees
from meshmend.planning.packed_trees import Trees, TreeShape, packing_of, trees_of
from meshmend.planning.progress import ProgressCallback, no_progress
from meshmend.planning.target import Question
from meshmend.planning.tree_formula import Pipeline
from meshmend.planning.tree_search import best_trees, is_simulated_whole, simulated_trees
from meshmend.planning.two_root_prices import fastest_two_roots
from meshmend.schedule.algorithm_names import check_algorithm_name
from meshmend.schedule.algorithms import ALGORITHMS, algorithm
from meshmend.schedule.all_to_all import straight_blocks
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import Collective, Schedule, index_dtype, renamed
from meshmend.simulator.network_program import Program, program_of
from meshmend.simulator.rules import PhaseTime, Progress, Simulation, simulate
from meshmend.simulator.slices import best_slices
from meshmend.topology.mesh import Mesh
from meshmend.topology.pair_cut import pair_cut
from meshmend.topology.submesh import IntactPart, largest_box, without_lines
from meshmend.topology.symmetry import StandIn, stand_in
from meshmend.trees.tree_packing import TreePacking
from meshmend.units import counted

TREES = "trees"
BASELINES: dict[str, Callable[[Mesh], IntactPart]] = {
    "sub-mesh": largest_box,
    "drop-lines": without_lines,
}
_ON_INTACT_PART = (
    "row-pair",
    "two-d",
    "rank-ring",
)  # for baselines: the first that supports the part

MAX_MESSAGES = 16_000_000  # of one search for slices
_LARGE_ROWS, _MESSAGES_OF_LARGE_RINGS = 1_000_000, 4_000_000
_MOST_EXCHANGE_ROWS = 1 << 23  # `auto` tries no exchange of more: 128x128 would take gigabytes
# Without rings an exchange saves at most a hop for each axis, and pays an overhead at every hop. On
# meshes of more hops than this it was nowhere faster than `express`.
_MOST_OPEN_HOPS = 32
_UNEVEN = 1.05  # straight ways of an all-to-all load some link so much more than necessary
_CHIPS_OF_BOTH_SKEWS = 256  # up to here rings are simulated with and without delays in 0.2 s
_MOST_CHIPS_OF_REGIONS = 256
_FEW_CHIPS = 36  # up to here `auto` tries every algorithm for an allreduce
_FEW_OWNERS = 256  # and up to here for a sharded update; for a half always


@dataclass(frozen=True)
class PriceFigures:
    """What is shown of a simulation; small enough to be kept on disk."""

    time_s: float
    slices: int
    max_link_utilisation: float
    phases: tuple[PhaseTime, ...]


def figures_of(simulation: Simulation) -> PriceFigures:
    """Return the figures of a simulation."""
    return PriceFigures(
        simulation.time_s, simulation.slices, simulation.max_link_utilisation, simulation.phases
    )


@dataclass(frozen=True, eq=False)
class Price:
    """What an algorithm costs, how many chips take part, and how it was built.

    `simulated` returns the simulation behind the figures; it may have to run it again. `shape` is
    set for tree packings: with it and the pipeline the schedule can be built again.
    """

    name: str
    figures: PriceFigures
    simulated: Callable[[], Simulation]
    n_chips: int
    pipeline: Pipeline
    detail: str = ""
    shape: TreeShape | None = None

    @property
    def time_s(self) -> float:
        return self.figures.time_s

    @property
    def simulation(self) -> Simulation:
        return self.simulated()


def price(
    question: Question,
    name: str,
    *,
    slices: int | None = None,
    may_estimate: bool = False,
    progress: ProgressCallback = no_progress,
) -> Price:
    """Return what a named algorithm or baseline costs, with the best slices unless given.

    If it `may_estimate`, trees that make a large table are priced by a formula.

    Raises:
        UnsupportedError: the algorithm does not support this mesh.
        InputError: there is no such name.
    """
    found = price_below(
        question, name, math.inf, slices=slices, may_estimate=may_estimate, progress=progress
    )
    assert found is not None, "no bound is longer than for ever"
    return found


def price_below(
    question: Question,
    name: str,
    below_s: float,
    *,
    slices: int | None = None,
    may_estimate: bool = False,
    progress: ProgressCallback = no_progress,
) -> Price | None:
    """Return what `price` does, or None if a bound shows that it takes longer than `below_s`."""
    is_bounded = below_s < math.inf
    if name == TREES:
        algorithm(name).check_collective(question.collective)
        if is_bounded and optimistic_tree_s(question) > below_s:
            return None
        like = stand_in(question.mesh)
        asked = replace(question, mesh=like.mesh)
        of_trees = _price_of_owner_trees
        if question.collective is Collective.ALLREDUCE:
            of_trees = _price_of_trees
        return renamed_price(of_trees(asked, slices, progress, may_estimate=may_estimate), like)
    mesh = question.mesh
    if is_bounded and least_time(question, name) > below_s:
        algorithm(name).check(mesh)
        return None
    progress(f"{name}: building")
    skew, delays = exchange_skew(mesh, name), None
    if name in BASELINES:
        program, n_chips, detail = _baseline(question, name)
    else:
        program, delays = _program(question, name, skew)
        n_chips, detail = mesh.n_live, ""
    if is_bounded and _is_slower(question, program, below_s):
        return None
    progress(f"{name}: simulating")
    result = _simulated(
        question, program, slices, delays, lambda part: progress(f"{name}: simulating", part)
    )
    if name == RINGS_ND and skew and mesh.n_live <= _CHIPS_OF_BOTH_SKEWS:
        # Delays make rings of most full tori faster, and of a few slower.
        without = _simulated(question, program, slices, None, lambda part: None)
        result, skew = min((result, skew), (without, 0.0), key=lambda each: each[0].time_s)
    pipeline = Pipeline(result.slices, skew)
    return Price(name, figures_of(result), lambda: result, n_chips, pipeline, detail)


def renamed_price(price: Price, like: StandIn) -> Price:
    """Return a price on a stand-in as that on the mesh that it stands for."""
    if like.mesh == like.of:
        return price

    def simulated() -> Simulation:
        found = price.simulated()
        busy_s = np.zeros_like(found.channel_busy_s)
        is_link = like.channels >= 0
        busy_s[like.channels[is_link]] = found.channel_busy_s[is_link]
        schedule = renamed(found.schedule, like.ranks)
        return replace(found, schedule=schedule, channel_busy_s=busy_s)

    return replace(price, simulated=simulated)


def supported_names(mesh: Mesh, collective: Collective = Collective.ALLREDUCE) -> Iterator[str]:
    """Yield the algorithms that support a connected mesh, trees first."""
    for name in ALGORITHMS:
        if collective not in algorithm(name).collectives:
            continue
        try:
            algorithm(name).check(mesh)
        except UnsupportedError:
            continue
        yield name


def names_to_try(mesh: Mesh, collective: Collective = Collective.ALLREDUCE) -> Iterator[str]:
    """Yield the algorithms that `auto` compares on a connected mesh, the most promising first.

    `rings-nd` is first where lines are rings and nothing failed. Elsewhere only small meshes try
    it: on larger ones trees were faster in every case that was measured. In a half of an allreduce
    trees do not overlap up and down, so rings are as near to the limit there. An exchange comes
    before trees where rings are: it is quickly built, and trees are searched for. Where an axis
    wraps around, an exchange takes half of the hops of `express`, unless failures cut all rings.
    Elsewhere it saves at most a hop for each axis, so only small meshes try it.
    """
    wraps_around = any(mesh.rings)
    has_rings = wraps_around and not mesh.has_failures
    names = list(supported_names(mesh, collective))
    if collective is Collective.ALL_TO_ALL:
        # Around a hole the price of relays rules `pairs` out, which need not be simulated then.
        if len(names) > 1 and straight_blocks(mesh) > _UNEVEN * pair_cut(mesh).blocks:
            names.reverse()
        yield from names
        return
    if wraps_around and (has_rings or mesh.n_live > _FEW_CHIPS):
        names = [name for name in names if name != EXPRESS]
    if not wraps_around and EXPRESS in names:  # quickly built, and its time rules out others
        names.remove(EXPRESS)
        names.insert(1, EXPRESS)
    is_far = not wraps_around and sum(mesh.shape) - len(mesh.shape) > _MOST_OPEN_HOPS
    if is_far or n_exchange_rows(mesh) > _MOST_EXCHANGE_ROWS:
        names = [name for name in names if name not in SCATTERED_AXES]
    if mesh.n_live > _MOST_CHIPS_OF_REGIONS:
        names = [name for name in names if name not in REGIONS]
    if has_rings:
        yield RINGS_ND
        exchanges = [name for name in names if name in SCATTERED_AXES]
        yield from exchanges
        names = [name for name in names if name not in exchanges]
    most_chips = _FEW_CHIPS if collective is Collective.ALLREDUCE else _FEW_OWNERS
    if collective in {Collective.REDUCE_SCATTER, Collective.ALL_GATHER}:
        names, most_chips = [*names[1:], TREES], mesh.n_live
    for name in names:
        if name != RINGS_ND or (mesh.n_live <= most_chips and not has_rings):
            yield name


def checked_names(names: Iterable[str]) -> list[str]:
    """Return the names as a list if all of them exist."""
    checked = list(names)
    for name in checked:
        check_algorithm_name(name, (*ALGORITHMS, *BASELINES))
    return checked


def _price_of_trees(
    question: Question, slices: int | None, progress: ProgressCallback, *, may_estimate: bool
) -> Price:
    found = best_trees(question, slices=slices, may_estimate=may_estimate, progress=progress)
    return _price_of(question, found.trees, found.pipeline, found.known, found.time_s)


def _price_of_owner_trees(
    question: Question, slices: int | None, progress: ProgressCallback, *, may_estimate: bool
) -> Price:
    found = best_owner_trees(question, slices=slices, progress=progress)
    known = found.known
    if known is None and not may_estimate:
        known = found.trees.simulated(
            question.fabric,
            question.payload_bytes,
            found.pipeline,
            lambda part: progress("trees: simulating", part),
        )
    return _price_of(question, found.trees, found.pipeline, known, found.time_s)


def price_of_choice(
    question: Question, shape: TreeShape, packing: TreePacking | None, pipeline: Pipeline
) -> Price:
    """Return what the trees of a choice cost, pipelined in its way."""
    mesh = question.mesh
    trees: Trees | OwnerTrees
    if question.collective is Collective.ALLREDUCE:
        trees = Trees(mesh, shape, packing or trees_of(mesh, shape).packing)
    else:
        trees = OwnerTrees(mesh, shape, packing or packing_of(mesh, shape), question.collective)
    return _price_of(question, trees, pipeline, _simulation_of(question, trees, pipeline))


def _price_of(
    question: Question,
    trees: Trees | OwnerTrees,
    pipeline: Pipeline,
    known: Simulation | None,
    estimated_s: float = 0.0,
) -> Price:
    """Return what trees cost: as they were simulated, or as their time was estimated."""
    figures = PriceFigures(estimated_s, pipeline.slices, 0.0, ())
    return Price(
        TREES,
        figures if known is None else figures_of(known),
        lambda: known or _simulation_of(question, trees, pipeline),
        question.mesh.n_live,
        pipeline,
        _words_of(trees, pipeline),
        trees.shape,
    )


def _simulation_of(question: Question, trees: Trees | OwnerTrees, pipeline: Pipeline) -> Simulation:
    if isinstance(trees, Trees):
        return simulated_trees(trees, question.fabric, question.payload_bytes, pipeline)
    return trees.simulated(question.fabric, question.payload_bytes, pipeline)


def _words_of(trees: Trees | OwnerTrees, pipeline: Pipeline) -> str:
    """Return what is said of trees beside their time."""
    if isinstance(trees, OwnerTrees):
        owners = counted(trees.packing.n_ranks, "owner")
        return f"{counted(trees.n_chunks, 'tree')}, hung from {owners}"
    figures = trees.figures
    words = f"{counted(figures.n_trees, 'tree')} of depth {figures.depth:g}"
    if trees.shape.spread == 2:
        words = f"{figures.n_trees} trees whose sums meet, {2 * figures.depth:.0f} hops"
    if not is_simulated_whole(trees, pipeline):
        words += ", estimated from its first slices"
    return words


def _program(question: Question, name: str, skew: float) -> tuple[Program, Delays | None]:
    """Return an algorithm as a program, and the delays of its rows if it has a skew."""
    mesh = question.mesh
    schedule = algorithm(name).build(mesh, question.collective)
    hazards, routes = hazards_of(schedule), placed(mesh, schedule).routes
    delays = skewed_delays(schedule, hazards, routes, skew)
    return program_of(schedule, hazards, routes), delays


def _baseline(question: Question, name: str) -> tuple[Program, int, str]:
    mesh = question.mesh
    if question.collective is Collective.ALL_TO_ALL:
        raise UnsupportedError(f"{name} is a baseline of sums, but got an all-to-all; use 'pairs'")
    part = BASELINES[name](mesh)
    for candidate in _ON_INTACT_PART:
        try:
            program = program_on_part(part, mesh, candidate, question.collective)
        except UnsupportedError:
            continue
        return program, part.mesh.n_live, f"{candidate} on {part.what}"
    raise AssertionError("rank-ring supports every connected mesh")


def program_on_part(part: IntactPart, mesh: Mesh, name: str, collective: Collective) -> Program:
    """Return an algorithm for a part's chips, on routes over the live chips of the whole mesh.

    The chips of the part hold the payload; other live chips may forward.

    Raises:
        UnsupportedError: the algorithm does not support the part's shape.
    """
    schedule = on_ranks(algorithm(name).build(part.mesh, collective), part.ranks, mesh.n_live)
    return program_of(schedule, hazards_of(schedule), placed(mesh, schedule).routes)


def on_ranks(schedule: Schedule, ranks: NDArray[np.int32], n_ranks: int) -> Schedule:
    """Return a schedule whose rank i is rank `ranks[i]` of n_ranks; the others take no part."""
    dtype = index_dtype(n_ranks * schedule.n_buffers, schedule.n_chunks)
    return replace(
        schedule,
        n_ranks=n_ranks,
        owners=ranks[schedule.owners],
        src=ranks[schedule.src].astype(dtype),
        dst=ranks[schedule.dst].astype(dtype),
        lo=schedule.lo.astype(dtype),
        hi=schedule.hi.astype(dtype),
    )


def _simulated(
    question: Question,
    program: Program,
    slices: int | None,
    delays: Delays | None,
    progress: Progress,
) -> Simulation:
    if slices is None and program.schedule.algorithm == TWO_ROOTS:
        return fastest_two_roots(program, question, delays)
    if question.collective is Collective.ALL_TO_ALL and program.n_rows >= _LARGE_ROWS:
        slices = 1  # blocks are many: more slices fill no gaps
    if slices is not None:
        return simulate(
            program,
            question.fabric,
            payload_bytes=question.payload_bytes,
            slices=slices,
            delay_slices=delays,
            progress=progress,
        )
    return best_slices(
        program,
        question.fabric,
        payload_bytes=question.payload_bytes,
        # Two slices of large tables are enough to overlap their phases, and always affordable.
        max_messages=MAX_MESSAGES
        if program.n_rows < _LARGE_ROWS
        else max(_MESSAGES_OF_LARGE_RINGS, 3 * program.n_rows),
        delay_slices=delays,
        progress=progress,
    )


def _is_slower(question: Question, program: Program, below_s: float) -> bool:
    """Whether no number of slices is as fast: its busiest link or its empty messages take longer.

    Empty messages still queue, so their time may be a little too long; 2 % are taken off.
    """
    fabric = question.fabric
    busiest_bytes = float(program.channel_loads[1].max(initial=0.0)) * question.payload_bytes
    if busiest_bytes / fabric.link_bandwidth_bytes_per_s > below_s:
        return True
    return 0.98 * simulate(program, fabric, payload_bytes=0, slices=1).time_s > below_s
