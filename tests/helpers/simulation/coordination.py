"""A worker's connection to its coordinator: what `coordinator_client` does, without a thread.

The thread's loop is a set of callbacks here: a pause, a call, and turns of talking. The rules are
the same: the hello comes first, a heartbeat with every turn, and whoever loses the coordinator
calls again after a pause.
"""

from collections.abc import Callable

from meshmend.errors import StoppedError
from meshmend.membership.client import MembershipClient, News, WorkerIdentity
from meshmend.membership.events import Event
from meshmend.membership.job import JobFingerprint
from meshmend.membership.messages import Message, NewGeneration, Status, Welcome
from meshmend.topology.failures import Chip
from meshmend.transport.listener import Address
from meshmend.transport.pacing import Backoff
from simulation.coordinator_process import (
    COORDINATOR_HOST,
    COORDINATOR_PORT,
    through_codec,
)
from simulation.invariants import ProtocolError
from simulation.network import End, Network
from simulation.worker_process import WorkerProcess

_IDLE_S = 1.0  # while the worker is not offered


class SimulatedCoordination:
    """One worker as its coordinator knows it."""

    def __init__(
        self,
        process: WorkerProcess,
        network: Network,
        identity: WorkerIdentity,
        fingerprint: JobFingerprint,
    ) -> None:
        self._process = process
        self._network = network
        self._client = MembershipClient(identity, lambda: process.events.now)
        self._client.fingerprint = fingerprint
        self._end: End | None = None
        self._is_calling = False
        self._is_closed = False
        self._highest_term = 0  # of the coordinators that have admitted it
        self._is_due = False
        self._n_turns = 0
        self._backoff = Backoff(identity.seat)
        self._paused_until = 0.0
        self._was_wanted = False  # when the pause began
        self._next_turn(0.0)

    def join(
        self,
        address: Address,
        status: Status,
        *,
        on_change: Callable[[], None],
        on_sever: Callable[[Chip], None],
    ) -> None:
        """Offer this worker to the coordinator."""
        self._client.join(address, status, on_change=on_change, on_sever=on_sever)
        self._wake()

    def report(self, event: Event) -> None:
        """Tell those who watch the job of an event."""
        self._client.report(event)
        self._wake()

    def tell(self, status: Status) -> None:
        """Say how this worker stands."""
        self._client.tell(status)
        self._wake()

    def mark(self, generation: int, step: int) -> None:
        """Keep where this worker's loop is."""
        self._client.mark(generation, step)

    def note(self, status: Status) -> None:
        """Keep how this worker stands for when the coordinator asks."""
        self._client.status = status

    def await_news(self, is_enough: Callable[[News], bool]) -> News:
        """Return the news as soon as they are enough."""
        while True:
            news = self._client.news
            news.check()
            if is_enough(news):
                return news
            self._process.block()

    def await_lease(self, generation: int) -> None:
        """Return as soon as this worker may step in a generation."""
        while not self._client.has_lease(generation):
            if self._client.is_behind(generation):
                raise StoppedError(f"{self._process.name} was told to stop")
            self._process.block()

    def close(self) -> None:
        """Say no more; what was told is sent first."""
        self._is_closed = True
        if self._end is not None:
            self._say(self._end)
            self._hang_up()

    def _wake(self) -> None:
        """Have the next turn come now."""
        if not self._is_due:
            self._is_due = True
            self._n_turns += 1
            self._process.soon(self._turn)

    def _pause_until(self, moment: float) -> None:
        """Call nobody before a moment, unless the worker is offered meanwhile."""
        self._paused_until, self._was_wanted = moment, self._client.wants_connection
        self._next_turn(moment - self._process.events.now)

    def _next_turn(self, seconds: float) -> None:
        """Have the next turn come later, unless something wakes us."""
        self._n_turns += 1
        number = self._n_turns

        def turn() -> None:
            if number == self._n_turns:
                self._turn()

        self._process.soon(turn, max(0.0, seconds))

    def _turn(self) -> None:
        """Do one round of the thread's loop."""
        self._is_due = False
        if self._is_closed:
            return
        now, is_wanted = self._process.events.now, self._client.wants_connection
        if self._end is not None:
            self._talk(self._end)
        elif self._is_calling:
            return
        elif now < self._paused_until and is_wanted == self._was_wanted:
            self._next_turn(self._paused_until - now)
        elif is_wanted:
            self._call()
        else:
            self._pause_until(now + _IDLE_S)

    def _call(self) -> None:
        self._is_calling = True
        self._network.dial(
            self._process,
            (COORDINATOR_HOST, COORDINATOR_PORT),
            None,
            on_ready=self._wake,
            on_result=self._called,
        )

    def _called(self, end: End | None) -> None:
        self._is_calling = False
        if end is None:
            self._pause_until(self._process.events.now + self._backoff.wait_s())
            return
        if self._is_closed:
            end.close()
            return
        self._end = end
        self._send(end, self._client.hello())
        self._wake()

    def _talk(self, end: End) -> None:
        while end.inbox:
            message = end.inbox.popleft()
            goes_on = self._client.received(message)
            self._process.wake()
            if isinstance(message, Welcome):
                self._highest_term = max(self._highest_term, message.term)
                self._backoff.reset()
            if goes_on and isinstance(message, NewGeneration):
                self._check_term(message.generation.term)
            if not goes_on:
                self._hang_up()
                return
        if end.is_lost:
            self._hang_up()
            return
        self._say(end)
        self._next_turn(self._client.heartbeat_every_s)

    def _check_term(self, term: int) -> None:
        """Check that this worker never goes back to an earlier coordinator, whatever breaks."""
        if term < self._highest_term:
            who = f"{self._process.name}, which has heard of term {self._highest_term},"
            raise ProtocolError(f"{who} follows a coordinator of term {term}")

    def _say(self, end: End) -> None:
        if (status := self._client.next_status()) is not None:
            self._send(end, status)
        while (report := self._client.next_report()) is not None:
            self._send(end, report)
        # At every turn, more often than a real worker: messages come in more orders.
        if (beat := self._client.next_heartbeat(is_wanted=True)) is not None:
            self._send(end, beat)

    def _send(self, end: End, message: Message) -> None:
        self._process.events.tell(self._process.name, "says %s", message)
        end.send(through_codec(self._process.events, message))

    def _hang_up(self) -> None:
        assert self._end is not None
        self._end.close()
        self._end = None
        self._pause_until(self._process.events.now + self._backoff.wait_s())
