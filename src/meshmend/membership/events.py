"""What happens in a job, as values: what observers are told and what a run writes down.

Each event is a frozen dataclass; `EVENTS` writes and reads them all. A line of `events.jsonl` is an
event with `t`, the seconds since the start of the run. `docs/events.md` has the table.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from meshmend.errors import InputError, MessageError
from meshmend.faults.fault import FaultKind
from meshmend.net.codec import Codec, Count, Real, Seconds
from meshmend.topology.failures import Chip

VERSION: Final = 1  # of the format of events.jsonl; the start event holds it


class Event:
    """Something that happened; every kind below is one."""


class CoordinatorState(StrEnum):
    """What became of the coordinator."""

    LOST = "lost"
    BACK = "back"


@dataclass(frozen=True)
class RunStarted(Event):
    """A run begins: what is trained on which mesh; `mesh`, `wrap` and `fail` as the options say."""

    mesh: str
    steps: Count
    batch: Count
    wrap: str = "none"
    fail: tuple[str, ...] = ()
    date: str = ""
    model: str = ""
    size: str = ""
    rate: float | str | None = None
    seed: int = 0
    policy: str = ""
    parameters: Count = 0
    version: Count = VERSION


@dataclass(frozen=True)
class WorkerArrived(Event):
    """A worker has connected and is ready."""

    chip: Chip


@dataclass(frozen=True)
class WorkerLeft(Event):
    """A worker's connection is gone."""

    chip: Chip
    why: str = ""


@dataclass(frozen=True)
class WorkerTurnedAway(Event):
    """The coordinator counts a worker as dead; it may come back as a new one."""

    chip: Chip
    why: str


@dataclass(frozen=True)
class ConnectionRefused(Event):
    """The coordinator does not talk to whoever called."""

    who: str
    why: str


@dataclass(frozen=True)
class ChipsWaiting(Event):
    """Workers that are there but do not train, and why."""

    chips: tuple[Chip, ...]
    why: str


@dataclass(frozen=True)
class GenerationForming(Event):
    """The coordinator asks these chips to form a generation."""

    number: Count
    chips: tuple[Chip, ...]
    why: str


@dataclass(frozen=True)
class GenerationBegan(Event):
    """All chips of a generation are ready; they take up training after `step`."""

    number: Count
    chips: tuple[Chip, ...]
    step: Count
    waiting: tuple[Chip, ...] = ()
    cut: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class StateLost(Event):
    """No worker is left that holds the state after `step`; the job waits for one that does."""

    step: Count
    waits_s: Seconds


@dataclass(frozen=True)
class StateRestored(Event):
    """No holder came: the job goes on from the checkpoint of `step`, and redoes those to `lost`."""

    step: Count
    lost: Count


@dataclass(frozen=True)
class JobFailed(Event):
    """The job cannot go on."""

    why: str


@dataclass(frozen=True)
class WorkerStepped(Event):
    """A worker finished a step: every one of the first rank, and the first of each in a generation.

    `at` is the clock that all processes of its machine share. `sums` are what a step sums: how many
    elements of which type.
    """

    chip: Chip
    step: Count
    generation: Count
    at: Seconds
    leads: bool
    first: bool
    loss: Real | None
    samples: Count
    sums: tuple[tuple[Count, str], ...] = ()


@dataclass(frozen=True)
class WorkerSaved(Event):
    """A checkpoint is on disk."""

    chip: Chip
    step: Count
    at: Seconds
    path: str


@dataclass(frozen=True)
class StepFinished(Event):
    """All chips of a generation finished a step."""

    step: Count
    generation: Count
    chips: Count
    loss: Real | None
    samples: Count


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint is on disk; `path` is the folder of checkpoints."""

    step: Count
    path: str


@dataclass(frozen=True)
class FaultHappened(Event):
    """A fault: one that was injected, of a `kind`, or a worker that died by itself, of none.

    `fault` names it in words, `chips` are those that it concerns.
    """

    fault: str
    at_step: Count | None = None
    kind: FaultKind | None = None
    chips: tuple[Chip, ...] = ()


@dataclass(frozen=True)
class FaultRecovered(Event):
    """The job is over a fault: every chip of the latest generation has finished a step."""

    fault: str
    at_step: Count | None
    detected_s: Seconds | None
    recovered_s: Seconds | None
    kind: FaultKind | None = None


@dataclass(frozen=True)
class FaultMissed(Event):
    """A fault that was to come, but the job was over before."""

    fault: str


@dataclass(frozen=True)
class CoordinatorChanged(Event):
    """The coordinator died, or was started again."""

    state: CoordinatorState


@dataclass(frozen=True)
class SampleCounts:
    """What the ledgers say of the samples of the steps that count."""

    used: Count = 0
    lost: Count | None = None
    repeated: Count | None = None


@dataclass(frozen=True)
class RunEnded(Event):
    """How a run went: its figures."""

    steps: Count
    first_loss: Real | None = None
    final_loss: Real | None = None
    replicas_equal: bool | None = None
    samples: SampleCounts | None = None
    chips: tuple[Count, ...] = ()
    faults: tuple[FaultRecovered, ...] = ()
    evaluation: Mapping[str, Real] = field(default_factory=dict)


EVENTS: Final = Codec(
    "an event",
    {
        "start": RunStarted,
        "arrived": WorkerArrived,
        "left": WorkerLeft,
        "turned away": WorkerTurnedAway,
        "refused": ConnectionRefused,
        "waiting": ChipsWaiting,
        "forming": GenerationForming,
        "generation": GenerationBegan,
        "lost": StateLost,
        "restored": StateRestored,
        "failed": JobFailed,
        "stepped": WorkerStepped,
        "saved": WorkerSaved,
        "step": StepFinished,
        "checkpoint": CheckpointSaved,
        "fault": FaultHappened,
        "recovered": FaultRecovered,
        "missed": FaultMissed,
        "coordinator": CoordinatorChanged,
        "end": RunEnded,
    },
    key="event",
)


@dataclass(frozen=True)
class TimedEvent:
    """An event of a run, and when it happened, in seconds since the start of the run."""

    t: float
    event: Event


def event_line(timed: TimedEvent) -> str:
    """Return an event as a line of `events.jsonl`."""
    encoded = EVENTS.encode(timed.event)
    document = {"event": encoded.pop("event"), "t": round(timed.t, 4), **encoded}
    return json.dumps(document, separators=(",", ":")) + "\n"


def read_events(lines: Iterable[str]) -> tuple[TimedEvent, ...]:
    """Return the events of all lines; a last line that is torn is left out.

    Raises:
        InputError: any other line is not an event, the first event is not a start, or the format
            is of another version.
    """
    texts = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
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
        found = repr(EVENTS.name_of(first)) if first else "no event at all"
        raise InputError(f"events.jsonl needs to begin with a start event, but got {found}")
    return tuple(events)


def _timed(document: Any, number: int) -> TimedEvent:
    t = document.pop("t", None) if isinstance(document, dict) else None
    try:
        version = document.get("version", VERSION) if isinstance(document, dict) else VERSION
        if version != VERSION:
            raise InputError(
                f"this meshmend reads events of version {VERSION}, but line {number} is of version "
                f"{version!r}; read it with the meshmend that wrote it"
            )
        event: Event = EVENTS.decode(document)
    except MessageError as error:
        raise InputError(f"events.jsonl, line {number}: {error}") from None
    if isinstance(t, bool) or not isinstance(t, int | float) or not 0 <= t < math.inf:
        raise InputError(
            f"events.jsonl, line {number}: an event needs t, seconds of zero or more, but got {t!r}"
        )
    return TimedEvent(float(t), event)
