"""How the chips of a generation exchange bytes: connections, sums in flight, and states.

A **seat** is a chip's number in the mesh without failures. Connections join seats, and stay open
from one generation to the next. A **rank** is a chip's number within one generation. Plans are
made for ranks.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from meshmend.errors import TransportError
from meshmend.membership.generation import Generation
from meshmend.planning.catalogue import (
    Catalogue,
    CollectiveCall,
    proved_short_sum,
    proved_spread,
)
from meshmend.planning.link_probes import LinkProbe
from meshmend.planning.plan_cache import load_or_make_plans, planned_losses
from meshmend.planning.plan_request import GATHER, SumSizes
from meshmend.planning.settings import Settings
from meshmend.schedule.hazards import Hazards, hazards_of
from meshmend.schedule.spanning import Ends, point_to_point
from meshmend.schedule.table import Schedule
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.train.core.host_planner import HostPlanner, PlanAheadSettings
from meshmend.train.core.link_speeds import Work
from meshmend.train.core.plan_agreement import FolderPlans, PlanAgreement, split_sums
from meshmend.transport.listener import Address
from meshmend.transport.reference import chunk_at, run_chunk
from meshmend.transport.sockets import SocketTransport
from meshmend.transport.tasks import Bytes, RankProgram, Task, rank_program, task_of

_log = logging.getLogger(__name__)

_SUM = CollectiveCall("allreduce")
_ALL_GATHER = CollectiveCall(GATHER)
_SPREAD_MESSAGE_BYTES = 1 << 18
_CONNECT_S = 10.0
FIRST_GENERATION: Final = 1
_LOOK_EVERY_S: Final = 1.0  # for how many plans there are


class PendingSum(Protocol):
    """A sum in flight; its payload must not be touched until `wait` returns or raises.

    When one sum of a generation fails, all that are in flight fail.
    """

    def wait(self) -> None:
        """Return when the payload is the sum; raise what `Exchange.sum` raises."""


class SumsBeside(Protocol):
    """What else sums with the chips of a generation, over connections of its own on the same links.

    Its ranks are those of the generation.
    """

    @property
    def sum_sizes(self) -> SumSizes:
        """The sums so far."""

    def work_done(self) -> Mapping[int, tuple[int, int]]:
        """Return for each connected rank what `liveness.work_done` says."""

    def plan_for(self, mesh: Mesh) -> None:
        """Plan the sums from here on for a mesh of the same chips; all chips call this alike."""


class Exchange:
    """One chip's connections, and its sums with the other chips of its generation.

    `plans` is the folder of plans that were made ahead; with `plan_ahead` the workers fill it.
    """

    def __init__(
        self,
        whole: Mesh,
        chip: Chip,
        settings: Settings,
        *,
        plans: Path | None = None,
        plan_ahead: PlanAheadSettings | None = None,
    ) -> None:
        self._whole = whole
        self.chip = chip
        self._algorithm = settings.planned_algorithm
        self._seats = {other: seat for seat, other in enumerate(whole.live)}
        self.transport = SocketTransport(
            self._seats[chip],
            [f"chip {other}" for other in whole.live],
            settings.secret.encode(),
            bind=settings.bind,
            window_bytes=settings.window,
            sums_payloads=settings.checksum,
            link_timeout_s=settings.link_timeout_s,
        )
        self.beside: SumsBeside | None = None  # on all chips, or on none
        # Called with each `interrupt`: what else waits for peers, such as a process group, stops.
        self.on_interrupt: Callable[[], None] = lambda: None
        self._planner = HostPlanner(chip, plan_ahead) if plan_ahead else None
        self.plans = self._planner.folder if self._planner else plans  # None: nobody makes any
        self._searcher: HostPlanner | None = None  # which makes plans for links of other speeds
        self._begin(Generation(0, ()), whole, rank=0)

    def _begin(self, generation: Generation, mesh: Mesh, rank: int) -> None:
        """Set all that belongs to one generation: nothing is planned yet, and nobody connected."""
        self._generation = generation
        self.mesh = mesh
        self.rank = rank
        self._catalogue = Catalogue(mesh, self._algorithm, 0, rank)
        self._sums: SumSizes = ()
        self._sought: _SoughtPlans | None = None  # None: those in use are the best ones
        self._tasks: dict[tuple[int, str], Task] = {}  # by size, and element type or collective
        self._short: RankProgram | None = None  # of the sum of few numbers
        self._connected: set[int] = set()  # seats with a connection of this generation
        self._planned: tuple[int, int] | None = None  # losses with plans, as last looked up
        self._look_at = 0.0

    @property
    def address(self) -> Address:
        """Where this chip listens."""
        return self.transport.address

    @property
    def seat(self) -> int:
        """The number of this chip in the mesh without failures."""
        return self._seats[self.chip]

    @property
    def generation_number(self) -> int:
        """The generation that was entered last."""
        return self.transport.generation

    def interrupt(self) -> None:
        """Stop waiting now."""
        self.transport.interrupt()
        self.on_interrupt()

    def chip_of(self, seat: int) -> Chip:
        """Return the chip of a seat. Errors of the transport call this number a rank."""
        return self._whole.live[seat]

    def sever(self, chip: Chip) -> None:
        """Break the connection to a chip, as a cut link would."""
        self.transport.sever(self._seats[chip])

    def corrupt(self, chip: Chip) -> None:
        """Change bytes of what comes from a chip, as a link that is broken would."""
        self.transport.corrupt(self._seats[chip])

    def sent_bytes(self) -> dict[Chip, int]:
        """Return how many bytes this chip has sent to each other; any thread may call this."""
        return {self.chip_of(seat): n for seat, n in self.transport.sent_bytes().items()}

    def enter(self, generation: Generation) -> None:
        """Begin a generation: close connections to chips outside it, and assign ranks."""
        self.transport.renew(generation.number)
        present = set(generation.chips)
        self.transport.drop(seat for chip, seat in self._seats.items() if chip not in present)
        mesh = generation.mesh_of(self._whole)
        self._begin(generation, mesh, mesh.rank_of[self.chip])

    def plan(self, sums: SumSizes) -> None:
        """Plan sums and gathers of these sizes.

        The first generation waits for the fastest plans: all its chips search for the same ones.
        Later ones take what is there, and `prepare` agrees on it.

        Raises:
            StoppedError: there is a newer generation.
        """
        if self.mesh.n_live == 1:
            return
        self._sums = sums
        algorithm, direct = self._algorithm, sums
        if self._generation.number > FIRST_GENERATION:
            self._sought = self._agreed_on(self.plans, self.mesh, sums, self._catalogue)
            _, direct = split_sums(self.mesh, algorithm, sums)
        if self.plans is not None:
            check = self.transport.check
            load_or_make_plans(self.plans, self.mesh, algorithm, direct, check=check)
        self._make_tasks()
        self._short_sum()

    def _make_tasks(self) -> None:
        self._tasks = {}
        for size, kind in self._sums:
            self._task(size, kind)

    def planned_losses(self) -> tuple[int, int] | None:
        """Return how many losses of a board have plans, and of how many; looked up now and then."""
        if self.plans is not None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_EVERY_S
            self._planned = planned_losses(self.plans, self.mesh)
        return self._planned

    def plan_ahead(self, sums: SumSizes) -> None:
        """Plan sums for the failures that may come next, if this job's workers plan ahead."""
        if self._planner is not None:
            self._planner.plan_ahead(self._generation, self.mesh, sums)

    def prepare(self) -> None:
        """Connect to all neighbours, agree on the plans, and connect to all peers of the sums."""
        neighbors = {self._seats[chip] for chip in self.mesh.neighbors(self.chip)}
        if self._sought is not None:
            self._connect(neighbors)
            self._sought.agreement.begin()
            self._make_tasks()
        planned = {seat for task in self._tasks.values() for seat in task.program.peers}
        self._connect(planned | neighbors)

    @property
    def is_provisional(self) -> bool:
        """Whether better plans than those in use are sought, so that `swap_plans` may find them."""
        return self._sought is not None and self._sought.agreement.is_provisional

    def swap_plans(self) -> None:
        """Take better plans if there are some; all chips call this before the same step.

        While `is_provisional`: that is the same on all chips of a generation.
        """
        if self._sought is not None and self._sought.agreement.swap():
            self._take_sought(self._sought)

    def work_done(self) -> list[Work]:
        """Return what the link of each port has done, for these sums and those beside them."""
        done, work = self.transport.work_done(), []
        beside = self.beside.work_done() if self.beside is not None else {}
        for other in self.mesh.neighbor_ranks[self.rank].tolist():
            seat = self._seats[self.mesh.live[other]] if other >= 0 else -1
            ours, others = done.get(seat, (0, 0)), beside.get(other, (0, 0))
            work.append((ours[0] + others[0], ours[1] + others[1]))
        return work

    def ready(self, probe: LinkProbe) -> Callable[[], None]:
        """Return what runs a probe."""
        schedule = probe.schedule
        program = self._program(schedule, hazards_of(schedule))
        task = task_of(program, probe.n_bytes, dtype="uint8")
        payload = np.empty(probe.n_bytes, dtype=np.uint8)
        return lambda: self._run(task, payload)

    def seek_plans(self, mesh: Mesh) -> None:
        """Have plans made for a mesh of the same chips, whose links have other speeds.

        The job goes on with the plans that it has until `swap_plans` takes these.
        """
        if not self._sums:
            return
        sums = *self._sums, *self._sums_beside()
        if self.rank == 0:
            if self._searcher is None:
                self._searcher = self._planner or HostPlanner(self.chip, self._own_plans())
            self._searcher.plan_for(mesh, sums)
        folder = self._searcher.folder if self._searcher else self.plans
        catalogue = Catalogue(mesh, self._algorithm, 0, self.rank)
        self._sought = self._agreed_on(folder, mesh, sums, catalogue)
        self._sought.agreement.begin()
        if not self._sought.agreement.is_provisional:
            self._take_sought(self._sought)

    def _agreed_on(
        self, folder: Path | None, mesh: Mesh, sums: SumSizes, catalogue: Catalogue
    ) -> "_SoughtPlans":
        """Return the plans of a mesh that the chips of this generation are to agree on."""
        plans = FolderPlans(folder, mesh, self._algorithm, sums, catalogue)
        return _SoughtPlans(mesh, catalogue, PlanAgreement(self, plans))

    def _sums_beside(self) -> SumSizes:
        """Return the sums beside those of this exchange: on all chips what the first one knows."""
        if self.beside is None:
            return ()
        payload = None
        if self.rank == 0:
            packed = msgspec.msgpack.encode(self.beside.sum_sizes)
            payload = np.frombuffer(bytearray(packed), dtype=np.uint8)
        told = self.spread(payload, self.members[:1]).tobytes()
        return msgspec.msgpack.decode(told, type=list[tuple[int, str]])

    def _own_plans(self) -> PlanAheadSettings:
        """Return where this chip has plans made if nobody else plans ahead for the job."""
        board, algorithm = (1,) * len(self.mesh.shape), self._algorithm
        if self.plans is not None:
            return PlanAheadSettings(self.plans, algorithm, board)
        return PlanAheadSettings(Path(mkdtemp()), algorithm, board, is_scratch=True)

    def _take_sought(self, sought: "_SoughtPlans") -> None:
        has_other_links, self._sought = sought.mesh != self.mesh, None
        self.mesh, self._catalogue = sought.mesh, sought.catalogue
        if self._searcher is not None and self._searcher is not self._planner:
            self._searcher.close()
            self._searcher = None
        self._make_tasks()
        if has_other_links and self.beside is not None:  # it finds the plans that were agreed on
            self.beside.plan_for(self.mesh)
        _log.info("chip %s takes searched plans for %s", self.chip, self.mesh)

    @property
    def members(self) -> Sequence[Chip]:
        """The chips of this generation, by rank."""
        return self.mesh.live

    def gather_numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all chips, by rank, as a sum on one tree: it needs no search."""
        if self.mesh.n_live == 1:
            self.transport.check()
            return [list(mine)]
        numbers = np.zeros((self.mesh.n_live, len(mine)), dtype=np.int64)
        numbers[self.rank] = mine
        task = task_of(self._short_sum(), numbers.size, dtype="int64")
        self._run(task, numbers.reshape(-1).view(np.uint8))
        found: list[list[int]] = numbers.tolist()
        return found

    def _short_sum(self) -> RankProgram:
        """Return this chip's part in the sum of `gather_numbers`, made once in a generation."""
        if self._short is None:
            self._short = self._program(*proved_short_sum(self.mesh))
        return self._short

    def sum(self, payload: Bytes, n_elements: int, dtype: str) -> None:
        """Replace the payload, on every chip, with the sum of all chips' payloads."""
        if self.mesh.n_live == 1:
            self.transport.check()
        else:
            self._run(self._task(n_elements, dtype), payload)

    def sum_order(
        self, n_elements: int, dtype: str, element: int
    ) -> tuple[int, int, Callable[[Sequence[Any]], list[Any]]]:
        """Return which elements are summed like one, from where to where, and what sums them again.

        That takes these elements, or some of them, of each rank, and returns the sum that each rank
        must have, bit for bit.
        """
        task = self._task(n_elements, dtype)
        schedule, n_slices = task.program.schedule, task.layout.n_slices
        chunk, start, stop = chunk_at(schedule, n_elements, element, n_slices=n_slices)
        return start, stop, lambda parts: run_chunk(schedule, chunk, parts)

    def start_sum(
        self, payload: Bytes, n_elements: int, dtype: str, *, wakes: bool = True
    ) -> PendingSum:
        """Start what `sum` does and return at once; all chips start their sums in one order.

        Sums in flight do not wait for each other. If one fails, all fail. Unless it `wakes` another
        thread, the caller waits for it soon.
        """
        if self.mesh.n_live == 1:
            self.transport.check()
            return FinishedSum()
        return self._start(self._task(n_elements, dtype), payload, wakes=wakes)

    def spread(self, payload: Bytes | None, holders: Sequence[Chip]) -> Bytes:
        """Return the holders' payload on every chip; chips that are no holders pass None.

        Each chip gets it from its nearest holder: first the length, then the bytes. All connections
        are used at the same time.
        """
        spreading = self.spreading(holders, in_parts=False)
        size = np.array([0 if payload is None else len(payload)], dtype=np.int64)
        spreading.run(size.view(np.uint8))
        if payload is None:
            payload = np.empty(int(size[0]), dtype=np.uint8)
        spreading.run(payload)
        return payload

    def spreading(
        self,
        holders: Sequence[Chip],
        *,
        in_parts: bool,
        receivers: Sequence[Chip] | None = None,
    ) -> "Spreading":
        """Return what sends payloads of known sizes from the holders to all other chips.

        With `in_parts` each chip takes parts of them from several holders, whose payloads are
        equal; else all from the nearest one. With `receivers` it sends them to these chips only.
        """
        ranks = tuple(self.mesh.rank_of[chip] for chip in holders)
        to = None if receivers is None else tuple(self.mesh.rank_of[chip] for chip in receivers)
        schedule, hazards = proved_spread(self.mesh, ranks, in_parts=in_parts, receivers=to)
        program = self._program(schedule, hazards)
        return Spreading(program, self._start)

    def all_gather(self, payload: Bytes) -> None:
        """Fill the payload, on every chip, with the part that each rank has; parts are equal."""
        if self.mesh.n_live == 1:
            self.transport.check()
            return
        self._run(self._task(len(payload), GATHER), payload)

    def send_parts(self, payload: Bytes, cuts: Sequence[int], ends: Sequence[Ends]) -> None:
        """Send each part of a payload from one rank to another, over a connection of their own.

        `cuts` are the offsets of the parts, with the end of the last; `ends` are the two ranks of
        each part. All chips call this alike.
        """
        schedule = point_to_point(ends, np.array(cuts) / max(cuts[-1], 1), self.mesh.n_live)
        program = self._program(schedule, hazards_of(schedule))
        self._run(task_of(program, cuts[-1], dtype="uint8"), payload)

    def close(self) -> None:
        """Close all connections and stop planning ahead."""
        self.transport.close()
        for planner in {self._planner, self._searcher}:
            if planner is not None:
                planner.close()

    def _task(self, size: int, kind: str) -> Task:
        """Return this chip's part in a sum of elements of a type, or in a gather of bytes."""
        if (key := (size, kind)) not in self._tasks:
            call, dtype = (_ALL_GATHER, "uint8") if kind == GATHER else (_SUM, kind)
            task = self._catalogue.task(call, size, dtype)
            self._tasks[key] = replace(task, program=self._with_seats(task.program))
        return self._tasks[key]

    def _program(self, schedule: Schedule, hazards: Hazards) -> RankProgram:
        """Return this chip's part in a schedule, whose peers are seats."""
        return self._with_seats(rank_program(schedule, hazards, self.rank))

    def _with_seats(self, program: RankProgram) -> RankProgram:
        """Return the program with its peers' ranks replaced by seats."""
        seat_of_rank = np.array([self._seats[chip] for chip in self.mesh.live], dtype=np.int64)
        return replace(program, peer=seat_of_rank[program.peer])

    def _connect(self, seats: set[int]) -> None:
        chips = {seat: self._whole.live[seat] for seat in seats}
        self.transport.connect(
            {seat: self._generation.seat_of[chip].address for seat, chip in chips.items()},
            epochs={seat: self._generation.epoch(self.chip, chip) for seat, chip in chips.items()},
            timeout_s=_CONNECT_S,
        )
        self._connected |= seats

    def _start(self, task: Task, payload: Bytes, *, wakes: bool = True) -> PendingSum:
        if not self._connected.issuperset(peers := task.program.peers):
            self._connect(set(peers))
        return self.transport.start(task, payload, wakes=wakes)

    def _run(self, task: Task, payload: Bytes) -> None:
        self._start(task, payload, wakes=False).wait()


@dataclass(frozen=True)
class _SoughtPlans:
    """Plans for the mesh, or for links of other speeds, and how chips agree to use them."""

    mesh: Mesh
    catalogue: Catalogue
    agreement: PlanAgreement


class Spreading:
    """This chip's part in sending payloads from holders to all others; several may be in flight.

    All chips start payloads of the same sizes in the same order.
    """

    def __init__(self, program: RankProgram, start: Callable[..., PendingSum]) -> None:
        self._program, self._start = program, start
        self._tasks: dict[int, Task] = {}  # by size

    @property
    def has_part(self) -> bool:
        """Whether this chip sends or receives anything; if not, nothing looks at its payloads."""
        return self._program.n_moves > 0

    def start(self, payload: Bytes) -> PendingSum:
        """Start to send a payload, or to fill it; it must not be touched before that is over."""
        return self._start(self._task(len(payload)), payload)

    def run(self, payload: Bytes) -> None:
        """Send a payload, or fill it."""
        self._start(self._task(len(payload)), payload, wakes=False).wait()

    def _task(self, n_bytes: int) -> Task:
        if n_bytes not in self._tasks:
            part_bytes = n_bytes // self._program.schedule.n_chunks
            n_slices = max(1, part_bytes // _SPREAD_MESSAGE_BYTES)
            task = task_of(self._program, n_bytes, dtype="uint8", n_slices=n_slices)
            self._tasks[n_bytes] = task
        return self._tasks[n_bytes]


class FinishedSum:
    """A sum that needed no other chip."""

    def wait(self) -> None:
        """Return at once."""


def first_error(pending: Iterable[PendingSum]) -> TransportError | None:
    """Wait for all sums; return the first error, which caused the others, or None.

    Afterwards no payload is touched any more.
    """
    errors = [error for each in pending if (error := _error_of(each)) is not None]
    return errors[0] if errors else None


def _error_of(pending: PendingSum) -> TransportError | None:
    try:
        pending.wait()
    except TransportError as error:
        return error
    return None
