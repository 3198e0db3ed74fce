"""Control messages between the coordinator, its workers and its observers, as values.

Each message is a frozen dataclass; `encode_message` and `decode_message` turn one into the bytes of
a frame and back. Every frame holds the version of the protocol: two ends with different versions
disconnect at the first message, with one clear error.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final

from meshmend.errors import MessageError
from meshmend.membership.events import EVENTS, ChipCoordinates, Event
from meshmend.membership.generation import LARGEST_NUMBER, Generation, GenerationNumber, Term
from meshmend.membership.job_fingerprint import JobFingerprint
from meshmend.membership.job_status import JobStatus
from meshmend.topology.failures import Link, parse_link
from meshmend.transport.codec import Codec, Count, Seconds, Within
from meshmend.transport.listener import Address

VERSION: Final = 7
# The numbers by which handshakes call the ends of control connections that are not seats.
COORDINATOR: Final = 0xFFFFFFFF
OBSERVER: Final = 0xFFFFFFFE
ASKER: Final = 0xFFFFFFFD

FRESH: Final = -1  # the state version of a worker that holds no trained state

StateVersion = Annotated[int, Within(FRESH, LARGEST_NUMBER)]


class Message:
    """A control message; the base class of every kind below."""


@dataclass(frozen=True)
class Status:
    """What a worker reports about itself.

    `generation` is the latest it received, `ready` whether it is ready for that one, `lost` the
    peers whose connections broke in it. `state_version` is the last generation in which it was up
    to date, and `step` how many steps it has done. `checkpoint` is the step of the newest whole
    checkpoint that it can read. `term` is that of the generation `state_version`.
    """

    generation: GenerationNumber = 0
    ready: bool = False
    state_version: StateVersion = FRESH
    step: Count = 0
    finished: bool = False
    lost: tuple[ChipCoordinates, ...] = ()
    checkpoint: Count | None = None
    term: Term = 0


@dataclass(frozen=True)
class Hello(Message):
    """Worker: who I am, where I listen, and my status.

    `memory` is the latest generation that I received, `fingerprint` the arguments of my job, `term`
    the highest of the coordinators that have admitted me.
    """

    job: str
    shape: tuple[Count, ...]
    chip: ChipCoordinates
    address: Address
    status: Status
    memory: Generation | None = None
    fingerprint: JobFingerprint | None = None
    term: Term = 0


@dataclass(frozen=True)
class StatusChanged(Message):
    """Worker: my new status."""

    status: Status


@dataclass(frozen=True)
class Heartbeat(Message):
    """Worker: I am alive; my loop is in this generation and has begun the sum of this step.

    `sent` is the time by my clock; `Alive` sends it back.
    """

    generation: GenerationNumber
    step: Count
    sent: Seconds = 0.0


@dataclass(frozen=True)
class Traffic(Message):
    """Worker: how many bytes I have sent to each chip since I began."""

    sent: tuple[tuple[ChipCoordinates, Count], ...]


@dataclass(frozen=True)
class Report(Message):
    """Worker: an event for the observers. May be lost."""

    event: Event


@dataclass(frozen=True)
class Observe(Message):
    """Observer: send me all events of this job."""

    job: str


@dataclass(frozen=True)
class AskStatus(Message):
    """Asker: send me the status of this job; None means whatever job you have.

    A worker answers too. It leaves out the generation, which is long, if the question `is_brief`.
    """

    job: str | None = None
    is_brief: bool = False


@dataclass(frozen=True)
class StatusAnswer(Message):
    """Coordinator or worker, to askers: the status of the job."""

    status: JobStatus


@dataclass(frozen=True)
class CutLink(Message):
    """Observer: make both ends of a link break their connection, as a cut cable would."""

    link: Link


@dataclass(frozen=True)
class MendLink(Message):
    """Observer: a link that was cut works again."""

    link: Link


@dataclass(frozen=True)
class Absent(Message):
    """Observer: the worker of this chip died before it connected; begin without it."""

    chip: ChipCoordinates


@dataclass(frozen=True)
class Finish(Message):
    """Observer: end the job now, whatever step it is at."""


@dataclass(frozen=True)
class Welcome(Message):
    """Coordinator: you are admitted; you count as dead after this time without a heartbeat.

    You may step for `lease_s` seconds without word from me, of which each `Alive` renews the count.
    """

    heartbeat_timeout_s: Seconds
    lease_s: Seconds
    term: Term = 0


@dataclass(frozen=True)
class Alive(Message):
    """Coordinator: I am alive. Sent four times per heartbeat timeout, or to get a quick answer.

    With a `generation`: you are a member of it, and it is the latest. The lease to step in it
    counts from when you `sent` the heartbeat that I have from you, however late this comes.
    """

    generation: GenerationNumber | None = None
    sent: Seconds = 0.0


@dataclass(frozen=True)
class NewGeneration(Message):
    """Coordinator: stop the current step and get ready for this generation."""

    generation: Generation


@dataclass(frozen=True)
class Go(Message):
    """Coordinator: go on after this step; a chip that is not a holder copies a holder's state.

    `restores`: the holders read the checkpoint of that step first. `lost` is the last step done
    before, if no holder of it is left: the steps after `step` are then done again.
    """

    generation: GenerationNumber
    step: Count
    holders: tuple[ChipCoordinates, ...]
    restores: bool = False
    lost: Count | None = None


@dataclass(frozen=True)
class Wait(Message):
    """Coordinator: you do not train now; `why` is the reason."""

    why: str


@dataclass(frozen=True)
class TurnedAway(Message):
    """Coordinator: you count as dead; you may come back."""

    why: str


@dataclass(frozen=True)
class Refused(Message):
    """Coordinator: I refuse your connection for good; `why` is the reason."""

    why: str


@dataclass(frozen=True)
class TryLater(Message):
    """Coordinator: I refuse your connection for now.

    `is_chip_taken`: your chip has another worker.
    """

    why: str
    is_chip_taken: bool = False


@dataclass(frozen=True)
class Over(Message):
    """Coordinator: the job is done."""


@dataclass(frozen=True)
class Failed(Message):
    """Coordinator: the job cannot go on; `why` is the reason."""

    why: str


@dataclass(frozen=True)
class Sever(Message):
    """Coordinator: break the connection to this chip."""

    chip: ChipCoordinates


@dataclass(frozen=True)
class Observed(Message):
    """Coordinator, to observers: an event and its time by the coordinator's clock."""

    clock: Seconds
    event: Event


MESSAGES: Final = Codec(
    "a message",
    {
        "hello": Hello,
        "status": StatusChanged,
        "heartbeat": Heartbeat,
        "traffic": Traffic,
        "report": Report,
        "observe": Observe,
        "ask status": AskStatus,
        "status of the job": StatusAnswer,
        "cut": CutLink,
        "mend": MendLink,
        "absent": Absent,
        "finish": Finish,
        "welcome": Welcome,
        "alive": Alive,
        "generation": NewGeneration,
        "go": Go,
        "wait": Wait,
        "turned away": TurnedAway,
        "refused": Refused,
        "later": TryLater,
        "over": Over,
        "failed": Failed,
        "sever": Sever,
        "observed": Observed,
    },
    texts={Link: parse_link},
    nested={Event: EVENTS},
)


def encode_message(message: Message) -> bytes:
    """Return a message as the bytes of a frame."""
    document = {"v": VERSION, **MESSAGES.encode(message)}
    return json.dumps(document, separators=(",", ":")).encode()


def decode_message(frame: bytes) -> Message:
    """Return the message that a frame holds.

    Raises:
        MessageError: it holds no message, or one of another version.
    """
    try:
        document: Any = json.loads(frame)
    except (ValueError, RecursionError):
        raise MessageError(f"a frame needs a JSON object, but got {frame[:40]!r}") from None
    version = document.pop("v", None) if isinstance(document, dict) else None
    if version != VERSION:
        raise MessageError(
            f"this end speaks version {VERSION} of the protocol, but got {frame[:40]!r} of version "
            f"{version!r}; install the same meshmend on all hosts"
        )
    message: Message = MESSAGES.decode(document)
    return message
