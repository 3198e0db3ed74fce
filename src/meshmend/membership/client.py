"""What a worker knows of its job and says about itself, as its coordinator hears it.

No sockets, no clock and no threads: messages are given, and what is to be sent is returned.
`coordinator_client` gives it all three.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from meshmend.membership.events import Event
from meshmend.membership.generation import Generation
from meshmend.membership.job_fingerprint import JobFingerprint
from meshmend.membership.messages import (
    FRESH,
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
from meshmend.net.listener import Address
from meshmend.net.liveness import DEFAULT_LINK_TIMEOUT_S
from meshmend.topology.failures import Chip

_FIRST_HEARTBEAT_TIMEOUT_S: Final = 2.0  # until the coordinator says what it is
_MOST_REPORTS: Final = 1000  # of steps that are kept while nobody listens


@dataclass(frozen=True)
class WorkerIdentity:
    """Which chip of which job a worker is, and where the coordinator listens.

    `join_timeout_s`: how long a new worker looks for a coordinator. `wait_for_chip_s`: how long it
    waits for a chip that has another worker. Then it ends.
    """

    job: str
    shape: tuple[int, ...]
    chip: Chip
    seat: int
    coordinator: Address
    secret: bytes
    link_timeout_s: float = DEFAULT_LINK_TIMEOUT_S
    join_timeout_s: float = 300.0
    wait_for_chip_s: float = 60.0


@dataclass(frozen=True)
class News:
    """What the coordinator has said last."""

    generation: Generation | None = None
    go: Go | None = None
    wait: str = ""
    turned_away: TurnedAway | None = None
    refused: str = ""
    failed: str = ""
    is_over: bool = False


class MembershipClient:
    """One worker's side of the protocol.

    `on_change` is called when the worker must stop what it waits for, before the news say why;
    `on_sever` when it must break the connection to a chip.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._address: Address | None = None
        self._reports: deque[Event] = deque(maxlen=_MOST_REPORTS)
        self._must_tell_status = False
        self._position = Heartbeat(0, 0)
        self._memory: Generation | None = None  # the generation it heard of last
        self._on_change: Callable[[], None] = lambda: None
        self._on_sever: Callable[[Chip], None] = lambda chip: None
        self.fingerprint: JobFingerprint | None = None
        self.is_welcome = False  # whether the coordinator took it in since it was offered
        self.taken = ""  # why its chip is not to be had now
        self.news = News()
        self.status = Status()
        self.heartbeat_timeout_s = _FIRST_HEARTBEAT_TIMEOUT_S

    @property
    def wants_connection(self) -> bool:
        """Whether the worker has been offered to the coordinator, and not been sent away."""
        return self._address is not None and not self._is_unwanted and not self.news.is_over

    @property
    def is_new(self) -> bool:
        """Whether nobody would miss this worker: it was not taken in and holds nothing."""
        return not self.is_welcome and self.status.state_version == FRESH

    @property
    def _is_unwanted(self) -> bool:
        return bool(self.news.turned_away or self.news.refused or self.news.failed)

    def join(
        self,
        address: Address,
        status: Status,
        *,
        on_change: Callable[[], None],
        on_sever: Callable[[Chip], None],
    ) -> None:
        """Offer this worker, which listens at an address, to the coordinator."""
        self._address, self.status = address, status
        self._on_change, self._on_sever = on_change, on_sever
        self.is_welcome = False
        self.news = News()

    def tell(self, status: Status) -> None:
        """Have the coordinator told how this worker stands."""
        self.status = status
        self._must_tell_status = True

    def mark(self, generation: int, step: int) -> None:
        """Keep where this worker's loop is; the next heartbeat tells."""
        self._position = Heartbeat(generation, step)

    def report(self, event: Event) -> None:
        """Have those who watch the job told of an event; it may be lost."""
        self._reports.append(event)

    def hello(self) -> Hello:
        """Return the first message of a new connection."""
        assert self._address is not None, "nothing was joined"
        heard = self._memory.number if self._memory else 0
        return Hello(
            job=self._identity.job,
            shape=self._identity.shape,
            chip=self._identity.chip,
            address=self._address,
            status=replace(self.status, generation=max(self.status.generation, heard)),
            memory=self._memory if self.status.state_version != FRESH else None,
            fingerprint=self.fingerprint,
        )

    def next_status(self) -> StatusChanged | None:
        """Return the status if it has not been sent since it was told."""
        if not self._must_tell_status:
            return None
        self._must_tell_status = False
        return StatusChanged(self.status)

    def next_report(self) -> Report | None:
        """Return a report that has not been sent."""
        return Report(self._reports.popleft()) if self._reports else None

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat of now."""
        return self._position

    def received(self, message: Message) -> bool:
        """Take in one message; return whether to go on with this connection."""
        match message:
            case Welcome(heartbeat_timeout_s=timeout_s):
                self.heartbeat_timeout_s = timeout_s
                self.is_welcome, self.taken = True, ""
            case TryLater(why=why):
                self.taken = why
            case NewGeneration(generation=generation):
                self._memory = generation
                self.hear(News(generation=generation))
            case Go():
                self.hear(replace(self.news, go=message, wait=""), is_change=False)
            case Wait(why=why):
                # A member that has to wait must stop: its peers went on without it.
                self.hear(replace(self.news, wait=why))
            case TurnedAway():
                self.hear(replace(self.news, turned_away=message))
            case Refused(why=why):
                self.hear(replace(self.news, refused=why))
            case Failed(why=why):
                self.hear(replace(self.news, failed=why))
            case Over():
                self.hear(replace(self.news, is_over=True))
            case Sever(chip=chip):
                self._on_sever(chip)
        return not isinstance(message, TryLater) and not self._is_unwanted

    def hear(self, news: News, *, is_change: bool = True) -> None:
        """Take in news; if they are a change, the main thread is interrupted first."""
        # The interruption comes first: a thread that has read the news is not interrupted by them.
        if is_change:
            self._on_change()
        self.news = news
