"""How a job is now, as a value: what `meshmend status` shows and the metrics count.

Either the coordinator answers, or a worker, which knows less. All times are ages in seconds, so
that two hosts with different clocks understand each other. Knows no sockets and no clock.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from msgspec.structs import replace

from meshmend.membership.events import ChipCoordinates, Event, FabricMeasured
from meshmend.membership.generation import Generation, GenerationNumber
from meshmend.membership.job import JobFingerprint
from meshmend.transport.codec import Count, Finite, Seconds, Value
from meshmend.transport.listener import Address

# By default loops report their positions twice a second: one that is behind for less may just be
# late. Where heartbeats are rare, a coordinator waits for two of them.
BEHIND_S: Final = 1.0

RECOVERY_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class JobPhase(StrEnum):
    """What a job does now."""

    GATHERING = "gathering"  # it waits for its first workers
    PREPARING = "preparing"  # a generation is formed, but not all its members are ready
    TRAINING = "training"
    STATE_LOST = "state lost"  # no connected worker holds the state that counts
    OVER = "over"
    FAILED = "failed"


class ChangeCause(StrEnum):
    """What began a change of the chips that train."""

    LEFT = "left"  # a worker left
    CONNECTED = "connected"  # a worker connected, and none had left
    LINKS = "links"  # a link was cut or repaired


class FinishedChange(Value, frozen=True):
    """A change that is over: every chip of the new generation has finished a step.

    `took_s` counts from the first worker that left, else from the last that connected.
    """

    cause: ChangeCause
    took_s: Seconds
    chips: Count
    step: Count
    generation: GenerationNumber


class PastChange(Value, frozen=True):
    """A change of the chips that train, and how long ago it was over."""

    ago_s: Seconds
    change: FinishedChange


class PastEvent(Value, frozen=True):
    """An event, and how long ago it happened."""

    ago_s: Seconds
    event: Event


class WorkerSummary(Value, frozen=True):
    """One connected worker: where it listens, and where its loop is.

    `generation` is the one that it was last up to date in, `step` its last finished step, `begun`
    the step whose sum its loop has begun, and `still_s` how long ago that was. `behind_s`: how
    long it has kept the others waiting; None if it is not behind.
    """

    chip: ChipCoordinates
    address: Address
    generation: GenerationNumber | None
    step: Count
    begun: Count = 0
    connected_s: Seconds | None = None
    still_s: Seconds | None = None
    behind_s: Seconds | None = None
    finished: bool = False


class ChipsWait(Value, frozen=True):
    """Chips that wait: `awaited` are the chips that they wait for, none if it is no chip."""

    chips: tuple[ChipCoordinates, ...]
    awaited: tuple[ChipCoordinates, ...]
    why: str
    since_s: Seconds | None = None


class SharedArguments(Value, frozen=True):
    """The arguments that these chips' workers were started with."""

    fingerprint: JobFingerprint
    chips: tuple[ChipCoordinates, ...]


class SlowPart(Value, frozen=True):
    """A chip or link that is slower than the others: `chip 0,1` or `link:0,1-0,2`.

    `speed` is the part that it has of their speed.
    """

    what: str
    speed: Finite


class JobCounts(Value, frozen=True):
    """What a coordinator has counted since it began; all zero where a worker answers.

    `recoveries` has one count per bucket of `RECOVERY_BUCKETS_S`, and one above the last bucket:
    changes that began with a worker that left, by the time that they took.
    """

    steps: Count = 0
    samples: Count = 0
    arrivals: Count = 0
    departures: Count = 0
    turned_away: Count = 0
    refusals: Count = 0
    states_lost: Count = 0
    restores: Count = 0
    redone_steps: Count = 0
    recoveries: tuple[Count, ...] = (0,) * (len(RECOVERY_BUCKETS_S) + 1)
    recovery_s: Seconds = 0.0


class JobStatus(Value, frozen=True):
    """How a job is now; `answered_by` is the chip of the worker that says so, else None.

    `version` and `uptime_s` are those of the process that answers. `step` is the last one that is
    known to be finished, `step_ago_s` how long ago that became known. `planned`: how many losses of
    a board have plans, and of how many. `coordinator_lost_s`: how long the worker that answers has
    had no coordinator. `fabric`: what the chips have measured, if they did.
    """

    job: str
    version: str
    shape: tuple[Count, ...]
    phase: JobPhase
    uptime_s: Seconds
    step: Count
    answered_by: ChipCoordinates | None = None
    generation: Generation | None = None
    step_ago_s: Seconds | None = None
    steps_per_s: Seconds | None = None
    samples_per_s: Seconds | None = None
    planned: tuple[Count, Count] | None = None
    coordinator_lost_s: Seconds | None = None
    failure: str = ""
    waits: tuple[ChipsWait, ...] = ()
    workers: tuple[WorkerSummary, ...] = ()
    arguments: tuple[SharedArguments, ...] = ()
    events: tuple[PastEvent, ...] = ()
    changes: tuple[PastChange, ...] = ()
    counts: JobCounts = JobCounts()
    slow: tuple[SlowPart, ...] = ()
    fabric: FabricMeasured | None = None

    @property
    def n_steps(self) -> int | None:
        """How many steps make up the job; None if no worker has said so."""
        return self.arguments[0].fingerprint.steps if self.arguments else None

    @property
    def members(self) -> tuple[ChipCoordinates, ...]:
        """The chips of the latest generation."""
        return self.generation.chips if self.generation else ()

    @property
    def waiting(self) -> tuple[ChipCoordinates, ...]:
        """The chips of connected workers that are no members."""
        members = set(self.members)
        return tuple(each.chip for each in self.workers if each.chip not in members)


def shared_arguments(
    fingerprints: Mapping[ChipCoordinates, JobFingerprint | None],
) -> tuple[SharedArguments, ...]:
    """Return the arguments of all chips, grouped; the largest group first."""
    chips_of: dict[JobFingerprint, list[ChipCoordinates]] = {}
    for chip, fingerprint in sorted(fingerprints.items()):
        if fingerprint is not None:
            chips_of.setdefault(fingerprint, []).append(chip)
    groups = sorted(chips_of.items(), key=lambda group: -len(group[1]))
    return tuple(SharedArguments(fingerprint, tuple(chips)) for fingerprint, chips in groups)


def loop_waits(workers: Iterable[WorkerSummary]) -> tuple[ChipsWait, ...]:
    """Return who waits for workers whose loops are behind, one entry for all of them."""
    listed = tuple(workers)
    behind = {each.chip: each.behind_s for each in listed if (each.behind_s or 0.0) >= BEHIND_S}
    others = tuple(each.chip for each in listed if each.behind_s is None)
    if not behind or not others:
        return ()
    since_s = max(seconds for seconds in behind.values() if seconds is not None)
    return (ChipsWait(others, tuple(behind), "the sum needs the gradients of all", since_s),)


def merged(first: JobStatus, others: Iterable[JobStatus]) -> JobStatus:
    """Return the status that several workers of a job know together; `first` has the generation.

    A worker alone does not know how far the others are. Together they show who is behind: a chip
    whose loop has not moved for a while, and that has not begun a sum that another chip has.
    """
    answers = (first, *others)
    found = {each.chip: each for answer in answers for each in answer.workers}
    summaries = [found[chip] for chip in sorted(found)]
    furthest = max((each.step for each in summaries), default=0)
    newest = max((each.begun for each in summaries), default=0)
    workers = tuple(
        replace(each, behind_s=each.still_s) if each.begun < newest else each for each in summaries
    )
    fingerprints = {
        chip: group.fingerprint
        for answer in answers
        for group in answer.arguments
        for chip in group.chips
    }
    is_stepping = all(answer.phase is not JobPhase.PREPARING for answer in answers)
    known = [answer.step_ago_s for answer in answers if answer.step == furthest]
    return replace(
        first,
        phase=first.phase if is_stepping else JobPhase.PREPARING,
        step=furthest,
        step_ago_s=min((each for each in known if each is not None), default=None),
        workers=workers,
        waits=(*(wait for answer in answers for wait in answer.waits), *loop_waits(workers)),
        arguments=shared_arguments(fingerprints),
    )
