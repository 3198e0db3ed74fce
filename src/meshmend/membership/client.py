"""A worker's side of the membership protocol, without sockets or threads.

The caller passes in a clock and received messages, and gets back the messages to send.
`coordinator_client` runs it with a socket and a thread.

A worker steps only while it has a **lease**: its coordinator has heard from it, in this generation,
no longer ago than `lease_s`. The time counts from when the worker sent what the coordinator heard,
so that no delay on the way makes the lease longer.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from msgspec import structs

from meshmend.config import Timing, alive_every_s
from meshmend.errors import JobFailedError, RefusedError, TurnedAwayError, WrongChipError
from meshmend.membership.events import Event
from meshmend.membership.generation import Generation
from meshmend.membership.job import JobFingerprint
from meshmend.membership.messages import (
    FRESH,
    Alive,
    AskMemory,
    Failed,
    Go,
    Heartbeat,
    Hello,
    Message,
    NewGeneration,
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
from meshmend.topology.failures import Chip
from meshmend.transport.listener import Address

_FIRST_HEARTBEAT_TIMEOUT_S: Final = 2.0  # until the coordinator sends its own
_FIRST_LEASE_S: Final = Timing().lease_s
Ending = TurnedAway | Refused | Failed | Over  # after which a worker steps no more
_MOST_REPORTS: Final = 1000  # kept while there is no connection; then the oldest is dropped


@dataclass(frozen=True)
class WorkerIdentity:
    """Which chip of which job a worker is, and where the coordinator listens.

    Of the timing, the worker follows its own timeouts only: those of the coordinator come from it.
    """

    job: str
    shape: tuple[int, ...]
    chip: Chip
    seat: int
    coordinator: Address
    secret: bytes
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True)
class News:
    """What a worker has learned from the coordinator's latest messages."""

    generation: Generation | None = None
    go: Go | None = None
    wait: str = ""
    end: Ending | None = None

    @property
    def is_over(self) -> bool:
        """Whether the job is done."""
        return isinstance(self.end, Over)

    @property
    def failure(self) -> str:
        """Why this worker, or the whole job, cannot go on; empty if it can."""
        return self.end.why if isinstance(self.end, Refused | Failed) else ""

    def check(self) -> None:
        """Raise an error if the coordinator does not want this worker.

        Raises:
            RefusedError, TurnedAwayError: another one may be wanted, or this one later.
            JobFailedError: the job cannot go on.
        """
        match self.end:
            case Refused(why=why, is_chip_wrong=is_wrong):
                raise (WrongChipError if is_wrong else RefusedError)(why)
            case Failed(why=why):
                raise JobFailedError(why)
            case TurnedAway(why=why):
                raise TurnedAwayError(why)


class MembershipClient:
    """One worker's side of the protocol.

    `on_change` is called when the worker must stop waiting for its peers; `news` changes right
    after the call. `on_sever` is called when the worker must break its connection to a chip.
    `clock` must never stand still while the clocks of others run, as when a machine is suspended.
    """

    def __init__(self, identity: WorkerIdentity, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._identity = identity
        self._clock = clock
        self._lease_s = _FIRST_LEASE_S
        self._ready_since = 0, -math.inf  # a generation, and when it first said it was ready for it
        self._lease = 0, -math.inf  # a generation, and until when it may step in it
        self._address: Address | None = None
        self._reports: deque[Event] = deque(maxlen=_MOST_REPORTS)
        self._is_status_unsent = False
        self._is_memory_wanted = False  # whether the coordinator has asked for it
        self._position = Heartbeat(0, 0)
        self._beats_at = -math.inf  # when the next heartbeat is due
        self._memory: Generation | None = None  # the latest generation it received
        self._on_change: Callable[[], None] = lambda: None
        self._on_sever: Callable[[Chip], None] = lambda chip: None
        self._term = 0  # the highest of the coordinators that have admitted it
        self.fingerprint: JobFingerprint | None = None
        self.is_welcome = False  # whether it was admitted since the last `join`
        self.taken = ""  # why it cannot have its chip now; empty if it can
        self.news = News()
        self.status = Status()
        self.heartbeat_timeout_s = _FIRST_HEARTBEAT_TIMEOUT_S

    @property
    def wants_connection(self) -> bool:
        """Whether the worker has joined, has not been rejected, and the job is not over."""
        return self._address is not None and self.news.end is None

    @property
    def address(self) -> Address | None:
        """Where this worker listens; None before it joined."""
        return self._address

    @property
    def memory(self) -> Generation | None:
        """The latest generation that it received."""
        return self._memory

    @property
    def is_new(self) -> bool:
        """Whether the job does not depend on this worker: not admitted, and without a state."""
        return not self.is_welcome and self.status.state_version == FRESH

    @property
    def heartbeat_every_s(self) -> float:
        """How often to send a heartbeat at least."""
        return alive_every_s(self.heartbeat_timeout_s, self._lease_s)

    def has_lease(self, generation: int) -> bool:
        """Whether this worker may step in a generation: nobody goes on without it yet."""
        leased, until = self._lease
        return leased == generation and self._clock() < until

    def is_behind(self, generation: int) -> bool:
        """Whether the coordinator has something else for this worker than to step."""
        latest = self.news.generation
        is_same = latest is not None and latest.number == generation
        return not is_same or bool(self.news.wait) or self.news.end is not None

    def join(
        self,
        address: Address,
        status: Status,
        *,
        on_change: Callable[[], None],
        on_sever: Callable[[Chip], None],
    ) -> None:
        """Ask the coordinator to admit this worker, whose peers connect to `address`."""
        self._address, self.status = address, status
        self._on_change, self._on_sever = on_change, on_sever
        self.is_welcome = False
        self.news = News()

    def tell(self, status: Status) -> None:
        """Set the status, and send it to the coordinator at the next chance."""
        self.status = status
        self._is_status_unsent = True
        if status.ready and status.generation != self._ready_since[0]:
            self._ready_since = status.generation, self._clock()

    def mark(self, generation: int, step: int) -> None:
        """Set the position of this worker's loop for the next heartbeat."""
        self._position = Heartbeat(generation, step)

    def report(self, event: Event) -> None:
        """Queue an event for the observers; it may be lost."""
        self._reports.append(event)

    @property
    def has_reports(self) -> bool:
        """Whether reports wait to be sent."""
        return bool(self._reports)

    def hello(self, *, is_whole: bool = False) -> Hello:
        """Return the first message of a new connection; if `is_whole`, with the generation."""
        assert self._address is not None, "hello() needs join() to be called first"
        known_number = self._memory.number if self._memory else 0
        latest = max(self.status.generation, known_number)
        memory = self._memory if self.status.state_version != FRESH else None
        self._is_memory_wanted = False
        self._beats_at = -math.inf  # whoever admits this worker learns at once where its loop is
        return Hello(
            job=self._identity.job,
            shape=self._identity.shape,
            chip=self._identity.chip,
            address=self._address,
            status=structs.replace(self.status, generation=latest),
            memory=memory if is_whole else None,
            fingerprint=self.fingerprint,
            term=self._term,
            recalls=memory.name if memory else None,
        )

    def next_status(self) -> StatusChanged | Hello | None:
        """Return the status if `tell` has set it since it was last sent.

        A coordinator that has asked for the generation gets a whole hello with it instead.
        """
        is_unsent, self._is_status_unsent = self._is_status_unsent, False
        if self._is_memory_wanted:
            return self.hello(is_whole=True)
        return StatusChanged(self.status) if is_unsent else None

    def next_report(self) -> Report | None:
        """Return the oldest report that has not been sent, or None."""
        return Report(self._reports.popleft()) if self._reports else None

    @property
    def beats_in_s(self) -> float:
        """How long from now the next heartbeat is due."""
        return max(0.0, self._beats_at - self._clock())

    def next_heartbeat(self, *, is_wanted: bool = False) -> Heartbeat | None:
        """Return a heartbeat with the current position of the loop, if one is due or wanted.

        A status is a sign of life too. So a change of the chips costs no heartbeats: a thousand
        workers answer it at the same moment.
        """
        now = self._clock()
        if now < self._beats_at and not is_wanted:
            return None
        self._beats_at = now + self.heartbeat_every_s
        return structs.replace(self._position, sent=now)

    def received(self, message: Message) -> bool:
        """Handle one message; return whether to keep this connection."""
        match message:
            case Welcome(term=term) if term < self._term:
                return False  # a later coordinator has taken its place; this one does not know yet
            case NewGeneration(generation=generation) if generation.term < self._term:
                return False
            case Welcome(heartbeat_timeout_s=timeout_s, lease_s=lease_s, term=term):
                self._term = term
                self.heartbeat_timeout_s, self._lease_s = timeout_s, lease_s
                self.is_welcome, self.taken = True, ""
            case TryLater(why=why, is_chip_taken=is_taken):
                self.taken = why if is_taken else ""
            case NewGeneration(generation=generation):
                self._memory = generation
                self.set_news(News(generation=generation))
            case Alive(generation=generation, sent=sent):
                self._beats_at = -math.inf  # it may be asked whether it lives
                if generation is not None:
                    self._renew(generation, sent)
            case AskMemory():
                self._is_memory_wanted = True
            case Go():
                if self._ready_since[0] == message.generation:
                    self._renew(*self._ready_since)
                self.set_news(replace(self.news, go=message, wait=""), is_change=False)
            case Wait(why=why):
                # A member that has to wait must stop: its peers train without it.
                self.set_news(replace(self.news, wait=why))
            case TurnedAway() | Refused() | Failed() | Over():
                self.set_news(replace(self.news, end=message))
            case Sever(chip=chip):
                self._on_sever(chip)
        is_wanted = self.news.end is None or self.news.is_over
        return is_wanted and not isinstance(message, TryLater)

    def _renew(self, generation: int, sent: float) -> None:
        """Extend the lease, or begin that of a later generation."""
        self._lease = max(self._lease, (generation, sent + self._lease_s))

    def set_news(self, news: News, *, is_change: bool = True) -> None:
        """Replace the news; if `is_change`, interrupt the main thread first."""
        # In this order, a thread that has read the new value is never interrupted because of it.
        if is_change:
            self._on_change()
        self.news = news
