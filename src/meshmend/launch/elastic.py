"""Runs a job that survives: a coordinator, one worker per live chip, and the faults it is to meet.

This process has imported what the workers need and made the first plans, then forks them all; a
board that is repaired is forked from it again. It watches the coordinator as any observer does:
neither is needed for a step.
"""

import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from meshmend.execute.handshake import Errand, Patience, dial
from meshmend.execute.reception import listening
from meshmend.execute.transport import TransportError
from meshmend.launch.children import Child, Children
from meshmend.launch.recoveries import Recoveries, Recovery
from meshmend.launch.worker import Place, work
from meshmend.topology.failures import Block, Chip, Failure, Link
from meshmend.topology.mesh import Mesh
from meshmend.torch.settings import Settings
from meshmend.train.coordinator import COORDINATOR, OBSERVER, Charge, Coordinator
from meshmend.train.faults import COORDINATOR as THE_COORDINATOR
from meshmend.train.faults import Fault
from meshmend.train.foresight import Sums, foresee, losses, shelve
from meshmend.train.here import member
from meshmend.train.membership import Timing
from meshmend.train.wire import Channel, ChannelError, Message

Event = dict[str, Any]

_TURN_S: Final = 0.02
_RESTART_S: Final = 0.2  # a coordinator that died is started again after so long
_LINGER_S: Final = 3.0  # for workers that are left when the job is over
_SLOW_TURN_S: Final = (0.2, 0.1)  # stopped, running
_SLOW_S: Final = 5.0
_LOW: Final = 19
_FORESIGHT_S: Final = 2.0  # for plans that are made before the first worker starts


@dataclass(frozen=True)
class ElasticJob:
    """What to run on every live chip of the settings' mesh, and what is to happen to it.

    `body()` is what a worker does; it returns its exit code. `sums` are what its steps sum, if
    that is known before the first: plans for what may fail next are made ahead. After `for_s` the
    job is ended, whatever step it is at. `enter`, `address_of` and `network` put the workers into
    a testbed: `network(action, failure)` breaks and mends it.
    """

    settings: Settings
    body: Callable[[], int]
    run_dir: Path
    on_event: Callable[[Event], None]
    faults: tuple[Fault, ...] = ()
    timing: Timing = field(default_factory=Timing)
    board: tuple[int, ...] = ()
    sums: Sums = ()
    for_s: float | None = None
    checks: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    enter: Callable[[Chip], None] | None = None
    address_of: Callable[[Chip], str] | None = None
    network: Callable[[str, Failure], None] | None = None

    def in_network(
        self,
        enter: Callable[[Chip], None],
        address_of: Callable[[Chip], str],
        network: Callable[[str, Failure], None],
    ) -> "ElasticJob":
        """Return this job with its workers in a network of their own."""
        return replace(self, enter=enter, address_of=address_of, network=network)


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the first failure in words, if it did not finish, and its recoveries."""

    is_finished: bool
    why: str
    recoveries: tuple[Recovery, ...]
    chips: tuple[int, ...]


def board_of(mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of the boards of a mesh: 2x2 on its first two axes, one chip on a line."""
    n_axes = len(mesh.shape)
    return (2, 2, *(1,) * (n_axes - 2)) if n_axes > 1 else (1,)


def run_elastic(job: ElasticJob) -> Outcome:
    """Run a job until all its chips have finished, or none is left.

    Interrupted, all workers are ended first.
    """
    settings = job.settings
    if not settings.secret:
        settings = replace(settings, secret=secrets.token_hex(32))
    job = replace(job, settings=settings, board=job.board or board_of(settings.mesh))
    if job.sums:
        mesh, algorithm = settings.mesh, settings.algorithm
        foresee(mesh, algorithm, job.sums, board=job.board, for_s=_FORESIGHT_S)
    launcher = _Launcher(job)
    try:
        launcher.start()
        launcher.until_over()
    finally:
        launcher.close()
    return launcher.outcome()


class _Launcher:
    """A job under way, as the process sees it that has started it."""

    def __init__(self, job: ElasticJob) -> None:
        self._job = job
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._children = Children()
        self._listener = listening("127.0.0.1")
        self._workers: dict[Chip, Child] = {}
        self._chip_of: dict[int, Chip] = {}
        self._coordinator: Child | None = None
        self._planner: Child | None = None
        self._channel: Channel | None = None
        self._restart_at: float | None = None
        self._started = time.monotonic()
        self._step = 0
        self._pending = [fault for fault in job.faults if fault.moment is None]
        self._awaited = [fault for fault in job.faults if fault.moment is not None]
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._recoveries = Recoveries()
        self._counts: list[int] = []
        self._ended_badly: list[str] = []
        self._is_over = False
        self._was_ended = False
        self._why_forming = ""
        self._formed: Event = {}
        self._unsaid: list[Message] = []  # what the coordinator has not been told yet
        self._absent: list[Chip] = []
        self._finished: set[Chip] = set()
        self._stopped: set[Chip] = set()

    def start(self) -> None:
        """Start the coordinator and a worker for each live chip."""
        self._start_coordinator()
        for chip in self._job.settings.mesh.live:
            self._start_worker(chip)

    def until_over(self) -> None:
        """Watch, and let happen what is to happen, until no worker is left."""
        over_since = None
        while self._running() or self._pending_repairs():
            self._children.handle(_TURN_S)
            self._look_after_coordinator()
            self._notice_deaths()
            self._inflict()
            self._end_in_time()
            if self._is_over:
                over_since = over_since or time.monotonic()
                if time.monotonic() > over_since + _LINGER_S and not self._works_on():
                    return

    def _works_on(self) -> bool:
        """Whether a worker is still busy with what comes after its job, such as evaluation."""
        busy = self._finished - self._stopped
        return any(self._workers[chip].code is None for chip in busy)

    def _end_in_time(self) -> None:
        """Send everyone home when the time is over."""
        if self._job.for_s is None or time.monotonic() < self._started + self._job.for_s:
            return
        if not self._was_ended:
            self._was_ended = self._send({"kind": "finish"})

    def close(self) -> None:
        """End everything that still runs."""
        if self._channel is not None:
            self._drop_channel()
        for child in self._children.alive():
            child.signal(signal.SIGCONT)
        self._children.end_all()
        self._listener.close()

    def outcome(self) -> Outcome:
        """Return how it went."""
        finished = [
            child for child in self._workers.values() if child.code == 0 and not child.was_ended
        ]
        why = "" if finished else (self._ended_badly or ["no worker is left"])[0]
        return Outcome(bool(finished), why, tuple(self._recoveries.faults), tuple(self._counts))

    # What is started.

    def _start_coordinator(self) -> None:
        job = self._job
        charge = Charge(self._name, job.settings.mesh, job.board, job.timing)
        secret = job.settings.secret.encode()
        listener = self._listener

        def serve() -> int:
            coordinator = Coordinator(listener, secret, charge)
            coordinator.serve()
            coordinator.close()
            return 0

        place = Place(chip=())
        self._coordinator = self._children.start(
            "[coordinator] ", lambda pipes, parent: work(serve, place, pipes, parent)
        )
        self._restart_at = None

    def _start_worker(self, chip: Chip) -> None:
        job = self._job
        settings = job.settings
        if job.address_of is not None:
            settings = replace(settings, bind=job.address_of(chip))
        host, port = self._listener.getsockname()[:2]
        mine = [str_of(fault) for fault in self._awaited if chip in fault.chips()]
        environment = {
            **settings.environment(),
            "MESHMEND_COORDINATOR": f"{host}:{port}",
            "MESHMEND_JOB": self._name,
            "MESHMEND_CHIP": ",".join(map(str, chip)),
            "MESHMEND_RUN_DIR": str(job.run_dir),
            "MESHMEND_INJECT": "\n".join(mine),
            "MESHMEND_CHECK": "1" if job.checks else "",
            **job.environment,
        }
        place = Place(chip=chip, first=member, enter=job.enter, environment=environment)
        child = self._children.start(
            f"[{','.join(map(str, chip))}] ",
            lambda pipes, parent: work(job.body, place, pipes, parent),
        )
        self._workers[chip] = child
        self._chip_of[child.pid] = chip
        self._stopped.discard(chip)

    def _look_ahead(self, facts: Event) -> None:
        """Have a process of low priority plan for the loss of each board that is left."""
        job = self._job
        if not job.sums:
            return
        if self._planner is not None:
            self._planner.was_ended = True
            self._planner.signal(signal.SIGKILL)
        whole = replace(job.settings.mesh, failed=frozenset(), failed_links=frozenset())
        dead = set(whole.live) - {tuple(chip) for chip in facts["chips"]}
        mesh = replace(whole, failed=frozenset(dead)).without(*facts["cut"])
        folder, algorithm = job.run_dir / "plans", job.settings.algorithm

        def plan_ahead() -> int:
            os.nice(_LOW)
            for left in losses(mesh, job.board):
                shelve(folder, left, algorithm, job.sums)
            return 0

        place = Place(chip=())
        self._planner = self._children.start(
            "[planner] ", lambda pipes, parent: work(plan_ahead, place, pipes, parent)
        )

    def _running(self) -> list[Child]:
        return [child for child in self._workers.values() if child.code is None]

    def _pending_repairs(self) -> bool:
        """Whether a board is to come back although nobody is left: then it is waited for."""
        return any(fault.action == "repair" and fault.at_s is not None for fault in self._pending)

    # What is heard.

    def _look_after_coordinator(self) -> None:
        """Start it again when it has died, and keep a line to it."""
        if self._is_over or self._coordinator is None:
            return
        now = time.monotonic()
        if self._coordinator.code == 0:
            self._is_over = True
        elif self._coordinator.code is not None:
            if self._restart_at is None:
                self._restart_at = now + _RESTART_S
                self._tell("coordinator", state="lost")
            elif now >= self._restart_at:
                self._start_coordinator()
                self._tell("coordinator", state="back")
        elif self._channel is None:
            self._channel = self._observed()
        self._unsaid = [message for message in self._unsaid if not self._send(message)]
        # Who died before the first generation is not waited for.
        self._absent = [
            chip for chip in self._absent if not self._send({"kind": "absent", "chip": chip})
        ]

    def _observed(self) -> Channel | None:
        """Return a line to the coordinator, or None if it cannot be reached right now."""
        secret = self._job.settings.secret.encode()
        try:
            connection: socket.socket = dial(
                self._listener.getsockname()[:2],
                secret,
                Errand(OBSERVER, COORDINATOR),
                Patience(time.monotonic() + 0.5),
            )
            channel = Channel(connection)
            channel.send({"kind": "observe", "job": self._name})
        except (TransportError, ChannelError):
            return None
        self._children.watch(channel.fileno(), self._listen)
        return channel

    def _drop_channel(self) -> None:
        assert self._channel is not None
        self._children.unwatch(self._channel.fileno())
        self._channel.close()
        self._channel = None

    def _listen(self) -> None:
        assert self._channel is not None
        try:
            for message in self._channel.receive():
                self._hear(message)
        except ChannelError:
            self._drop_channel()

    def _hear(self, message: Message) -> None:
        """Take up an event of the coordinator, and pass on what users want to see."""
        kind = message.get("event")
        if kind is None:
            return
        for fault in self._recoveries.take(message):
            self._tell("recovered", **fault.as_json())
        facts = {key: value for key, value in message.items() if key not in ("kind", "event")}
        at = facts.pop("clock")
        if kind == "forming":
            self._why_forming = facts["why"]
        elif kind == "generation":
            self._counts.append(len(facts["chips"]))
            self._formed = facts
            self._look_ahead(facts)
            self._tell("generation", at=at, why=self._why_forming, **facts)
        elif kind == "done":
            self._hear_done(facts)
        elif kind in ("refused", "turned away", "waiting", "left", "arrived"):
            self._tell(kind, at=at, **facts)

    def _hear_done(self, facts: Event) -> None:
        if "saved" in facts:
            self._tell("checkpoint", at=facts["at"], step=facts["step"], path=facts["saved"])
            return
        if "finished" in facts:
            self._finished.add(tuple(facts["chip"]))
            return
        if facts["sums"] and not self._job.sums:
            sums = tuple((int(n_elements), str(dtype)) for n_elements, dtype in facts["sums"])
            self._job = replace(self._job, sums=sums)
            if self._formed:
                self._look_ahead(self._formed)
        self._step = max(self._step, facts["step"])
        if facts["leads"]:
            self._tell(
                "step",
                at=facts["at"],
                step=facts["step"],
                generation=facts["generation"],
                loss=facts["loss"],
                samples=facts["samples"],
                chips=self._counts[-1] if self._counts else 1,
            )

    def _tell(self, event: str, *, at: float | None = None, **facts: Any) -> None:
        moment = time.monotonic() if at is None else at
        self._job.on_event({"event": event, "t": round(moment - self._started, 4), **facts})

    # What happens to the job.

    def _notice_deaths(self) -> None:
        """Take up workers that ended: by a fault of ours, by another's hand, or well."""
        for chip, child in self._workers.items():
            if child.code is None or child.pid not in self._chip_of:
                continue
            del self._chip_of[child.pid]
            if child.code == 0:
                self._is_over = True
                continue
            if not self._counts:
                self._absent.append(chip)
            if not child.was_ended:
                self._note_death(chip, child)

    def _note_death(self, chip: Chip, child: Child) -> None:
        planned = [fault for fault in self._awaited if chip in fault.chips()]
        what = str_of(planned[0]) if planned else f"chip {chip} died: {child.how_it_ended}"
        for fault in planned:
            # Each chip of the block dies in its own moment: the fault begins with the first.
            self._awaited.remove(fault)
            self._expect_deaths(fault)
        if child.traceback:
            what = f"chip {chip} failed: {child.traceback.strip().splitlines()[-1]}"
            self._ended_badly.append(f"{what}\n{child.traceback}")
        elif not planned:
            self._ended_badly.append(what)
        self._happened(what, at=child.ended)

    def _expect_deaths(self, fault: Fault) -> None:
        for chip in fault.chips():
            if chip in self._workers:
                self._workers[chip].was_ended = True

    def _happened(
        self,
        what: str,
        *,
        at: float,
        is_quiet: bool = False,
        back: Iterable[Chip] = (),
    ) -> None:
        recovery = Recovery(what, self._step, at, is_quiet=is_quiet, back=frozenset(back))
        self._recoveries.happened(recovery)
        self._tell("fault", at=at, fault=what, at_step=self._step)

    def _inflict(self) -> None:
        """Let happen what is due."""
        now = time.monotonic()
        for when, action in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove((when, action))
            action()
        for fault in list(self._pending):
            if fault.is_due(self._step, now - self._started):
                self._pending.remove(fault)
                self._commit(fault)

    def _commit(self, fault: Fault) -> None:
        patience_s = self._job.timing.silence_s
        is_short = fault.action == "hang" and (fault.for_s or patience_s) < patience_s
        quiet = is_short or fault.action == "slow" or fault.target == THE_COORDINATOR
        back = fault.chips() if fault.action == "repair" else ()
        self._happened(str(fault), at=time.monotonic(), is_quiet=quiet, back=back)
        if fault.target == THE_COORDINATOR:
            if self._coordinator is not None:
                self._coordinator.was_ended = True
                self._coordinator.signal(signal.SIGKILL)
        elif isinstance(fault.target, Link):
            self._change_link(fault.action, fault.target)
        elif fault.action == "repair":
            self._repair(fault)
        else:
            self._strike(fault)
        network, target = self._job.network, fault.target
        if network and isinstance(target, Block | Link) and fault.action not in ("hang", "slow"):
            network(fault.action, target)

    def _strike(self, fault: Fault) -> None:
        """Kill, stop or slow down workers."""
        for chip in fault.chips():
            child = self._workers.get(chip)
            if child is None or child.code is not None:
                continue
            if fault.action == "kill":
                child.was_ended = True
                child.signal(signal.SIGKILL)
            elif fault.action == "hang":
                self._stopped.add(chip)
                child.signal(signal.SIGSTOP)
                if fault.for_s is not None:
                    self._in(fault.for_s, partial(child.signal, signal.SIGCONT))
            else:
                self._slow(child, time.monotonic() + (fault.for_s or _SLOW_S))

    def _slow(self, child: Child, until: float) -> None:
        stopped_s, running_s = _SLOW_TURN_S
        child.signal(signal.SIGSTOP)
        self._in(stopped_s, partial(child.signal, signal.SIGCONT))
        if time.monotonic() + stopped_s + running_s < until:
            self._in(stopped_s + running_s, partial(self._slow, child, until))

    def _in(self, seconds: float, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, action))

    def _repair(self, fault: Fault) -> None:
        """Start workers anew where they died; one that hangs is replaced."""
        for chip in fault.chips():
            child = self._workers.get(chip)
            if child is not None and child.code is None:
                child.was_ended = True
                child.signal(signal.SIGKILL)
        while any(
            self._workers[chip].code is None for chip in fault.chips() if chip in self._workers
        ):
            self._children.handle(_TURN_S)
        for chip in fault.chips():
            self._start_worker(chip)

    def _change_link(self, action: str, link: Link) -> None:
        kind = "mend" if action == "repair" else "cut"
        self._unsaid.append({"kind": kind, "link": str(link)})

    def _send(self, message: Message) -> bool:
        """Send a message to the coordinator; return whether there was one."""
        if self._channel is None:
            return False
        try:
            self._channel.send(message)
        except ChannelError:
            self._drop_channel()
            return False
        return True


def str_of(fault: Fault) -> str:
    """Return a fault with its moment, as `--inject` writes it."""
    when = f" at {fault.at_step} in {fault.moment}" if fault.moment else ""
    return f"{fault}{when}"


def event_line(event: Event) -> str:
    """Return an event as a line of `events.jsonl`."""
    return json.dumps(event, separators=(",", ":")) + "\n"
