"""The events of a job: values that a coordinator sends and a run writes to a file.

`Event` is one of any kind. A line of `events.jsonl` is an event with `t`, the seconds
since the start of the run. `docs/events.md` lists all kinds and fields, and who gets them.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

from msgspec import Meta, field

from meshmend.errors import InputError, MessageError
from meshmend.membership.faults.fault import FaultKind
from meshmend.transport.codec import (
    LARGEST,
    Count,
    Finite,
    Real,
    Seconds,
    Value,
    plain,
    shown,
    tag_of,
    value_of,
)

ChipCoordinates = tuple[Count, ...]

VERSION: Final = 1  # of the format of events.jsonl; the start event holds it


class _Kind(Value, frozen=True, tag_field="event"):
    """Something that happened in a job; the base class of every kind below."""


class CoordinatorState(StrEnum):
    """Whether the coordinator died or was started again."""

    LOST = "lost"
    BACK = "back"


class RunStarted(_Kind, frozen=True, tag="start"):
    """A run begins: `mesh`, `wrap`, `fail` and `tile` are written as the options of that name."""

    mesh: str
    steps: Count
    batch: Count
    wrap: str = "none"
    fail: tuple[str, ...] = ()
    date: str = ""
    model: str = ""
    size: str = ""
    rate: Finite | str | None = None
    seed: int = 0
    policy: str = ""
    parameters: Count = 0
    tile: str = ""
    version: Annotated[int, Meta(ge=VERSION, le=VERSION)] = VERSION


class WorkerArrived(_Kind, frozen=True, tag="arrived"):
    """A worker has connected and is ready."""

    chip: ChipCoordinates


class WorkerLeft(_Kind, frozen=True, tag="left"):
    """The coordinator lost the connection to a worker."""

    chip: ChipCoordinates
    why: str = ""


class WorkerTurnedAway(_Kind, frozen=True, tag="turned away"):
    """The coordinator counts a worker as dead; it may come back as a new one."""

    chip: ChipCoordinates
    why: str


class ConnectionRefused(_Kind, frozen=True, tag="refused"):
    """The coordinator closed a connection because of what the other end said, or did not say."""

    who: str
    why: str


class ChipsWaiting(_Kind, frozen=True, tag="waiting"):
    """Workers are connected but do not train; `why` is the reason."""

    chips: tuple[ChipCoordinates, ...]
    why: str


class GenerationForming(_Kind, frozen=True, tag="forming"):
    """The coordinator asks these chips to form a generation."""

    number: Count
    chips: tuple[ChipCoordinates, ...]
    why: str


class GenerationBegan(_Kind, frozen=True, tag="generation"):
    """All chips of a generation are ready; they go on with the step after `step`.

    `waiting` are the chips of workers that are connected but do not train, `cut` the links that are
    cut.
    """

    number: Count
    chips: tuple[ChipCoordinates, ...]
    step: Count
    waiting: tuple[ChipCoordinates, ...] = ()
    cut: tuple[str, ...] = ()
    why: str = ""


class StateLost(_Kind, frozen=True, tag="lost"):
    """No worker is left that holds the state after `step`; the job waits for one that does."""

    step: Count
    waits_s: Seconds


class StateRestored(_Kind, frozen=True, tag="restored"):
    """No holder came back: the job goes on after `step`, and redoes the steps up to `lost`.

    Or it goes back on purpose; then there is a `why`.
    """

    step: Count
    lost: Count
    why: str = ""


class HistoryDropped(_Kind, frozen=True, tag="dropped"):
    """The job goes on without steps of another coordinator's term, up to `step`: they are lost.

    `chip` holds them, or none if only the coordinator's record names them. Two coordinators of one
    job have formed generations without knowing of each other. A term of 0: the chip holds a part of
    the state after `step`, and no chip has the rest.
    """

    term: Count
    step: Count
    chip: ChipCoordinates | None = None


class CoordinatorSuperseded(_Kind, frozen=True, tag="superseded"):
    """Another coordinator of a later term serves the job; this one ends."""

    term: Count
    later: Count


class JobFinished(_Kind, frozen=True, tag="finished"):
    """All members have done the last step, or an observer ended the job."""


class JobFailed(_Kind, frozen=True, tag="failed"):
    """The job cannot go on."""

    why: str


class WorkerStepped(_Kind, frozen=True, tag="stepped"):
    """A worker finished a step.

    Rank 0 reports every step; the other ranks report their first step of each generation. `at` is
    by the clock that all processes of one machine share. `sums` is what a step sums: how many
    elements of which type. `planned`: how many losses of a board have plans, and of how many.
    `saves_to` is the folder of the job's checkpoints, if it writes any.
    """

    chip: ChipCoordinates
    step: Count
    generation: Count
    at: Seconds
    leads: bool
    first: bool
    loss: Real | None
    samples: Count
    sums: tuple[tuple[Count, str], ...] = ()
    planned: tuple[Count, Count] | None = None
    saves_to: str = ""


class WorkerSaved(_Kind, frozen=True, tag="saved"):
    """Rank 0 has written its part of a checkpoint; `path` is the folder of checkpoints."""

    chip: ChipCoordinates
    step: Count
    at: Seconds
    path: str


class WriteFailed(_Kind, frozen=True, tag="unwritten"):
    """A worker cannot write `what`, such as its ledger; it trains on without it.

    Sent once until it can be written again; for each `step` whose checkpoint lacks a part.
    """

    chip: ChipCoordinates
    what: str
    why: str
    step: Count | None = None


class NonFiniteSum(_Kind, frozen=True, tag="non-finite"):
    """The gradients of a step are not finite, because those of this chip's parameters are not.

    `parameters` names some of the `n_parameters`; none, if the sum is too large for its type.
    """

    chip: ChipCoordinates
    step: Count
    parameters: tuple[str, ...] = ()
    n_parameters: Count = 0


class StatesDiffer(_Kind, frozen=True, tag="states-differ"):
    """The states of the chips are not equal after a step, and the job ends.

    `strange` are the chips that differ from most others, `names` some of the `n_names` parts of the
    state that differ. After step `equal_after` all were equal; None if that is not known.
    """

    chip: ChipCoordinates
    step: Count
    strange: tuple[ChipCoordinates, ...]
    names: tuple[str, ...]
    n_names: Count
    equal_after: Count | None = None


class WrongResult(_Kind, frozen=True, tag="wrong-result"):
    """A chip has computed wrong numbers: others got another result for the same samples.

    `share` is where those samples are in the row of all samples: the first, and the one after the
    last; None if it was the state of the chip that was wrong, twice in a row. `parameters` names
    some of the `n_parameters` whose gradients were wrong. `right_until` is the last step that is
    known to be right: later ones may hold wrong numbers. Told by `by`.
    """

    chip: ChipCoordinates
    step: Count
    share: tuple[Count, Count] | None = None
    right_until: Count | None = None
    by: ChipCoordinates = ()
    parameters: tuple[str, ...] = ()
    n_parameters: Count = 0


class WrongSum(_Kind, frozen=True, tag="wrong-sum"):
    """The sum of a step was not that of what the chips have put in, on `chips`; it is done again.

    Few chips: their own copies of it are wrong. All: one on the way has added wrong, or a link has
    changed bytes.
    """

    chip: ChipCoordinates
    step: Count
    chips: tuple[ChipCoordinates, ...]


class LinkSlow(_Kind, frozen=True, tag="link-slow"):
    """A link was steadily slower than planned; it has about this part of the others' bandwidth.

    The job plans anew, and takes the new plans between two steps. Told by `by`.
    """

    link: str
    speed: Finite
    step: Count
    by: ChipCoordinates = ()


class LinkRestored(_Kind, frozen=True, tag="link-restored"):
    """A link that was slow is as fast as the others again. Told by `by`."""

    link: str
    speed: Finite
    step: Count
    by: ChipCoordinates = ()


class FabricMeasured(_Kind, frozen=True, tag="fabric"):
    """What the links of a job do, as its chips have measured it before `step`. Told by `by`.

    The job plans for the fabric that it was given all the same.
    """

    link_bandwidth_bytes_per_s: Finite
    hop_latency_s: Seconds
    message_overhead_s: Seconds
    step: Count
    by: ChipCoordinates = ()


class ChipSlow(_Kind, frozen=True, tag="chip-slow"):
    """A chip computes steadily slower than the others, at about this part of their speed.

    It gets a smaller share of the samples from the next step on. Told by `by`.
    """

    chip: ChipCoordinates
    speed: Finite
    step: Count
    by: ChipCoordinates = ()


class ChipRestored(_Kind, frozen=True, tag="chip-restored"):
    """A chip that was slow computes as fast as the others again. Told by `by`."""

    chip: ChipCoordinates
    speed: Finite
    step: Count
    by: ChipCoordinates = ()


class StateMended(_Kind, frozen=True, tag="state-mended"):
    """The state of a chip differed from that of most others after a step, and it took theirs.

    The rest is as in `StatesDiffer`. Told by `by`.
    """

    chip: ChipCoordinates
    step: Count
    names: tuple[str, ...]
    n_names: Count
    equal_after: Count | None = None
    by: ChipCoordinates = ()


class StepFinished(_Kind, frozen=True, tag="step"):
    """All chips of a generation finished a step."""

    step: Count
    generation: Count
    chips: Count
    loss: Real | None
    samples: Count


class CheckpointSaved(_Kind, frozen=True, tag="checkpoint"):
    """A checkpoint is on disk; `path` is the folder of checkpoints."""

    step: Count
    path: str


class FaultHappened(_Kind, frozen=True, tag="fault"):
    """A fault was injected, or a worker died by itself; the latter has no `kind`.

    `fault` is for people to read. `chips` are the chips that it hits or gives back: none for a
    link, and none for the coordinator, so a kill without chips is the coordinator's.
    """

    fault: str
    at_step: Count | None = None
    kind: FaultKind | None = None
    chips: tuple[ChipCoordinates, ...] = ()


class FaultRecovered(_Kind, frozen=True, tag="recovered"):
    """The job has recovered from a fault: every chip of the latest generation finished a step.

    `detected_s` and `recovered_s` are seconds since the fault; None where that did not happen.
    """

    fault: str
    at_step: Count | None
    detected_s: Seconds | None
    recovered_s: Seconds | None
    kind: FaultKind | None = None
    chips: tuple[ChipCoordinates, ...] = ()


class FaultMissed(_Kind, frozen=True, tag="missed"):
    """The job was over before this fault was due; `fault` is written as `--inject` reads it."""

    fault: str


class CoordinatorChanged(_Kind, frozen=True, tag="coordinator"):
    """The coordinator died, or was started again."""

    state: CoordinatorState


class SampleCounts(Value, frozen=True):
    """How many samples the steps that count used, missed or used twice; None where not known."""

    used: Count = 0
    lost: Count | None = None
    repeated: Count | None = None


class RunEnded(_Kind, frozen=True, tag="end"):
    """A run is over; the fields sum it up. `chips` has one count per change of the set of chips.

    `redone` counts the steps that were lost and done again. `restores` lists the restores that
    caused this. `history_faults` are sentences about what the ledgers prove to be wrong,
    `unchecked` about what they cannot prove. `missing_checkpoints` are the steps whose checkpoints
    could not be written.
    """

    steps: Count
    first_loss: Real | None = None
    final_loss: Real | None = None
    replicas_equal: bool | None = None
    samples: SampleCounts | None = None
    chips: tuple[Count, ...] = ()
    faults: tuple[FaultRecovered, ...] = ()
    evaluation: Mapping[str, Real] = field(default_factory=dict)
    redone: Count = 0
    restores: tuple[StateRestored, ...] = ()
    history_faults: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    missing_checkpoints: tuple[Count, ...] = ()


Event = (
    RunStarted
    | WorkerArrived
    | WorkerLeft
    | WorkerTurnedAway
    | ConnectionRefused
    | ChipsWaiting
    | GenerationForming
    | GenerationBegan
    | StateLost
    | StateRestored
    | HistoryDropped
    | CoordinatorSuperseded
    | JobFinished
    | JobFailed
    | WorkerStepped
    | WorkerSaved
    | WriteFailed
    | NonFiniteSum
    | StatesDiffer
    | WrongResult
    | WrongSum
    | LinkSlow
    | LinkRestored
    | FabricMeasured
    | ChipSlow
    | ChipRestored
    | StateMended
    | StepFinished
    | CheckpointSaved
    | FaultHappened
    | FaultRecovered
    | FaultMissed
    | CoordinatorChanged
    | RunEnded
)


@dataclass(frozen=True)
class TimedEvent:
    """An event of a run, and when it happened, in seconds since the start of the run."""

    t: float
    event: Event


def event_line(timed: TimedEvent) -> str:
    """Return an event as a line of `events.jsonl`."""
    encoded = plain(timed.event)
    document = {"event": encoded.pop("event"), "t": round(timed.t, 4), **encoded}
    return json.dumps(document, separators=(",", ":")) + "\n"


def read_events(lines: Iterable[str]) -> tuple[TimedEvent, ...]:
    """Return the events of all lines; a last line that is torn is left out.

    Raises:
        InputError: any other line is not an event, the first event is not a start, or the format
            is of another version.
    """
    texts = _numbered(lines)
    events: list[TimedEvent] = []
    for number, line in texts:
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            if number == texts[-1][0] and events:
                break  # the run was killed while it wrote this line
            raise InputError(
                f"events.jsonl needs one JSON object a line, but line {number} is {line[:60]!r}"
            ) from None
        events.append(_timed(document, number))
    first = events[0].event if events else None
    if not isinstance(first, RunStarted):
        found = repr(tag_of(first)) if first else "no event at all"
        raise InputError(f"events.jsonl needs to begin with a start event, but got {found}")
    return tuple(events)


def _numbered(lines: Iterable[str]) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers."""
    try:
        return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(f"events.jsonl needs to be text in UTF-8, but got {error}") from None


def _timed(document: Any, number: int) -> TimedEvent:
    fields = dict(document) if isinstance(document, dict) else {}
    t = fields.pop("t", None)
    if (version := fields.get("version", VERSION)) != VERSION:
        raise InputError(
            f"this meshmend reads events of version {VERSION}, but line {number} is of version "
            f"{shown(version)}; read it with the meshmend that wrote it"
        )
    try:
        event: Event = value_of(fields or document, Event, "an event")
    except MessageError as error:
        raise InputError(f"events.jsonl, line {number}: {error}") from None
    if isinstance(t, bool) or not isinstance(t, int | float) or not 0 <= t <= LARGEST:
        raise InputError(
            f"events.jsonl, line {number}: an event needs t, seconds of zero or more, but got "
            f"{shown(t)}"
        )
    return TimedEvent(float(t), event)
