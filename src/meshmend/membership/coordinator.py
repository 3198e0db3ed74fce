"""The coordinator: hears of workers that come, go and complain, and says who trains together.

No sockets and no clock: messages and times are given, and what it says goes out through a
`Connections`. `coordinator_server` is what gives it both.

Its state is soft. Workers step without it; killed and started again it learns the job from them.
It is on no step's path. Observers, such as the launcher, get every event; they may be killed too.
"""

from collections.abc import Callable
from logging import getLogger
from typing import Final

from meshmend.membership.admission import Admission, is_own_report
from meshmend.membership.connections import Connections, ControlConnection, one_too_many
from meshmend.membership.decision import Decision
from meshmend.membership.events import (
    ChipsWaiting,
    ConnectionRefused,
    Event,
    GenerationBegan,
    GenerationForming,
    JobFailed,
    JobFinished,
    StateLost,
    StateRestored,
    WorkerArrived,
    WorkerLeft,
    WorkerTurnedAway,
)
from meshmend.membership.history import CoordinatorRecord, History
from meshmend.membership.job_spec import JobSpec
from meshmend.membership.membership import Membership
from meshmend.membership.messages import (
    MESSAGES,
    Absent,
    Alive,
    CutLink,
    Failed,
    Finish,
    Go,
    Heartbeat,
    Hello,
    MendLink,
    Message,
    NewGeneration,
    Observe,
    Observed,
    Over,
    Refused,
    Report,
    Sever,
    Status,
    StatusChanged,
    TryLater,
    TurnedAway,
    Wait,
    Welcome,
)
from meshmend.membership.stragglers import Stragglers
from meshmend.net.rate_limit import RateLimit
from meshmend.topology.failures import Chip, Link

_log = getLogger(__name__)

_MOST_REFUSALS_PER_S: Final = 10  # that are told; they come in floods


class Coordinator:
    """One job, until all its workers have finished; `on_event` gets what observers get.

    `keep` is called with what must outlive this coordinator before anyone acts on it; `history` is
    what the one before kept.
    """

    def __init__(
        self,
        spec: JobSpec,
        connections: Connections,
        *,
        history: History | None = None,
        keep: Callable[[CoordinatorRecord], None] = lambda record: None,
        on_event: Callable[[float, Event], None] = lambda clock, event: None,
    ) -> None:
        self._spec = spec
        self._out = connections
        self._on_event = on_event
        self._keep = keep
        self._history = history or History(CoordinatorRecord(spec.job))
        self._membership = Membership(
            spec.mesh, spec.timing, board=spec.board, history=self._history
        )
        self._admission = Admission(spec, self._history, self._membership)
        self._connections: dict[int, ControlConnection] = {}
        self._worker_of: dict[Chip, ControlConnection] = {}
        self._told_to_wait: dict[Chip, str] = {}
        self._told_taken: set[Chip] = set()  # chips of which a second worker was told
        self._refusals = RateLimit(_MOST_REFUSALS_PER_S)
        self._stragglers = Stragglers(spec.timing.straggler_timeout_s)
        self._looked: float | None = None
        self._signed_at = 0.0  # when it gave its last sign of life
        self.failure = ""  # why the job could not go on
        self._now = 0.0

    @property
    def is_done(self) -> bool:
        """Whether all workers have finished and gone."""
        return self._membership.is_over and not self._worker_of

    def opened(self, number: int, name: str, now: float) -> None:
        """Take in a new connection."""
        self._now = now
        if (stranger := one_too_many(self._connections.values())) is not None:
            self._refuse(stranger, "others came, and it had not said who it is", for_now=True)
        self._connections[number] = ControlConnection(number, name, now)

    def closed(self, number: int, why: str, now: float) -> None:
        """Take in that a connection is gone."""
        self._now = now
        if number in self._connections:
            self._forget(self._connections[number], why)

    def received(self, number: int, message: Message, now: float) -> None:
        """Do what a message asks for."""
        self._now = now
        connection = self._connections.get(number)
        if connection is None:  # it was hung up on while this was under way
            return
        if connection.chip is not None or connection.is_observer:
            connection.heard = now  # one that beats but never says who it is counts as silent
        if connection.is_observer:
            self._hear_observer(connection, message)
        elif connection.chip is not None:
            self._hear_worker(connection, connection.chip, message)
        else:
            self._hear_stranger(connection, message)

    def refuse(self, number: int, why: str, now: float) -> None:
        """Part with who sends what is no message."""
        self._now = now
        if number in self._connections:
            self._refuse(self._connections[number], why)

    def next_wakeup(self, now: float) -> float:
        """Return when to call `tick` even if nothing comes."""
        soon = now + self._spec.timing.heartbeat_timeout_s / 8
        settled_at = self._membership.settled_at()
        return soon if settled_at is None else min(soon, max(now, settled_at))

    def tick(self, now: float) -> None:
        """Drop silent and stuck workers, then decide and send what was decided."""
        self._now = now
        timeout_s = self._spec.timing.heartbeat_timeout_s
        if self._looked is not None and now - self._looked > timeout_s / 2:
            # This process itself was held up: what it missed is not the workers' fault.
            for connection in self._connections.values():
                connection.heard = now
            self._stragglers.excuse()
        self._looked = now
        if now - self._signed_at >= timeout_s / 4:
            self._signed_at = now
            for connection in list(self._connections.values()):
                if connection.is_observer or connection.chip is not None:
                    self._send(connection, Alive())
        self._drop_silent(timeout_s)
        self._drop_stuck()
        while (decision := self._membership.decide(now)) != Decision():
            self._carry_out(decision)

    def _hear_stranger(self, connection: ControlConnection, message: Message) -> None:
        """Hear one that has not said yet who it is."""
        match message:
            case Observe(job=job):
                n_observers = sum(each.is_observer for each in self._connections.values())
                if why := self._admission.why_not_observe(job, n_observers):
                    self._refuse(connection, why)
                connection.is_observer = not why
            case Hello():
                self._greet(connection, message)
            case Heartbeat():
                pass
            case _:
                self._refuse_unexpected(connection, message)

    def _hear_observer(self, connection: ControlConnection, message: Message) -> None:
        match message:
            case CutLink(link=link):
                self._sever(link)
            case MendLink(link=link):
                self._membership.mend(link, self._now)
            case Absent(chip=chip):
                self._membership.forgo(chip)
            case Finish():
                self._membership.is_over = True
                self._send_home()
            case _:
                self._refuse_unexpected(connection, message)

    def _hear_worker(self, connection: ControlConnection, chip: Chip, message: Message) -> None:
        self._membership.hear(chip, self._now)
        match message:
            case StatusChanged(status=status):
                if why := self._admission.why_impossible(chip, status):
                    self._refuse(connection, why)
                    return
                self._membership.tell(chip, status, self._now)
                self._send_to(status.lost, Alive())  # a worker that lives answers at once
                self._repeat_go(connection, status)
            case Report(event=event) if is_own_report(event, chip):
                if connection.reports.lets_pass(self._now):
                    self._tell_observers(event)
            case Heartbeat(generation=generation, step=step):
                self._stragglers.note(chip, (generation, step))
                if generation == self._history.latest and step > 0:
                    self._history.hear_step(step - 1)
            case _:
                self._refuse_unexpected(connection, message)

    def _greet(self, connection: ControlConnection, hello: Hello) -> None:
        """Take in a worker that says who it is."""
        chip = hello.chip
        if why := self._admission.why_refused(hello):
            self._refuse(connection, why)
            return
        if self._membership.is_over:
            if not hello.status.finished:  # so that it does not take itself for a member
                self._send(connection, Wait("the job was over before it came back"))
            self._part(connection, Failed(self.failure) if self.failure else Over())
            return
        if chip in self._worker_of:
            # Either one of two is wrong, or the old one is about to be found dead: come back later.
            why = f"chip {chip} has another worker"
            is_new = chip not in self._told_taken
            self._told_taken.add(chip)
            event = ConnectionRefused(connection.name, why) if is_new else None
            self._part(connection, TryLater(why), event)
            return
        why_not = self._membership.arrive(
            chip, hello.address, status=hello.status, memory=hello.memory, now=self._now
        )
        if why_not:
            self._turn_away(connection, chip, why_not, is_stale=True)
            return
        for wrong, why in self._admission.admit(hello):
            self._refuse(self._worker_of[wrong], why)
        connection.chip = chip
        self._worker_of[chip] = connection
        self._tell_observers(WorkerArrived(chip))
        self._send(connection, Welcome(self._spec.timing.heartbeat_timeout_s))
        self._tell_waiting(announce=False)

    def _repeat_go(self, connection: ControlConnection, status: Status) -> None:
        """Give the word to begin to a member that missed it."""
        go, generation = self._membership.go, self._membership.generation
        if go is None or generation is None or connection.chip not in generation.chips:
            return
        if status.ready and status.generation == go.generation != status.state_version:
            self._send(connection, go)

    def _sever(self, link: Link) -> None:
        """Have both ends of a link break their connection."""
        for one, other in ((link.first, link.second), (link.second, link.first)):
            self._send_to((one,), Sever(other))

    def _drop_silent(self, timeout_s: float) -> None:
        for connection in list(self._connections.values()):
            silent_s = self._now - connection.heard
            if connection.is_observer or silent_s <= timeout_s:
                continue
            if connection.chip is None:
                self._refuse(connection, "it does not say who it is", for_now=True)
            else:
                self._turn_away(connection, connection.chip, f"it was silent for {silent_s:.1f} s")

    def _drop_stuck(self) -> None:
        generation = self._membership.generation
        if generation is None or self._membership.is_over:
            return
        for chip, behind_s in self._stragglers.stuck(generation.chips, self._now):
            if chip in self._worker_of:
                why = f"its loop kept the others waiting for {behind_s:.1f} s"
                self._turn_away(self._worker_of[chip], chip, why)

    def _turn_away(
        self, connection: ControlConnection, chip: Chip, why: str, *, is_stale: bool = False
    ) -> None:
        """Part with a worker that counts as dead; it may come back."""
        _log.warning("chip %s was turned away: %s", chip, why)
        self._part(connection, TurnedAway(why, is_stale), WorkerTurnedAway(chip, why))

    def _refuse_unexpected(self, connection: ControlConnection, message: Message) -> None:
        self._refuse(connection, f"an unexpected message {MESSAGES.name_of(message)!r}")

    def _refuse(self, connection: ControlConnection, why: str, *, for_now: bool = False) -> None:
        """Part with one; for now, if an honest worker may have been held up: else it would end."""
        refused = None
        if told := self._refusals.words(why, self._now):
            _log.warning("refused %s: %s", connection.name, told)
            refused = ConnectionRefused(connection.name, told)
        self._part(connection, TryLater(why) if for_now else Refused(why), refused)

    def _part(
        self, connection: ControlConnection, last_words: Message, event: Event | None = None
    ) -> None:
        """Say why, hang up, and forget who was there; observers hear of the event, if any."""
        if event is not None:
            self._tell_observers(event)
        self._send(connection, last_words)
        self._out.hang_up(connection.number)
        what = "turned away" if isinstance(last_words, TurnedAway) else "refused"
        who = connection.name if connection.chip is None else f"chip {connection.chip}"
        self._forget(connection, f"{who} was {what}: {getattr(last_words, 'why', '')}")

    def _forget(self, connection: ControlConnection, why: str) -> None:
        """Forget a connection, and the worker behind it."""
        if self._connections.pop(connection.number, None) is None:
            return
        chip = connection.chip
        if chip is None or self._worker_of.get(chip) is not connection:
            return
        del self._worker_of[chip]
        self._told_taken.discard(chip)
        self._admission.leave(chip)
        self._stragglers.forget(chip)
        self._told_to_wait.pop(chip, None)  # its replacement is told again
        reason = why if str(chip) in why else f"chip {chip} is gone"
        self._membership.leave(chip, reason, self._now)
        if not self._membership.is_over:
            self._tell_observers(WorkerLeft(chip, reason))

    def _carry_out(self, decision: Decision) -> None:
        """Say to everyone concerned what was decided."""
        if decision.generation is not None:
            generation = decision.generation
            self._keep(self._history.record)  # first: no coordinator may use its number again
            self._send_to(generation.chips, NewGeneration(generation))
            forming = GenerationForming(generation.number, generation.chips, decision.why)
            self._tell_observers(forming)
            self._tell_waiting(announce=True)
        elif decision.go is not None:
            self._begin(decision.go, decision.lost_step)
        elif decision.is_over:
            self._send_home()
        elif decision.failed:
            self._fail(decision.failed)
        elif decision.lost_step is not None:
            self._tell_observers(StateLost(decision.lost_step, self._spec.timing.holder_timeout_s))
            self._tell_waiting(announce=True)

    def _fail(self, why: str) -> None:
        """Tell everyone that the job cannot go on."""
        _log.error("the job has failed: %s", why)
        self.failure = why
        self._membership.is_over = True
        self._tell_observers(JobFailed(why))
        self._send_to(tuple(self._worker_of), Failed(why))

    def _send_home(self) -> None:
        """Tell everyone that the job is over; observers first, who may not outlive the workers."""
        self._tell_observers(JobFinished())
        self._send_to(tuple(self._worker_of), Over())

    def _begin(self, go: Go, lost_step: int | None) -> None:
        generation = self._membership.generation
        assert generation is not None
        self._admission.begun()
        self._keep(self._history.record)  # first: nobody may step in what is not remembered
        self._send_to(generation.chips, go)
        if lost_step is not None:
            self._tell_observers(StateRestored(go.step, lost_step))
        waiting, cut = self._membership.waiting(), tuple(sorted(map(str, generation.cut)))
        began = GenerationBegan(generation.number, generation.chips, go.step, waiting, cut)
        self._tell_observers(began)

    def _tell_waiting(self, *, announce: bool) -> None:
        """Say to those who wait why they do, once for each reason; observers hear it if asked."""
        waiting = self._membership.waiting()
        reasons = {chip: self._membership.reason_to_wait(chip) for chip in waiting}
        for chip, why in reasons.items():
            if self._told_to_wait.get(chip) != why:
                self._send_to((chip,), Wait(why))
        if announce:
            for why in dict.fromkeys(reasons.values()):
                chips = tuple(chip for chip in waiting if reasons[chip] == why)
                self._tell_observers(ChipsWaiting(chips, why))
        self._told_to_wait = reasons

    def _send(self, connection: ControlConnection, message: Message) -> None:
        self._out.send(connection.number, message)

    def _send_to(self, chips: tuple[Chip, ...], message: Message) -> None:
        for chip in chips:
            if chip in self._worker_of:
                self._send(self._worker_of[chip], message)

    def _tell_observers(self, event: Event) -> None:
        self._on_event(self._now, event)
        for connection in list(self._connections.values()):
            if connection.is_observer:
                self._send(connection, Observed(self._now, event))
