"""Control messages between the coordinator, its workers and its observers, as values.

`encode_message` and `decode_message` turn one into the bytes of a frame and back: the version of
the protocol, one byte, then MessagePack. Two ends with different versions disconnect at the first
message, with one clear error.
"""

import select
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from meshmend.errors import MessageError
from meshmend.membership.events import ChipCoordinates, Event
from meshmend.membership.generation import (
    LARGEST_NUMBER,
    Generation,
    GenerationName,
    GenerationNumber,
    Term,
)
from meshmend.membership.job import JobFingerprint
from meshmend.membership.job_status import JobStatus
from meshmend.topology.failures import Link
from meshmend.transport.channel import Channel, packed_frame
from meshmend.transport.codec import Count, Seconds, Value, checked
from meshmend.transport.listener import Address

VERSION: Final = 10
# The numbers by which handshakes call the ends of control connections that are not seats.
COORDINATOR: Final = 0xFFFFFFFF
OBSERVER: Final = 0xFFFFFFFE
ASKER: Final = 0xFFFFFFFD

FRESH: Final = -1  # the state version of a worker that holds no trained state

StateVersion = Annotated[int, msgspec.Meta(ge=FRESH, le=LARGEST_NUMBER)]


class _Kind(Value, frozen=True, tag_field="kind"):
    """A control message; the base class of every kind below."""


class Status(Value, frozen=True):
    """What a worker reports about itself.

    `generation` is the latest it received, `ready` whether it is ready for that one, `lost` the
    peers whose connections broke in it. `state_version` is the last generation in which it was up
    to date, and `step` how many steps it has done. `checkpoint` is the step of the newest whole
    checkpoint that it can read. `term` is that of the generation `state_version`. `also` is a step
    whose state it holds beside that of `step`: of the next one, which may not be done on all chips.
    `wrong` are the members of `generation` that it knows to compute wrong numbers; the others are
    to go back to a checkpoint of at most step `right_until`, if that is set and they have one.
    """

    generation: GenerationNumber = 0
    ready: bool = False
    state_version: StateVersion = FRESH
    step: Count = 0
    finished: bool = False
    lost: tuple[ChipCoordinates, ...] = ()
    checkpoint: Count | None = None
    term: Term = 0
    also: Count | None = None
    wrong: tuple[ChipCoordinates, ...] = ()
    right_until: Count | None = None


class Hello(_Kind, frozen=True, tag="hello"):
    """Worker: who I am, where I listen, and my status.

    `recalls` names the latest generation that I received; `memory` is that generation itself, if I
    was asked for it. `fingerprint` holds the arguments of my job. `term` is the highest of the
    coordinators that have admitted me.
    """

    job: str
    shape: tuple[Count, ...]
    chip: ChipCoordinates
    address: Address
    status: Status
    memory: Generation | None = None
    fingerprint: JobFingerprint | None = None
    term: Term = 0
    recalls: GenerationName | None = None


class StatusChanged(_Kind, frozen=True, tag="status"):
    """Worker: my new status."""

    status: Status


class Heartbeat(_Kind, frozen=True, tag="heartbeat"):
    """Worker: I am alive; my loop is in this generation and has begun the sum of this step.

    `sent` is the time by my clock; `Alive` sends it back.
    """

    generation: GenerationNumber
    step: Count
    sent: Seconds = 0.0


class Traffic(_Kind, frozen=True, tag="traffic"):
    """Worker: how many bytes I have sent to each chip since I began."""

    sent: tuple[tuple[ChipCoordinates, Count], ...]


class Report(_Kind, frozen=True, tag="report"):
    """Worker: an event for the observers. May be lost."""

    event: Event


class Observe(_Kind, frozen=True, tag="observe"):
    """Observer: send me all events of this job."""

    job: str


class AskStatus(_Kind, frozen=True, tag="ask status"):
    """Asker: send me the status of this job; None means whatever job you have.

    A worker answers too. It leaves out the generation, which is long, if the question `is_brief`.
    """

    job: str | None = None
    is_brief: bool = False


class StatusAnswer(_Kind, frozen=True, tag="status of the job"):
    """Coordinator or worker, to askers: the status of the job."""

    status: JobStatus


class CutLink(_Kind, frozen=True, tag="cut"):
    """Observer: make both ends of a link break their connection, as a cut cable would."""

    link: Link


class MendLink(_Kind, frozen=True, tag="mend"):
    """Observer: a link that was cut works again."""

    link: Link


class Absent(_Kind, frozen=True, tag="absent"):
    """Observer: the worker of this chip died before it connected; begin without it."""

    chip: ChipCoordinates


class Repaired(_Kind, frozen=True, tag="repaired"):
    """Observer: this chip was repaired; it may come back, whatever it computed before."""

    chip: ChipCoordinates


class Finish(_Kind, frozen=True, tag="finish"):
    """Observer: end the job now, whatever step it is at."""


class Welcome(_Kind, frozen=True, tag="welcome"):
    """Coordinator: you are admitted; you count as dead after this time without a heartbeat.

    You may step for `lease_s` seconds without word from me, of which each `Alive` renews the count.
    """

    heartbeat_timeout_s: Seconds
    lease_s: Seconds
    term: Term = 0


class Alive(_Kind, frozen=True, tag="alive"):
    """Coordinator: I am alive. Sent four times per heartbeat timeout, or to get a quick answer.

    With a `generation`: you are a member of it, and it is the latest. The lease to step in it
    counts from when you `sent` the heartbeat that I have from you, however late this comes.
    """

    generation: GenerationNumber | None = None
    sent: Seconds = 0.0


class AskMemory(_Kind, frozen=True, tag="memory"):
    """Coordinator: I do not know the generation that you name; say hello again, and tell it."""


class NewGeneration(_Kind, frozen=True, tag="generation"):
    """Coordinator: stop the current step and get ready for this generation."""

    generation: Generation


class Go(_Kind, frozen=True, tag="go"):
    """Coordinator: go on after this step; a chip that is not a holder copies a holder's state.

    `restores`: the holders read the checkpoint of that step first. `lost` is the last step done
    before, if no holder of it is left: the steps after `step` are then done again.
    """

    generation: GenerationNumber
    step: Count
    holders: tuple[ChipCoordinates, ...]
    restores: bool = False
    lost: Count | None = None


class Wait(_Kind, frozen=True, tag="wait"):
    """Coordinator: you do not train now; `why` is the reason."""

    why: str


class TurnedAway(_Kind, frozen=True, tag="turned away"):
    """Coordinator: you count as dead; you may come back."""

    why: str


class Refused(_Kind, frozen=True, tag="refused"):
    """Coordinator: I refuse your connection for good; `why` is the reason.

    `is_chip_wrong`: your chip has computed wrong numbers. Others of its host may train on.
    """

    why: str
    is_chip_wrong: bool = False


class TryLater(_Kind, frozen=True, tag="later"):
    """Coordinator: I refuse your connection for now.

    `is_chip_taken`: your chip has another worker.
    """

    why: str
    is_chip_taken: bool = False


class Over(_Kind, frozen=True, tag="over"):
    """Coordinator: the job is done."""


class Failed(_Kind, frozen=True, tag="failed"):
    """Coordinator: the job cannot go on; `why` is the reason."""

    why: str


class Sever(_Kind, frozen=True, tag="sever"):
    """Coordinator: break the connection to this chip."""

    chip: ChipCoordinates


class Observed(_Kind, frozen=True, tag="observed"):
    """Coordinator, to observers: an event and its time by the coordinator's clock."""

    clock: Seconds
    event: Event


Message = (
    Hello
    | StatusChanged
    | Heartbeat
    | Traffic
    | Report
    | Observe
    | AskStatus
    | StatusAnswer
    | CutLink
    | MendLink
    | Absent
    | Repaired
    | Finish
    | Welcome
    | Alive
    | AskMemory
    | NewGeneration
    | Go
    | Wait
    | TurnedAway
    | Refused
    | TryLater
    | Over
    | Failed
    | Sever
    | Observed
)


_VERSION_BYTE: Final = bytes([VERSION])
_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_decoder: Final = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """Return a message as the bytes of a frame."""
    return _VERSION_BYTE + _encoder.encode(message)


def decode_message(frame: bytes) -> Message:
    """Return the message that a frame holds.

    Raises:
        MessageError: it holds no message, or one of another version.
    """
    if frame[:1] != _VERSION_BYTE:
        raise MessageError(
            f"this end speaks version {VERSION} of the protocol, but got {frame[:40]!r}; install "
            "the same meshmend on all hosts"
        )
    message: Message = checked(lambda: _decoder.decode(memoryview(frame)[1:]), "a message")
    return message


def packed_message(message: Message) -> bytes:
    """Return a message as the bytes that cross a connection: one for many is packed once."""
    return packed_frame(encode_message(message))


def send_message(channel: Channel, message: Message) -> None:
    """Send a message, or as much of it as the connection takes; `flush` sends the rest.

    Raises:
        ChannelError: the other end has closed, or takes nothing any more.
    """
    channel.send(encode_message(message))


def messages_before(channel: Channel, deadline: float) -> Iterator[Message]:
    """Yield the messages that arrive before a time of `time.monotonic`.

    Raises:
        ChannelError, MessageError: as `received_messages`.
    """
    while channel.is_ready(select.POLLIN, deadline):
        yield from received_messages(channel)


def received_messages(channel: Channel) -> list[Message]:
    """Return the messages that have arrived completely; never waits.

    Raises:
        ChannelError: the other end has closed.
        MessageError: the other end sent something that is not a message.
    """
    return [decode_message(frame) for frame in channel.receive()]
