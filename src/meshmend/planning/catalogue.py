"""Makes the schedule of each collective on a mesh, and the tasks of one rank, each once.

Every schedule is proved before it is used. In reduce-scatter and all-gather, torch expects that
rank i owns part i of the payload. A ring does that, and trees hung from every rank do in rank
order; a formula says which is faster.

Where all ranks are processes of one host, no link is slow: processors copy. Every algorithm copies
the same bytes, and a ring does it in the fewest messages, so `AUTO_ON_ONE_HOST` takes it for long
payloads.

`auto` plans for the fabric that it is given (`auto_on`), and runs the plan in the slices and with
the delays that are fastest there. Without one it plans for `reference`, which no machine is, and
slices are cut by the payload's size.

The fastest sum is searched for, which takes seconds on a thousand chips; meshes that are mirror
images or shifts of one another share one search. `QUICK` names the trees that take its place until
then: they need no search.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import MeshmendError
from meshmend.planning.colour_search import quick_colours
from meshmend.planning.least_times import REGIONS
from meshmend.planning.owner_search import is_ring_faster
from meshmend.planning.plan import AUTO, Plan, fastest_trees, plan
from meshmend.planning.plan_request import SumSizes
from meshmend.planning.proof import prove
from meshmend.planning.quick_plan import quick_schedule
from meshmend.planning.target import Question, Target
from meshmend.planning.tree_formula import Pipeline
from meshmend.schedule.algorithms import algorithm as algorithm_named
from meshmend.schedule.hazards import Hazards, hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.spanning import (
    broadcast,
    check_reached,
    only_to,
    spread,
    spread_in_parts,
    tree_sum,
)
from meshmend.schedule.table import Collective, Schedule, in_rank_order, renamed
from meshmend.topology.fabric import Fabric
from meshmend.topology.fabric import fabric as fabric_named
from meshmend.topology.mesh import Mesh
from meshmend.topology.symmetry import stand_in
from meshmend.topology.tiles import box_tiling
from meshmend.transport.event_loop import load_event_loop
from meshmend.transport.tasks import ITEMSIZES, RankProgram, Task, rank_program, task_of

SHORT_BYTES = 1 << 15  # up to here one tree is faster than schedules that cut the payload
RING_MESSAGE_BYTES = 1 << 18
TREE_MESSAGE_BYTES = 1 << 13
MOST_SLICES = 16
AUTO_ON_ONE_HOST = "auto-on-one-host"  # `auto` where all ranks share a host; not a name for users
ONE_HOST_RING = "rank-ring"
_ON = " on "
QUICK = "quick"  # trees for a sum, without a search; not a name for users
ONE_HOST_CHUNK_BYTES = 1 << 15  # with shorter chunks trees are faster, measured on 4 to 16 ranks
# Processes copy every byte that they get, and here a chip gets the sums of others whole: those of
# its lines, of all chips, or of regions. On 16 processes and two cores an exchange of 256 KB took
# 1.7 times as long as trees, and one of 4 KB as long.
_OF_WHOLE_SUMS = frozenset({"exchange", "direct", "flood", *REGIONS})
# Their chunks are sums of a line. On 4x4, 64 and 256 KiB took 1.1 to 1.2 times as long as on trees,
# on one host and on a network; as a torus on a network 0.74 and 0.96 times.
_ON_RINGS = frozenset({"exchange-1", "exchange-2"})
_USUAL_BYTES = (1 << 20, 25 << 20)  # DDP's first bucket, and its others


@dataclass(frozen=True)
class CollectiveCall:
    """A collective without its tensor; `root` is for a broadcast only.

    With a `tile` it is an allreduce over the chips of a colour, for all colours at once, on a mesh
    that boxes of this shape cover.
    """

    name: str  # of a collective, or "broadcast"
    root: int = 0
    tile: tuple[int, ...] = ()


Proved = tuple[Schedule, Hazards]

_Made = tuple[Proved, Pipeline | None]  # and how it is pipelined, if it was planned for a fabric
_remembered: dict[tuple[Mesh, str, CollectiveCall, int], _Made] = {}
_MOST_REMEMBERED = 256


def proved_schedule(mesh: Mesh, algorithm: str, kind: CollectiveCall, class_bytes: int) -> Proved:
    """Return a proved schedule for a collective on a class of payloads, and its hazards."""
    return _known(mesh, algorithm, kind, class_bytes)[0]


def planned_pipeline(
    mesh: Mesh, algorithm: str, kind: CollectiveCall, class_bytes: int
) -> Pipeline | None:
    """Return how that schedule is fastest for a payload of its class, if it is for a fabric."""
    return _known(mesh, algorithm, kind, class_bytes)[1]


def _known(mesh: Mesh, algorithm: str, kind: CollectiveCall, class_bytes: int) -> _Made:
    key = (mesh, algorithm, kind, class_bytes)
    if key not in _remembered:
        while len(_remembered) >= _MOST_REMEMBERED:
            _remembered.pop(next(iter(_remembered)))
        _remembered[key] = _make(mesh, algorithm, kind, class_bytes)
    return _remembered[key]


def proved_short_sum(mesh: Mesh) -> Proved:
    """Return a proved sum of few numbers on one tree, which needs no search, and its hazards."""
    return proved_schedule(mesh, AUTO, CollectiveCall("allreduce"), SHORT_BYTES)


def is_remembered(mesh: Mesh, algorithm: str, kind: CollectiveCall, class_bytes: int) -> bool:
    """Whether `proved_schedule` has this one in memory."""
    return (mesh, algorithm, kind, class_bytes) in _remembered


def is_searched(mesh: Mesh, algorithm: str, kind: CollectiveCall, class_bytes: int) -> bool:
    """Whether the plan of an algorithm is searched for, so that a quick one may stand in for it."""
    if kind.name != "allreduce":
        return False
    if kind.tile:
        return True
    if algorithm == AUTO_ON_ONE_HOST and not is_one_host_ring(mesh, class_bytes):
        algorithm = AUTO
    algorithm, _ = _split(algorithm)
    return algorithm == "trees" or (algorithm == AUTO and class_bytes > SHORT_BYTES)


def remember(
    mesh: Mesh,
    algorithm: str,
    kind: CollectiveCall,
    class_bytes: int,
    schedule: Schedule,
    pipeline: Pipeline | None = None,
) -> None:
    """Prove a schedule that was made elsewhere; `proved_schedule` then returns it.

    Raises:
        ProofError: the schedule is wrong.
    """
    _remembered[mesh, algorithm, kind, class_bytes] = _proved(mesh, schedule), pipeline


def auto_on(fabric: str) -> str:
    """Return the name of `auto` for a fabric; not a name for users."""
    return f"{AUTO}{_ON}{fabric}"


def fabric_in(algorithm: str) -> Fabric | None:
    """Return the fabric that an algorithm plans for; None: it was given none."""
    return _split(algorithm)[1]


def _split(algorithm: str) -> tuple[str, Fabric | None]:
    name, _, fabric = algorithm.partition(_ON)
    return name, fabric_named(fabric) if fabric else None


def _make(mesh: Mesh, algorithm: str, kind: CollectiveCall, class_bytes: int) -> _Made:
    """Return a proved schedule; one that was searched for on a given fabric with its pipeline."""
    name, fabric = _split(algorithm)
    if kind.name == "broadcast":
        return _proved(mesh, broadcast(mesh, kind.root)), None
    if kind.tile:
        return _colours(mesh, algorithm, kind.tile, class_bytes)
    if kind.name == "allreduce":
        if algorithm == QUICK:
            return _quick(mesh), None
        if algorithm == AUTO_ON_ONE_HOST:
            algorithm = name = ONE_HOST_RING if is_one_host_ring(mesh, class_bytes) else AUTO
        if class_bytes <= SHORT_BYTES and name == AUTO:
            return _proved(mesh, tree_sum(mesh)), None
        if is_searched(mesh, algorithm, kind, class_bytes):
            like = stand_in(mesh)
            if like.mesh != mesh:
                (found, _), pipeline = _known(like.mesh, algorithm, kind, class_bytes)
                return _proved(mesh, renamed(found, like.ranks)), pipeline
        made = plan(mesh, name, payload=class_bytes, fabric=fabric)
        if name == AUTO and _copies_much(mesh, made.schedule.algorithm):
            if fabric is None:
                made = plan(mesh, "trees", payload=class_bytes)
            else:
                made = fastest_trees(mesh, payload=class_bytes, fabric=fabric)
        return _with_pipeline(made, fabric)
    collective = Collective(kind.name)
    if collective is Collective.ALL_TO_ALL:
        made = plan(mesh, AUTO, collective=collective, payload=class_bytes, fabric=fabric)
        return (made.schedule, made.hazards), None
    target = Target().with_(class_bytes, fabric)
    question = Question(mesh, target.payload_bytes, target.fabric, collective)
    return _half(mesh, "ring-1d" if is_ring_faster(question) else "trees", collective), None


def _with_pipeline(made: Plan, fabric: Fabric | None) -> _Made:
    """Return a plan with the pipeline that was chosen for a fabric, if that was given."""
    return (made.schedule, made.hazards), made.pipeline if fabric else None


def _colours(mesh: Mesh, algorithm: str, tile: tuple[int, ...], class_bytes: int) -> _Made:
    if algorithm == QUICK:
        return _quick_colours(mesh, tile), None
    fabric = fabric_in(algorithm)
    made = plan(mesh, tile=box_tiling(mesh, tile), payload=class_bytes, fabric=fabric)
    return _with_pipeline(made, fabric)


@lru_cache(maxsize=16)  # payloads of all classes share a schedule
def _quick_colours(mesh: Mesh, tile: tuple[int, ...]) -> Proved:
    return _proved(mesh, quick_colours(box_tiling(mesh, tile)))


@lru_cache(maxsize=16)  # payloads of all classes share a schedule
def _quick(mesh: Mesh) -> Proved:
    return _proved(mesh, quick_schedule(mesh))


@lru_cache(maxsize=16)  # payloads of many classes share a schedule
def _half(mesh: Mesh, name: str, collective: Collective) -> Proved:
    """Return half of an allreduce in rank order."""
    return _proved(mesh, in_rank_order(algorithm_named(name).build(mesh, collective)))


@lru_cache(maxsize=128)  # two for the return of each board
def proved_spread(
    mesh: Mesh,
    holders: tuple[int, ...],
    *,
    in_parts: bool = False,
    receivers: tuple[int, ...] | None = None,
) -> Proved:
    """Return a proved schedule that sends what these ranks hold to all others, and its hazards.

    With `in_parts` a rank takes parts of it from several holders, which must hold the same bytes.
    With `receivers` only these ranks, and those on the way, get anything.
    """
    schedule = spread_in_parts(mesh, holders) if in_parts else spread(mesh, holders)
    proved = schedule, prove(mesh, schedule, replicas=holders).hazards
    if receivers is None:
        return proved
    pruned = only_to(schedule, receivers)
    check_reached(pruned, holders, receivers)
    return pruned, hazards_of(pruned)


def payload_class(kind: CollectiveCall, n_bytes: int) -> int:
    """Return the size to plan for: 32 KiB times the smallest sufficient power of four.

    A broadcast has one class: 32 KiB.
    """
    largest = SHORT_BYTES
    while kind.name != "broadcast" and largest < n_bytes:
        largest *= 4
    return largest


def _proved(mesh: Mesh, schedule: Schedule) -> Proved:
    """Return a schedule and its hazards; routes are not kept, since no worker needs them."""
    return schedule, prove(mesh, schedule).hazards


def _copies_much(mesh: Mesh, algorithm: str) -> bool:
    """Whether processes copy so much for an algorithm that they sum faster on trees."""
    return algorithm in _OF_WHOLE_SUMS or (algorithm in _ON_RINGS and not any(mesh.wrap))


def prepare(mesh: Mesh, algorithm: str) -> None:
    """Plan what most jobs need and load compiled code, so that forked workers inherit both."""
    proved_schedule(mesh, algorithm, CollectiveCall("broadcast"), SHORT_BYTES)
    for name in ("all-gather", "reduce-scatter", "allreduce"):
        for n_bytes in (1, *_USUAL_BYTES):
            kind = CollectiveCall(name)
            proved_schedule(mesh, algorithm, kind, payload_class(kind, n_bytes))
    load_event_loop()


def is_one_host_ring(mesh: Mesh, payload_bytes: float) -> bool:
    """Whether processes of one host sum this payload fastest on a ring in rank order.

    Such a ring may join any two ranks. With a link cut that is not right: two processes that lost
    each other must not be joined again.
    """
    is_long = payload_bytes >= 2 * mesh.n_live * ONE_HOST_CHUNK_BYTES
    return is_long and mesh.n_live > 1 and not mesh.failed_links


@dataclass(frozen=True, eq=False)
class _Planned:
    """How a plan for a fabric is pipelined: the slices, and the delay of each row."""

    slices: int
    delays: NDArray[np.float64]


class Catalogue:
    """The tasks of one rank of a mesh."""

    def __init__(self, mesh: Mesh, algorithm: str, n_slices: int, rank: int) -> None:
        self._mesh = mesh
        self._algorithm = algorithm
        self._n_slices = n_slices
        self._rank = rank
        self._other: dict[tuple[CollectiveCall, int], str] = {}  # algorithms of single classes
        self._programs: dict[tuple[CollectiveCall, int], RankProgram] = {}
        self._pipelines: dict[tuple[CollectiveCall, int], _Planned] = {}  # of plans for a fabric
        self._tasks: dict[tuple[CollectiveCall, int, str, str], Task] = {}

    def replan(self, kind: CollectiveCall, class_bytes: int, algorithm: str) -> None:
        """Run calls of this kind and class by another algorithm, or by another plan of the same."""
        self._other[kind, class_bytes] = algorithm
        self._programs.pop((kind, class_bytes), None)
        self._pipelines.pop((kind, class_bytes), None)
        for key in list(self._tasks):
            if key[0] == kind and payload_class(kind, _n_bytes(*key[1:3])) == class_bytes:
                del self._tasks[key]

    def task(self, kind: CollectiveCall, n_elements: int, dtype: str, op: str = "sum") -> Task:
        """Return this rank's part in a collective on `n_elements` elements."""
        key = (kind, n_elements, dtype, op)
        if key not in self._tasks:
            self._tasks[key] = self._make(kind, n_elements, dtype, op)
        return self._tasks[key]

    def plan_alike(self, mesh: Mesh) -> None:
        """Plan for another mesh what was asked for on this one, so that it is there when needed.

        What cannot be planned is told to whoever asks for it there.
        """
        for kind, class_bytes in list(self._programs):  # others may add to it
            if kind == CollectiveCall(kind.name):  # roots and tiles may be gone there
                with suppress(MeshmendError):
                    proved_schedule(mesh, self._algorithm, kind, class_bytes)

    @property
    def sum_sizes(self) -> SumSizes:
        """The sums so far: of each the number of elements, and their type."""
        return tuple(
            dict.fromkeys(
                (n_elements, dtype)
                for kind, n_elements, dtype, _ in list(self._tasks)  # others may add to it
                if kind == CollectiveCall("allreduce")
            )
        )

    def algorithm(self, kind: CollectiveCall, n_bytes: int) -> str:
        """Return the name of the algorithm that a collective on so many bytes runs."""
        return self._program(kind, n_bytes).schedule.algorithm

    def _program(self, kind: CollectiveCall, n_bytes: int) -> RankProgram:
        key = (kind, payload_class(kind, n_bytes))
        if key not in self._programs:
            algorithm = self._other.get(key, self._algorithm)
            schedule, hazards = proved_schedule(self._mesh, algorithm, *key)
            self._programs[key] = rank_program(schedule, hazards, self._rank)
            pipeline = planned_pipeline(self._mesh, algorithm, *key)
            if pipeline is not None:
                remaining = remaining_hops(schedule, hazards, placed(self._mesh, schedule).routes)
                delays = pipeline.delays(schedule, remaining)
                self._pipelines[key] = _Planned(pipeline.slices, delays)
        return self._programs[key]

    def _make(self, kind: CollectiveCall, n_elements: int, dtype: str, op: str) -> Task:
        n_bytes = _n_bytes(n_elements, dtype)
        program = self._program(kind, n_bytes)
        n_slices = self._n_slices or self._slices(kind, n_bytes, program.schedule)
        planned = self._pipelines.get((kind, payload_class(kind, n_bytes)))
        delays = planned.delays if planned else None
        return task_of(program, n_elements, dtype=dtype, op=op, n_slices=n_slices, delays=delays)

    def _slices(self, kind: CollectiveCall, n_bytes: int, schedule: Schedule) -> int:
        """Return how many slices to cut a payload in; the best number grows as its root does."""
        class_bytes = payload_class(kind, n_bytes)
        planned = self._pipelines.get((kind, class_bytes))
        if planned is None:
            return default_slices(schedule, n_bytes)
        return max(1, round(planned.slices * math.sqrt(n_bytes / class_bytes)))


def _n_bytes(n_elements: int, dtype: str) -> int:
    return n_elements * ITEMSIZES.get(dtype, 2)


def default_slices(schedule: Schedule, n_bytes: int) -> int:
    """Return how many slices to cut a payload in, so that the largest message has a good size.

    A schedule that divides the payload among all ranks is already a pipeline and needs few slices.
    A schedule of trees needs many.
    """
    if not schedule.n_rows:
        return 1
    largest = float(schedule.row_fractions().max()) * n_bytes
    shares_out = schedule.collective is not Collective.ALL_GATHER or schedule.n_chunks > 1
    is_ring = shares_out and len(np.unique(schedule.owners)) == schedule.n_ranks
    message_bytes = RING_MESSAGE_BYTES if is_ring else TREE_MESSAGE_BYTES
    return int(np.clip(round(largest / message_bytes), 1, MOST_SLICES))
