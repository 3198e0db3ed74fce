"""A job without processes: workers that follow the protocol of `train.job` step by step.

What a replica holds is a `Bits`: a new one for every sum, so that two that differ are told apart,
and that knows what it came from, so that lost steps are counted. Messages take their time: each
worker has a queue in either direction, and whoever drives the job says what is delivered when.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from msgspec import structs

from meshmend.config import Timing
from meshmend.membership.generation import Generation
from meshmend.membership.history import CoordinatorRecord, History
from meshmend.membership.membership import Decision, Membership
from meshmend.membership.messages import FRESH, Go, Status
from meshmend.topology.failures import Chip, Link
from meshmend.topology.graph import components
from meshmend.topology.mesh import Mesh

NONE = Generation(0, ())


@dataclass(frozen=True, eq=False)
class Bits:
    """What a replica holds: as many sums as `depth`, the last of them onto `before`."""

    depth: int = 0
    before: "Bits | None" = None

    def is_from(self, other: "Bits") -> bool:
        """Whether nothing that went into the other is missing here."""
        here: Bits | None = self
        while here is not None and here.depth > other.depth:
            here = here.before
        return here is other


@dataclass(eq=False)
class Worker:
    """A process; `doing` is where its main thread is, `after` the last generation it tried."""

    chip: Chip
    port: int
    bits: Bits = field(default_factory=Bits)
    step: int = 0
    state_version: int = FRESH
    doing: str = "waiting"
    after: int = 0
    entered: Generation = NONE
    generation: Generation | None = None  # heard of last, as the next three
    go: Go | None = None
    turned_away: bool = False
    memory: Generation | None = None
    wait: str = ""
    was_told: str = ""
    is_stopped: bool = False
    is_alive: bool = True
    hangs: bool = False
    is_connected: bool = False
    links: dict[int, int] = field(default_factory=dict)  # the epoch of the connection to a port
    status: Status = field(default_factory=Status)
    says: deque[Any] = field(default_factory=deque)
    hears: deque[tuple[str, Any]] = field(default_factory=deque)

    def tell(self, *, is_ready: bool, lost: Iterable[Chip] = ()) -> None:
        """Say how it stands, if anybody listens."""
        self.note(is_ready=is_ready, lost=lost)
        if self.is_connected:
            self.says.append(("status", self.status))

    def note(self, *, is_ready: bool, lost: Iterable[Chip] = ()) -> None:
        self.status = Status(
            generation=self.entered.number,
            ready=is_ready,
            state_version=self.state_version,
            step=self.step,
            lost=tuple(lost),
        )

    def hello(self) -> tuple[str, Any]:
        """What it says first: how it stands, and the generation it heard of last."""
        heard = self.memory.number if self.memory else 0
        status = structs.replace(self.status, generation=max(self.status.generation, heard))
        return "hello", (status, self.memory if self.state_version != FRESH else None)


class Job:
    """All workers of a job, their coordinator, and what is broken."""

    def __init__(self, mesh: Mesh, board: tuple[int, ...]) -> None:
        self.mesh, self.board = mesh, board
        self.whole = replace(mesh, failed=frozenset(), failed_links=frozenset())
        self.timing = Timing(gather_s=3.0, recall_s=0.5, holder_timeout_s=2.0)
        self.now = 0.0
        self.situation: tuple[Any, ...] | None = None
        self.ports = count(1)
        self.workers: dict[Chip, Worker] = {}
        self.broken: set[Link] = set()
        self.membership: Membership | None = None
        self.line_of: dict[Chip, Worker] = {}
        self.made: dict[int, Generation] = {}
        self.mesh_of: dict[int, Mesh] = {}
        self.given: dict[int, Bits] = {}
        self.summed: dict[tuple[int, int], dict[Worker, Bits]] = {}
        self.dropped: set[tuple[frozenset[int], int]] = set()
        self.sums: dict[tuple[int, int], Bits] = {}
        self.deepest = Bits()  # the last sum that any worker ever held and that counts
        self.record = CoordinatorRecord("job")  # what coordinators keep on disk
        self.lost_steps: list[int] = []
        self.failure = ""
        self.start_coordinator()

    # What may happen to it.

    def start_worker(self, chip: Chip) -> None:
        """Start a worker where there is none."""
        if not self._at(chip):
            self.workers[chip] = Worker(chip, next(self.ports))

    def kill(self, chip: Chip) -> None:
        """End a worker; what it said is still heard, then that it is gone."""
        if worker := self._at(chip):
            worker.is_alive = False
            del self.workers[chip]
            if worker.is_connected:
                worker.says.append(("gone", None))
                self.line_of.setdefault(chip, worker)

    def hang(self, chip: Chip) -> None:
        if worker := self._at(chip):
            worker.hangs = True

    def wake(self, chip: Chip) -> None:
        if worker := self._at(chip):
            worker.hangs = False

    def drop_silent(self) -> None:
        """Turn away every worker that hangs."""
        for worker in list(self.line_of.values()):
            if worker.hangs and self.membership is not None:
                self._turn_away(worker)

    def kill_coordinator(self, *, loses: bool) -> None:
        """End the coordinator; what it said last may not arrive."""
        self.membership = None
        for worker in [*self.workers.values(), *self.line_of.values()]:
            worker.is_connected = False
            worker.says.clear()
            if loses:
                worker.hears.clear()
        self.line_of.clear()

    def start_coordinator(self) -> None:
        if self.membership is None:
            self.membership = Membership(
                self.mesh, self.timing, board=self.board, history=History(self.record)
            )

    def cut(self, link: Link) -> None:
        self.broken.add(link)

    def mend(self, link: Link) -> None:
        if self.membership is not None:
            self.broken.discard(link)
            self.membership.mend(link, self.now)

    # What goes on by itself.

    def connect(self, chip: Chip) -> None:
        """Let a worker call the coordinator if it has no line."""
        worker = self._at(chip)
        if not worker or worker.hangs or worker.is_connected:
            return
        if worker.hears or worker.turned_away:
            return  # what the line before brought is heard first
        if self.membership is not None and self.line_of.get(chip) is None:
            worker.is_connected = True
            self.line_of[chip] = worker
            worker.says.append(worker.hello())

    def deliver(self, chip: Chip) -> None:
        """Let the coordinator hear one thing that a worker said."""
        worker = self.line_of.get(chip)
        if self.membership is None or worker is None or not worker.says:
            return
        kind, content = worker.says.popleft()
        if kind == "hello":
            status, memory = content
            self._greet(worker, status, memory)
        elif kind == "status":
            self.membership.update_status(chip, content, self.now)
        else:
            del self.line_of[chip]
            self.membership.leave(chip, "gone", self.now)

    def decide(self) -> None:
        """Let the coordinator say what is to be said."""
        if self.membership is None:
            return
        for chip, worker in self.line_of.items():
            if worker.is_alive and not worker.hangs:  # its heartbeats come all the time
                self.membership.note_contact(chip, self.now)
        while (decision := self.membership.decide(self.now)) != Decision():
            if generation := decision.generation:
                self._check_made(generation)
                self._say(generation.chips, "generation", generation)
                for chip in generation.chips:
                    if chip in self.line_of:
                        self.line_of[chip].was_told = ""
            elif decision.go:
                self._check_go(decision.go, restored=decision.lost_step is not None)
                self.record = self.membership.history.record
                assert self.membership.generation is not None
                self._say(self.membership.generation.chips, "go", decision.go)
            elif decision.lost_step is not None:
                self.lost_steps.append(decision.lost_step)
            elif decision.failed:
                self.failure = decision.failed
                return
        self._tell_waiting(self.membership)

    def listen(self, chip: Chip) -> None:
        """Let a worker hear one thing that the coordinator said."""
        worker = self._at(chip)
        if not worker or worker.hangs or not worker.hears:
            return
        kind, content = worker.hears.popleft()
        worker.is_stopped |= kind != "go"
        if kind == "generation":
            worker.generation, worker.go, worker.wait = content, None, ""
            worker.memory = content
        elif kind == "go":
            worker.go = content
        elif kind == "wait":
            worker.wait = content
        else:
            worker.turned_away = True

    def act(self, chip: Chip) -> None:
        """Let a worker's main thread do the next thing."""
        worker = self._at(chip)
        if not worker or worker.hangs:
            return
        if worker.doing in ("training", "healing"):
            self._work(worker)
        elif worker.turned_away:
            self._come_back(worker)
        elif worker.generation and worker.generation.number > worker.after:
            self._enter(worker, worker.generation)
        elif worker.doing == "entering" and worker.go and worker.go.generation == worker.after:
            self._begin(worker, worker.go)

    def turn(self, first: int = 0) -> None:
        """Let everything go on a little, one worker after another."""
        if self.failure:
            return
        chips = self.whole.live
        for chip in (*chips[first % len(chips) :], *chips[: first % len(chips)]):
            self.connect(chip)
            if (line := self.line_of.get(chip)) and line.says:
                self.deliver(chip)
                self.decide()
            self.listen(chip)
            self.act(chip)
        self.decide()
        self.now += 0.01

    def is_calm(self) -> bool:
        """Whether nothing is under way any more."""
        if self.failure:
            return True
        lines = [*self.workers.values(), *self.line_of.values()]
        is_quiet = not any(worker.says or worker.hears for worker in lines)
        is_there = all(worker.is_connected for worker in self.workers.values())
        assert self.membership is not None
        if not is_quiet or not is_there or self.membership.settled_at() is not None:
            return False
        current = self.membership.generation
        return current is None or {each.chip for each in training(self)} == set(current.chips)

    def broken_inside(self) -> bool:
        """Whether a member has lost another and did not say so yet."""
        return any(self._lost(worker) for worker in training(self))

    # What a worker does.

    def _work(self, worker: Worker) -> None:
        """Take part in a sum or take a state; stop if told to, complain of a peer that is lost."""
        generation = worker.entered
        if worker.doing == "training" and self._is_summed(worker):
            key = generation.number, worker.step
            worker.bits = self.sums.setdefault(key, Bits(worker.bits.depth + 1, worker.bits))
            worker.step += 1
            worker.note(is_ready=True)
            if worker.bits.depth > self.deepest.depth:
                is_kept = self.deepest.depth == 0 or worker.bits.is_from(self.deepest)
                assert is_kept, "two histories"
                self.deepest = worker.bits
        elif worker.is_stopped:
            worker.note(is_ready=False)
            worker.doing = "waiting"
        elif lost := self._lost(worker):
            worker.tell(is_ready=False, lost=[lost])
            worker.doing = "waiting"
        elif worker.doing == "healing":
            assert worker.go is not None
            if generation.number in self.given:
                worker.bits = self.given[generation.number]
                worker.step = worker.go.step
                self._be_up_to_date(worker)
        else:
            part = self.summed.setdefault((generation.number, worker.step), {})
            part[worker] = worker.bits
            assert len(set(part.values())) == 1, "a sum over different replicas"

    def _is_summed(self, worker: Worker) -> bool:
        part = self.summed.get((worker.entered.number, worker.step), {})
        ports = {other.port for other in part}
        return worker in part and ports == {seat.address[1] for seat in worker.entered.seats}

    def _lost(self, worker: Worker) -> Chip | None:
        for chip in self.mesh_of[worker.entered.number].neighbors(worker.chip):
            peer = self._at(chip)
            is_same = peer is not None and peer.port == worker.entered.seat_of[chip].address[1]
            if not is_same or Link.between(worker.chip, chip) in self.broken:
                return chip
        return None

    def _enter(self, worker: Worker, generation: Generation) -> None:
        assert generation.number > worker.entered.number, "generations grow for every worker"
        assert worker.chip in generation.chips
        self._connect(worker, generation)
        worker.entered, worker.after = generation, generation.number
        worker.is_stopped = False
        worker.doing = "entering"
        worker.tell(is_ready=True)

    def _connect(self, worker: Worker, generation: Generation) -> None:
        """Keep the connections of the same epoch; none is one that an end has dropped."""
        links = {
            seat.address[1]: generation.epoch(worker.chip, seat.chip)
            for seat in generation.seats
            if seat.chip != worker.chip
        }
        for port, epoch in worker.links.items():
            if links.get(port) != epoch:
                self.dropped.add((frozenset({port, worker.port}), epoch))
        worker.links = links
        if generation.number == max(self.made):  # of an older one the others may know better
            new = {(frozenset({port, worker.port}), epoch) for port, epoch in links.items()}
            assert not new & self.dropped, "a connection that one end has dropped"

    def _begin(self, worker: Worker, go: Go) -> None:
        if worker.chip in go.holders:
            bits = self.given.setdefault(go.generation, worker.bits)
            assert bits is worker.bits, "holders hold the same"
            assert worker.step == go.step
            self._be_up_to_date(worker)
        else:
            worker.doing = "healing"

    def _be_up_to_date(self, worker: Worker) -> None:
        worker.state_version, worker.doing = worker.entered.number, "training"
        worker.tell(is_ready=True)

    def _come_back(self, worker: Worker) -> None:
        worker.turned_away, worker.doing = False, "waiting"
        worker.generation, worker.go = None, None
        worker.note(is_ready=False)

    # What the coordinator does.

    def _greet(self, worker: Worker, status: Status, memory: Generation | None) -> None:
        assert self.membership is not None
        address = ("host", worker.port)
        self.membership.arrive(worker.chip, address, status=status, memory=memory, now=self.now)
        worker.was_told = ""
        self.situation = None

    def _turn_away(self, worker: Worker) -> None:
        assert self.membership is not None
        self._say([worker.chip], "turned away", None)
        del self.line_of[worker.chip]
        worker.is_connected = False
        worker.says.clear()
        self.membership.leave(worker.chip, "turned away", self.now)

    def _say(self, chips: Iterable[Chip], kind: str, content: Any) -> None:
        for chip in chips:
            if chip in self.line_of:
                self.line_of[chip].hears.append((kind, content))

    def _tell_waiting(self, membership: Membership) -> None:
        """Say to those who wait why, if that has changed."""
        waiting = membership.waiting()
        situation = (id(membership.generation), waiting, membership.settled_at() is None)
        if situation == self.situation:
            return
        self.situation = situation
        for chip in waiting:
            why = membership.reason_to_wait(chip)
            if chip in self.line_of and self.line_of[chip].was_told != why:
                self.line_of[chip].was_told = why
                self._say([chip], "wait", why)

    def _check_made(self, generation: Generation) -> None:
        """Nobody who is alive has heard of such a number; the chips are connected."""
        number = generation.number
        for worker in self.workers.values():
            heard = worker.generation.number if worker.generation else 0
            assert max(heard, worker.state_version, worker.entered.number) < number, (
                "a number used again"
            )
        self.given.pop(number, None)
        for key in [key for key in (*self.summed, *self.sums) if key[0] == number]:
            self.summed.pop(key, None)
            self.sums.pop(key, None)
        self.made[number] = generation
        self.mesh_of[generation.number] = generation.mesh_of(self.whole)
        assert len(components(self.mesh_of[generation.number])) == 1

    def _check_go(self, go: Go, *, restored: bool) -> None:
        """What the holders give is missing nothing that any worker ever had.

        But for one step at most: that was in flight when a chip was cut off or counted as dead.
        If it was told that the state is lost, the history goes on from what is left.
        """
        bits = {self.line_of[chip].bits for chip in go.holders}
        latest = max(self.line_of[chip].state_version for chip in go.holders)
        assert len(bits) == 1
        (given,) = bits
        if restored:
            assert self.lost_steps, "a state was lost without a word"
            self.deepest = given
            return
        before = self.deepest.before
        is_kept = given.is_from(self.deepest) or (before and given.is_from(before))
        assert is_kept or self.deepest.depth == 0, "a step was lost"
        self.deepest = given
        for chip, worker in self.line_of.items():
            if worker.state_version == FRESH or any(kind == "hello" for kind, _ in worker.says):
                continue
            is_late = worker.state_version < latest or chip not in self.made[go.generation].chips
            before = worker.bits.before if is_late else None
            is_kept = given.is_from(worker.bits) or (before and given.is_from(before))
            assert is_kept, f"{chip} knows more than the holders"

    def _at(self, chip: Chip) -> Worker | None:
        return self.workers.get(chip)


def training(job: Job) -> Iterator[Worker]:
    """Yield the workers that are members of the present generation and up to date in it."""
    assert job.membership is not None
    current = job.membership.generation
    for worker in job.workers.values():
        if current and worker.state_version == current.number and worker.doing == "training":
            yield worker
