"""Control messages between the coordinator, its workers and those who watch, as values.

Each message is a frozen dataclass; `encode_message` and `decode_message` turn one into the bytes of
a frame and back. Every frame holds the version of the protocol: ends of two versions part at the
first message, with one clear error.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final

from meshmend.errors import MessageError
from meshmend.membership.events import EVENTS, ChipCoordinates, Event
from meshmend.membership.generation import LARGEST_NUMBER, Generation, GenerationNumber
from meshmend.membership.job_fingerprint import JobFingerprint
from meshmend.net.codec import Codec, Count, Seconds, Within
from meshmend.net.listener import Address
from meshmend.topology.failures import Link, parse_link

VERSION: Final = 4
FRESH: Final = -1  # the state version of a worker that holds nothing that counts

StateVersion = Annotated[int, Within(FRESH, LARGEST_NUMBER)]


class Message:
    """Something that one end says to the other; every kind below is one."""


@dataclass(frozen=True)
class Status:
    """What a worker says of itself.

    `generation` is the one it last heard of, `ready` whether it is ready for that, `lost` the
    peers whose connections broke in it. `state_version` is the last generation in which it was up
    to date, and `step` how many steps it has done. `checkpoint` is the step of the newest whole
    checkpoint that it can read.
    """

    generation: GenerationNumber = 0
    ready: bool = False
    state_version: StateVersion = FRESH
    step: Count = 0
    finished: bool = False
    lost: tuple[ChipCoordinates, ...] = ()
    checkpoint: Count | None = None


@dataclass(frozen=True)
class Hello(Message):
    """Worker: who I am, where I listen, and how I stand.

    `memory` is the generation that I know, `fingerprint` what all workers must have alike.
    """

    job: str
    shape: tuple[Count, ...]
    chip: ChipCoordinates
    address: Address
    status: Status
    memory: Generation | None = None
    fingerprint: JobFingerprint | None = None


@dataclass(frozen=True)
class StatusChanged(Message):
    """Worker: how I stand now."""

    status: Status


@dataclass(frozen=True)
class Heartbeat(Message):
    """Worker: I live; my loop is in this generation and has begun the sum of this step."""

    generation: GenerationNumber
    step: Count


@dataclass(frozen=True)
class Report(Message):
    """Worker: for those who watch the job. May be lost."""

    event: Event


@dataclass(frozen=True)
class Observe(Message):
    """Observer: tell me of all events of this job."""

    job: str


@dataclass(frozen=True)
class CutLink(Message):
    """Observer: have both ends of a link break their connection, as a cut cable would."""

    link: Link


@dataclass(frozen=True)
class MendLink(Message):
    """Observer: a link that was cut is back."""

    link: Link


@dataclass(frozen=True)
class Absent(Message):
    """Observer: the worker of this chip died before it came; begin without it."""

    chip: ChipCoordinates


@dataclass(frozen=True)
class Finish(Message):
    """Observer: end the job now, whatever step it is at."""


@dataclass(frozen=True)
class Welcome(Message):
    """Coordinator: you are in; without a heartbeat for so long you count as dead."""

    heartbeat_timeout_s: Seconds


@dataclass(frozen=True)
class Alive(Message):
    """Coordinator: I live. Sent four times within the heartbeat timeout, or to be answered now."""


@dataclass(frozen=True)
class NewGeneration(Message):
    """Coordinator: stop what you do, and get ready for this generation."""

    generation: Generation


@dataclass(frozen=True)
class Go(Message):
    """Coordinator: take up this step; a chip that is not a holder takes the state of one.

    `restores`: the holders read the checkpoint of that step first. `lost` is the last step that was
    done before, where no holder of it is left: the steps after `step` are done again.
    """

    generation: GenerationNumber
    step: Count
    holders: tuple[ChipCoordinates, ...]
    restores: bool = False
    lost: Count | None = None


@dataclass(frozen=True)
class Wait(Message):
    """Coordinator: you do not train now, and why."""

    why: str


@dataclass(frozen=True)
class TurnedAway(Message):
    """Coordinator: you count as dead; you may come back.

    `is_stale`: the others went on without you; what you hold does not count any more.
    """

    why: str
    is_stale: bool = False


@dataclass(frozen=True)
class Refused(Message):
    """Coordinator: I do not talk to you, and why."""

    why: str


@dataclass(frozen=True)
class TryLater(Message):
    """Coordinator: your chip has another worker; if that one dies you may take its place."""

    why: str


@dataclass(frozen=True)
class Over(Message):
    """Coordinator: the job is done."""


@dataclass(frozen=True)
class Failed(Message):
    """Coordinator: the job cannot go on, and why."""

    why: str


@dataclass(frozen=True)
class Sever(Message):
    """Coordinator: break the connection to this chip."""

    chip: ChipCoordinates


@dataclass(frozen=True)
class Observed(Message):
    """Coordinator, to observers: an event, and when by the coordinator's clock."""

    clock: Seconds
    event: Event


MESSAGES: Final = Codec(
    "a message",
    {
        "hello": Hello,
        "status": StatusChanged,
        "heartbeat": Heartbeat,
        "report": Report,
        "observe": Observe,
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
        MessageError: it holds none, or one of another version.
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
