"""The coordinator: handles the messages of workers and observers, and says who trains together.

No sockets and no clock: the caller passes in messages and times, and the coordinator sends through
a `Connections`. `coordinator_server` runs it with sockets and a clock.

No training step waits for the coordinator, unless its workers have had no word from it for longer
than their lease: from then on it, or one that takes its place, may go on without them. If it is
killed and started again, it learns the job from its workers. Observers, such as the launcher, get
every event; they may be killed too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from msgspec import structs

from meshmend.membership import events, messages
from meshmend.membership.admission import Admission, is_own_report
from meshmend.membership.coordinator_status import StatusKeeper
from meshmend.membership.events import Event
from meshmend.membership.history import CoordinatorRecord, History
from meshmend.membership.job import JobSpec
from meshmend.membership.job_status import JobStatus
from meshmend.membership.membership import Decision, Membership
from meshmend.membership.messages import Heartbeat, Message
from meshmend.membership.stragglers import Stragglers
from meshmend.topology.failures import Chip
from meshmend.transport.codec import tag_of
from meshmend.transport.pacing import RateLimit

_MOST_STRANGERS: Final = 128
_MOST_ASKERS: Final = 32
_MOST_REPORTS_PER_S: Final = 5000  # forwarded to observers; no training loop is that fast

_MOST_CHIPS_TOLD_PER_S: Final = 4096  # in answers to askers: some tenths of a second of work
_MOST_REFUSALS_PER_S: Final = 10  # logged and sent to observers; refusals can come in floods
_COMPUTED_WRONG: Final = "computed wrong numbers, and is out of the job until it is repaired"
_LOOK_FOR_STUCK_EVERY_S: Final = 0.25  # it looks at all members, which takes time


class Connections(Protocol):
    """Sends the coordinator's messages; each connection has a number."""

    def send(self, connection: int, message: Message) -> None:
        """Send a message. If that fails, the coordinator's `closed` is called later."""

    def hang_up(self, connection: int) -> None:
        """Close a connection after the messages already sent; `closed` is not called for it."""


@dataclass
class ControlConnection:
    """A connection of a worker, an observer, an asker, or a stranger.

    An asker was sent the status of the job; it hangs up once it has read it. A stranger has not
    said yet which of these it is; if it `is_asked`, it will say hello once more. `beat` is the last
    heartbeat of a worker.
    """

    number: int
    name: str
    heard: float
    chip: Chip | None = None
    is_observer: bool = False
    is_asker: bool = False
    is_asked: bool = False
    beat: Heartbeat | None = None
    reports: RateLimit = field(default_factory=lambda: RateLimit(_MOST_REPORTS_PER_S))


class Coordinator:
    """Coordinates one job until all its workers have finished; `on_event` gets what observers get.

    `keep` must save the record that outlives this coordinator. It is called before any worker acts
    on the change. `history` is what the previous coordinator saved. `token` is a random number that
    makes its term differ from that of any other coordinator. `term_on_disk` returns the term of the
    record that is kept now: if it is a later one, another coordinator has taken this one's place.
    """

    def __init__(
        self,
        spec: JobSpec,
        connections: Connections,
        *,
        history: History | None = None,
        token: int = 0,
        keep: Callable[[CoordinatorRecord], None] = lambda record: None,
        term_on_disk: Callable[[], int] = lambda: 0,
        on_event: Callable[[float, Event], None] = lambda clock, event: None,
    ) -> None:
        self._spec = spec
        self._out = connections
        self._on_event = on_event
        self._keep = keep
        self._term_on_disk = term_on_disk
        self._history = history or History(CoordinatorRecord(spec.job))
        self._token = token
        self._history.take_term(0, token)
        self._keep(self._history.record)  # first, so that one that still runs gives way
        self._is_active = False  # whether it has formed a generation, or gone on with one
        self._told_dropped: set[tuple[Chip, int, int]] = set()
        self.is_superseded = False
        self._membership = Membership(
            spec.mesh, spec.timing, board=spec.board, history=self._history
        )
        self._admission = Admission(spec, self._history, self._membership)
        self._connections: dict[int, ControlConnection] = {}
        self._strangers: dict[int, ControlConnection] = {}  # those that have not said who they are
        self._observers: dict[int, ControlConnection] = {}
        self._worker_of: dict[Chip, ControlConnection] = {}
        self._reported_taken: set[Chip] = set()  # chips whose second worker was reported
        self._accusers: dict[tuple[int, Chip], set[Chip]] = {}  # by generation and accused chip
        self._wrong: set[Chip] = set()  # they computed wrong numbers, and were not repaired
        self._refusals = RateLimit(_MOST_REFUSALS_PER_S)
        self._answers = RateLimit(max(1, _MOST_CHIPS_TOLD_PER_S // spec.mesh.n_chips))
        self._stragglers = Stragglers(spec.timing.straggler_timeout_s)
        self._keeper = StatusKeeper(spec, self._membership, self._admission, self._stragglers)
        self._last_tick: float | None = None
        self._last_alive_at = 0.0  # when it last sent `Alive`
        self._none_silent_until = 0.0  # before that, no connection can have been silent too long
        self._look_for_stuck_at = 0.0
        self._has_newcomers = False  # that have not been told why they wait
        self.failure = ""  # why the job could not go on
        self._now = 0.0

    @property
    def is_done(self) -> bool:
        """Whether the job is over and all workers have left."""
        return self._membership.is_over and not self._worker_of

    def status(self, now: float) -> JobStatus:
        """Return how the job is now; changes nothing."""
        return self._keeper.status(now, self.failure)

    @property
    def traffic(self) -> dict[Chip, dict[Chip, int]]:
        """How many bytes each worker has sent to each other one, as far as it has said."""
        return self._keeper.traffic

    def opened(self, number: int, name: str, now: float) -> None:
        """Record a new connection; close the oldest stranger if there are too many."""
        self._now = now
        # All workers of a job may come at once.
        if len(self._strangers) >= max(_MOST_STRANGERS, 2 * self._spec.mesh.n_chips):
            oldest = next(iter(self._strangers.values()))
            self._refuse(oldest, "too many connections, and it had sent no hello", for_now=True)
        connection = ControlConnection(number, name, now)
        self._connections[number] = self._strangers[number] = connection

    def closed(self, number: int, why: str, now: float) -> None:
        """Record that a connection was lost."""
        self._now = now
        if number in self._connections:
            self._forget(self._connections[number], why)

    def received(self, number: int, message: Message, now: float) -> None:
        """Handle a message."""
        self._now = now
        connection = self._connections.get(number)
        if connection is None:  # it was closed while the message was on its way
            return
        if connection.chip is not None or connection.is_observer:
            connection.heard = now  # a stranger that only sends heartbeats counts as silent
        if connection.is_observer:
            self._handle_observer(connection, message)
        elif connection.chip is not None:
            self._handle_worker(connection, connection.chip, message)
        else:
            self._handle_stranger(connection, message)

    def refuse(self, number: int, why: str, now: float) -> None:
        """Close a connection that sent something other than a valid message."""
        self._now = now
        if number in self._connections:
            self._refuse(self._connections[number], why)

    def next_wakeup(self, now: float) -> float:
        """Return when to call `tick` even if no message arrives."""
        soon = now + self._spec.timing.alive_every_s / 2
        settled_at = self._membership.settled_at()
        return soon if settled_at is None else min(soon, max(now, settled_at))

    def tick(self, now: float) -> None:
        """Drop silent and stuck workers, then make decisions and send them."""
        self._now = now
        self._keeper.begin(now)
        timeout_s = self._spec.timing.heartbeat_timeout_s
        if self._last_tick is not None and now - self._last_tick > timeout_s / 2:
            # This process itself was held up, so the workers may not have been silent.
            for connection in self._connections.values():
                connection.heard = now
            self._stragglers.restart_clocks()
            self._look_for_stuck_at = now
        self._last_tick = now
        if now - self._last_alive_at >= self._spec.timing.alive_every_s:
            self._last_alive_at = now
            self._give_way(self._term_on_disk(), is_on_disk=True)
            for connection in (*self._observers.values(), *self._worker_of.values()):
                self._send(connection, self._sign_of_life(connection))
        if now > self._none_silent_until:
            self._drop_silent(timeout_s)
        if now >= self._look_for_stuck_at:
            self._look_for_stuck_at = now + _LOOK_FOR_STUCK_EVERY_S
            self._drop_stuck()
        if self._has_newcomers:
            self._notify_waiting(announce=False)
        while (decision := self._membership.decide(now)) != Decision():
            self._carry_out(decision)

    @property
    def _term(self) -> int:
        return self._history.record.term

    def _give_way(self, later: int, *, is_on_disk: bool = False) -> bool:
        """End if another coordinator has a later term than this one; return whether it has ended.

        Its workers are free to go to the other one. If workers name the later term before this one
        has formed a generation, it is the one that was started last: it takes a later one still.
        """
        if later <= self._term or self.is_superseded:
            return self.is_superseded
        if not (is_on_disk or self._is_active or self._history.is_committed):
            self._history.take_term(later, self._token)
            self._keep(self._history.record)
            return False
        why = f"a coordinator of term {later} serves this job now; this one is of term {self._term}"
        self.failure, self.is_superseded = why, True
        self._membership.is_over = True
        self._publish(events.CoordinatorSuperseded(self._term, later))
        for connection in list(self._worker_of.values()):
            self._close(connection, messages.TurnedAway(why))
        return True

    def _tell_dropped(
        self, chip: Chip, status: messages.Status, goes_on_after: int | None = None
    ) -> None:
        """Say once that a worker's state belongs to another history, and is lost.

        Or that the job goes on after a step, and the worker has done later ones, of whose state
        nobody has all parts. One step more is no loss: not all may have done it.
        """
        for term, step in self._history.dropped:
            self._publish(events.HistoryDropped(term, step))
        self._history.dropped.clear()
        key = chip, status.term, status.step
        is_ahead = goes_on_after is not None and status.step > goes_on_after + 1
        lacks_part = status.state_version == messages.FRESH
        is_dropped = (is_ahead and lacks_part) or not self._history.contains(status)
        if is_dropped and key not in self._told_dropped:
            self._told_dropped.add(key)
            self._publish(events.HistoryDropped(status.term, status.step, chip))

    def _sign_of_life(self, connection: ControlConnection) -> messages.Alive:
        """Return what renews a worker's lease, if it steps in the generation that counts."""
        go, generation, beat = self._membership.go, self._membership.generation, connection.beat
        if go is None or generation is None or beat is None or beat.generation != go.generation:
            return messages.Alive()
        if connection.chip not in generation.seat_of:
            return messages.Alive()
        return messages.Alive(beat.generation, beat.sent)

    def _handle_stranger(self, connection: ControlConnection, message: Message) -> None:
        """Handle a message of a connection that has not said yet who it is."""
        match message:
            case messages.Observe(job=job):
                if why := self._admission.why_observer_refused(job, len(self._observers)):
                    self._refuse(connection, why)
                    return
                connection.is_observer = True
                self._observers[connection.number] = connection
                self._strangers.pop(connection.number, None)
            case messages.Hello():
                self._handle_hello(connection, message)
            case messages.AskStatus() if not connection.is_asker:
                self._answer(connection, message)
            case messages.Heartbeat():
                pass
            case _ if connection.is_asked:  # its second hello will say all that counts
                pass
            case _:
                self._refuse_unexpected(connection, message)

    def _handle_observer(self, connection: ControlConnection, message: Message) -> None:
        match message:
            case messages.CutLink(link=link) if link in self._history.record.cut_on_purpose:
                pass  # said once more, to a coordinator that may be new
            case messages.CutLink(link=link):
                self._membership.cut_on_purpose(link)
                self._keep(self._history.record)  # the next coordinator must not try it either
                for one, other in ((link.first, link.second), (link.second, link.first)):
                    self._send_to((one,), messages.Sever(other))
            case messages.MendLink(link=link):
                self._membership.mend(link, self._now)
                self._keep(self._history.record)
            case messages.Absent(chip=chip):
                self._membership.stop_awaiting(chip)
            case messages.Repaired(chip=chip):
                self._wrong.discard(chip)
            case messages.Finish():
                self._membership.is_over = True
                self._announce_end()
            case _:
                self._refuse_unexpected(connection, message)

    def _handle_worker(self, connection: ControlConnection, chip: Chip, message: Message) -> None:
        self._membership.note_contact(chip, self._now)
        match message:
            case messages.StatusChanged(status=status):
                if why := self._admission.why_impossible(chip, status):
                    self._refuse(connection, why)
                    return
                self._membership.update_status(chip, status, self._now)
                self._hear_accusations(chip, status)
                self._send_to(status.lost, messages.Alive())  # a live worker answers at once
                self._repeat_go(connection, status)
            case messages.Traffic():
                self._keeper.count_traffic(chip, message)
            case messages.Report(event=event) if is_own_report(event, chip):
                if connection.reports.lets_pass(self._now):
                    self._publish(event)
            case messages.Heartbeat(generation=generation, step=step):
                connection.beat = message
                self._stragglers.note(chip, (generation, step))
                if generation == self._history.latest and step > 0:
                    self._history.update_step(step - 1)
            case _:
                self._refuse_unexpected(connection, message)

    def _handle_hello(self, connection: ControlConnection, hello: messages.Hello) -> None:
        """Admit a worker that says who it is, or close its connection with the reason."""
        chip, memory = hello.chip, hello.memory
        if memory is None and hello.recalls is not None:
            memory = self._membership.recalled(hello.recalls)
            if memory is None:
                connection.is_asked = True
                self._send(connection, messages.AskMemory())
                return
            hello = structs.replace(hello, memory=memory)
        if why := self._admission.why_refused(hello):
            self._refuse(connection, why)
            return
        if chip in self._wrong:
            self._refuse(connection, f"chip {chip} {_COMPUTED_WRONG}", is_chip_wrong=True)
            return
        if self._give_way(hello.term):
            self._close(connection, messages.TryLater(self.failure))
            return
        if self._membership.is_over:
            if self._history.is_committed and not self._history.contains(hello.status):
                self._tell_dropped(chip, hello.status)
                lost = f"chip {chip} has step {hello.status.step} of another history, which is lost"
                self._refuse(connection, f"the job is over, and {lost}")
                return
            is_member = hello.status.finished and self._history.is_holder(hello.status)
            if not is_member:  # else it would think that it was a member
                self._send(connection, messages.Wait("the job was over before it came back"))
            self._close(
                connection, messages.Failed(self.failure) if self.failure else messages.Over()
            )
            return
        if chip in self._worker_of and self._membership.is_missed(hello):
            why = "an earlier worker of its chip is back, and holds the state that was lost"
            self._turn_away(self._worker_of[chip], chip, why)
        if chip in self._worker_of:
            # Two workers were started for one chip, or the old one has died unnoticed: try later.
            why = f"chip {chip} has another worker"
            is_new = chip not in self._reported_taken
            self._reported_taken.add(chip)
            event = events.ConnectionRefused(connection.name, why) if is_new else None
            self._close(connection, messages.TryLater(why, is_chip_taken=True), event)
            return
        self._membership.arrive(
            chip, hello.address, status=hello.status, memory=memory, now=self._now
        )
        for wrong, why in self._admission.admit(hello):
            self._refuse(self._worker_of[wrong], why)
        connection.chip = chip
        self._worker_of[chip] = connection
        self._strangers.pop(connection.number, None)
        self._publish(events.WorkerArrived(chip))
        timing = self._spec.timing
        welcome = messages.Welcome(timing.heartbeat_timeout_s, timing.lease_s, self._term)
        self._send(connection, welcome)
        for other in self._membership.to_sever(chip):
            self._send(connection, messages.Sever(other))
        if self._history.is_committed:
            self._tell_dropped(chip, hello.status)
        self._has_newcomers = True
        self._hear_accusations(chip, hello.status)

    def _hear_accusations(self, accuser: Chip, status: messages.Status) -> None:
        """Turn away each chip that more than half of its generation knows to compute wrong.

        All members come to the same conclusion from the same numbers. So a single one that is
        wrong, even about others, turns nobody away.
        """
        generation = self._membership.generation
        if generation is None or status.generation != generation.number:
            return
        for accused in status.wrong:
            accusers = self._accusers.setdefault((generation.number, accused), set())
            if accused != accuser and {accused, accuser} <= generation.seat_of.keys():
                accusers.add(accuser)
            is_sure = 2 * len(accusers) > len(generation.chips)
            if is_sure and accused not in self._wrong:
                self._wrong.add(accused)
                if accused in self._worker_of:
                    self._expel(self._worker_of[accused], accused)
                if status.right_until is not None:
                    self._membership.go_back(status.right_until)

    def _expel(self, connection: ControlConnection, chip: Chip) -> None:
        """Close the connection of a worker that computes wrong numbers; it may not come back."""
        why = f"chip {chip} {_COMPUTED_WRONG}"
        refusal = messages.Refused(why, is_chip_wrong=True)
        self._close(connection, refusal, events.WorkerTurnedAway(chip, why))

    def _answer(self, connection: ControlConnection, question: messages.AskStatus) -> None:
        """Send the status once; the asker hangs up when it has read it."""
        if why := self._admission.why_asker_refused(question.job):
            self._refuse(connection, why)
            return
        if not self._answers.lets_pass(self._now):
            self._close(connection, messages.TryLater("too many ask; ask again in a second"))
            return
        askers = [each for each in self._connections.values() if each.is_asker]
        if len(askers) >= _MOST_ASKERS:
            self._drop_asker(askers[0])
        connection.is_asker, connection.heard = True, self._now
        self._strangers.pop(connection.number, None)
        self._send(connection, messages.StatusAnswer(self.status(self._now)))

    def _drop_asker(self, connection: ControlConnection) -> None:
        """Hang up on an asker that has not read its answer yet."""
        self._out.hang_up(connection.number)
        self._forget(connection, "")

    def _repeat_go(self, connection: ControlConnection, status: messages.Status) -> None:
        """Send the go message again to a member that missed it."""
        go, generation = self._membership.go, self._membership.generation
        if go is None or generation is None or connection.chip not in generation.seat_of:
            return
        if status.ready and status.generation == go.generation != status.state_version:
            self._send(connection, go)

    def _drop_silent(self, timeout_s: float) -> None:
        heard = [each.heard for each in self._connections.values() if not each.is_observer]
        # Whoever is heard from later, or comes later, is not silent before that either.
        self._none_silent_until = min(heard, default=self._now) + timeout_s
        for connection in list(self._connections.values()):
            silent_s = self._now - connection.heard
            if connection.is_observer or silent_s <= timeout_s:
                continue
            if connection.is_asker:
                self._drop_asker(connection)
            elif connection.chip is None:
                self._refuse(connection, "it sent no hello in time", for_now=True)
            else:
                self._turn_away(connection, connection.chip, f"it was silent for {silent_s:.1f} s")

    def _drop_stuck(self) -> None:
        for chip, behind_s in self._stragglers.stuck(self._membership.active_members, self._now):
            if chip in self._worker_of:
                why = f"its loop kept the others waiting for {behind_s:.1f} s"
                self._turn_away(self._worker_of[chip], chip, why)

    def _turn_away(self, connection: ControlConnection, chip: Chip, why: str) -> None:
        """Close the connection of a worker that counts as dead; it may come back."""
        self._close(connection, messages.TurnedAway(why), events.WorkerTurnedAway(chip, why))

    def _refuse_unexpected(self, connection: ControlConnection, message: Message) -> None:
        self._refuse(connection, f"an unexpected message {tag_of(message)!r}")

    def _refuse(
        self,
        connection: ControlConnection,
        why: str,
        *,
        for_now: bool = False,
        is_chip_wrong: bool = False,
    ) -> None:
        """Close a connection; `for_now` lets a delayed worker try again instead of ending it."""
        refused = None
        if shown_why := self._refusals.text_of(why, self._now):
            refused = events.ConnectionRefused(connection.name, shown_why)
        refusal = messages.Refused(why, is_chip_wrong=is_chip_wrong)
        answer = messages.TryLater(why) if for_now else refusal
        self._close(connection, answer, refused)

    def _close(
        self, connection: ControlConnection, final_message: Message, event: Event | None = None
    ) -> None:
        """Send a final message, hang up and forget the connection; observers get the event."""
        if event is not None:
            self._publish(event)
        self._send(connection, final_message)
        self._out.hang_up(connection.number)
        what = "turned away" if isinstance(final_message, messages.TurnedAway) else "refused"
        who = connection.name if connection.chip is None else f"chip {connection.chip}"
        self._forget(connection, f"{who} was {what}: {getattr(final_message, 'why', '')}")

    def _forget(self, connection: ControlConnection, why: str) -> None:
        """Forget a connection and its worker."""
        if self._connections.pop(connection.number, None) is None:
            return
        self._strangers.pop(connection.number, None)
        self._observers.pop(connection.number, None)
        chip = connection.chip
        if chip is None or self._worker_of.get(chip) is not connection:
            return
        del self._worker_of[chip]
        self._reported_taken.discard(chip)
        self._admission.leave(chip)
        self._stragglers.forget(chip)
        self._keeper.wait_reasons.forget(chip)
        reason = why if str(chip) in why else f"chip {chip} is gone"
        self._membership.leave(chip, reason, self._now)
        if not self._membership.is_over:
            self._publish(events.WorkerLeft(chip, reason))

    def _carry_out(self, decision: Decision) -> None:
        """Send a decision to the workers and observers that it concerns."""
        if decision.generation is not None:
            new = decision.generation
            if self._give_way(self._term_on_disk(), is_on_disk=True):
                return
            self._is_active = True
            self._keep(self._history.record)  # first, so that no coordinator uses the number again
            self._send_to(new.chips, messages.NewGeneration(new))
            self._publish(events.GenerationForming(new.number, new.chips, decision.why))
            self._notify_waiting(announce=True)
        elif decision.go is not None:
            self._begin(decision.go, decision.lost_step, decision.why)
        elif decision.is_over:
            self._announce_end()
        elif decision.failed:
            self._fail(decision.failed)
        elif decision.lost_step is not None:
            waits_s = self._history.wait_s(self._spec.timing.holder_timeout_s)
            self._publish(events.StateLost(decision.lost_step, waits_s))
            self._notify_waiting(announce=True)
        elif decision.stands_still:
            self._notify_waiting(announce=True)

    def _fail(self, why: str) -> None:
        """Send to all workers and observers that the job cannot go on."""
        self.failure = why
        self._membership.is_over = True
        self._publish(events.JobFailed(why))
        self._send_to(tuple(self._worker_of), messages.Failed(why))

    def _announce_end(self) -> None:
        """Send that the job is over; observers first, because they may end with the workers."""
        self._publish(events.JobFinished())
        self._send_to(tuple(self._worker_of), messages.Over())

    def _begin(self, go: messages.Go, lost_step: int | None, why: str) -> None:
        generation = self._membership.generation
        assert generation is not None
        if self._give_way(self._term_on_disk(), is_on_disk=True):
            return
        self._admission.generation_began()
        goes_on_after = go.step if lost_step is None else None  # a restore is told by its own event
        for chip, worker in self._membership.workers.items():
            self._tell_dropped(chip, worker.status, goes_on_after)
        self._keep(self._history.record)  # first: no worker may step in an unrecorded generation
        self._send_to(generation.chips, go)
        if lost_step is not None:
            self._publish(events.StateRestored(go.step, lost_step, why))
        waiting, cut = self._membership.waiting(), tuple(sorted(map(str, generation.cut)))
        began = events.GenerationBegan(generation.number, generation.chips, go.step, waiting, cut)
        self._publish(began)

    def _notify_waiting(self, *, announce: bool) -> None:
        """Send each waiting worker its reason once; with `announce`, send all to observers."""
        self._has_newcomers = False
        for chip, why in self._keeper.wait_reasons.update(self._now):
            self._send_to((chip,), messages.Wait(why))
        for event in self._keeper.wait_reasons.events() if announce else ():
            self._publish(event)

    def _send(self, connection: ControlConnection, message: Message) -> None:
        self._out.send(connection.number, message)

    def _send_to(self, chips: tuple[Chip, ...], message: Message) -> None:
        for chip in chips:
            if chip in self._worker_of:
                self._send(self._worker_of[chip], message)

    def _publish(self, event: Event) -> None:
        self._keeper.view.take(self._now, event)
        self._on_event(self._now, event)
        observed = messages.Observed(self._now, event)
        for connection in list(self._observers.values()):
            self._send(connection, observed)
