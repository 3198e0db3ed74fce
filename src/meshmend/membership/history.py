"""Which state of a job counts: so that a history never forks and never silently begins anew.

A **generation** that got the word to begin may have taken steps that the coordinator never heard
of. So from that word on, the state that counts is the one of its members, until it is proved that
none of them took a step. That proof is a member that says it never was up to date in that
generation: a sum needs all members, so without this one no step was completed.

Knows statuses, not sockets or clocks. `CoordinatorRecord` is what a coordinator keeps on disk.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshmend.membership.generation import Generation, GenerationNumber
from meshmend.membership.job_fingerprint import JobFingerprint
from meshmend.membership.messages import FRESH, Status
from meshmend.net.codec import Codec, Count
from meshmend.net.listener import Address
from meshmend.topology.failures import Chip

Process = tuple[Chip, Address]  # one worker process: another of the same chip listens elsewhere


@dataclass(frozen=True)
class Begun:
    """A generation that got the word to begin, and the processes that were its members.

    `is_confirmed`: a worker was up to date in it, and the next generation went on from there.
    """

    number: GenerationNumber
    members: tuple[Process, ...]
    is_confirmed: bool = False


@dataclass(frozen=True)
class CoordinatorRecord:
    """What must outlive a coordinator.

    `begun` holds at most two generations: the one that began last, if it may have taken steps, and
    before it the one whose state it began with. `step` is the highest step that was heard of,
    `highest` the highest number that any generation had. `fingerprint` is what all workers have
    alike.
    """

    job: str
    begun: tuple[Begun, ...] = ()
    step: Count = 0
    highest: GenerationNumber = 0
    fingerprint: JobFingerprint | None = None


RECORDS = Codec("a coordinator's record", {"coordinator": CoordinatorRecord})


@dataclass
class History:
    """What is known of the state that counts."""

    record: CoordinatorRecord
    is_unknown: bool = False  # there was a coordinator before, and its record is lost

    @property
    def is_new(self) -> bool:
        """Whether no generation of the job has begun, as far as is known."""
        return not self.record.begun and not self.is_unknown

    @property
    def latest(self) -> int:
        """The state version that a worker needs so that its state counts; FRESH: any will do."""
        return self.record.begun[-1].number if self.record.begun else FRESH

    @property
    def step(self) -> int:
        """The highest step that was heard of."""
        return self.record.step

    def begin(self, generation: Generation, *, version: int, step: int) -> None:
        """Take in that a generation gets the word to begin, with the state of a version at a step.

        A version of FRESH is a new beginning, or one from a checkpoint. Should that take no step,
        the state that was lost before it is the one that counts again.
        """
        if version == FRESH:
            base = tuple(replace(begun, is_confirmed=True) for begun in self.record.begun[-1:])
        else:
            known = {begun.number: begun.members for begun in self.record.begun}
            base = (Begun(version, known.get(version, ()), is_confirmed=True),)
        members = tuple((seat.chip, seat.address) for seat in generation.seats)
        self.record = replace(
            self.record, begun=(*base, Begun(generation.number, members)), step=step
        )
        self.made(generation.number)
        self.is_unknown = False

    def made(self, number: int) -> None:
        """Take in the number of a generation that is to be formed."""
        self.record = replace(self.record, highest=max(self.record.highest, number))

    def hear(self, process: Process, status: Status) -> None:
        """Take in what a worker says of itself: it may prove that a generation took no step."""
        begun = self.record.begun
        if status.state_version > self.latest:
            # It is up to date in a generation of which this coordinator never heard that it began.
            begun = (Begun(status.state_version, (), is_confirmed=True),)
            highest = max(self.record.highest, status.state_version)
            self.record = replace(self.record, begun=begun, highest=highest)
        elif begun and _denies(process, status, begun[-1]):
            self.record = replace(self.record, begun=begun[:-1])
        if self.is_holder(status) and status.state_version != FRESH:
            self.hear_step(status.step)

    def hear_step(self, step: int) -> None:
        """Take in that a worker has finished a step."""
        if step > self.record.step:
            self.record = replace(self.record, step=step)

    def is_holder(self, status: Status) -> bool:
        """Whether a worker's state is the one that counts."""
        if self.is_unknown:
            return status.state_version != FRESH
        return status.state_version >= self.latest

    def is_stale(self, status: Status) -> bool:
        """Whether a worker holds a state that the others went on from without it."""
        return status.state_version != FRESH and status.state_version < self.latest

    def may_tell(self, process: Process) -> bool:
        """Whether a worker was a member of the latest generation: it holds its state, or denies."""
        begun = self.record.begun
        return bool(begun) and not begun[-1].is_confirmed and process in begun[-1].members

    def has_witness(self, workers: Iterable[tuple[Process, Status]]) -> bool:
        """Whether one of some workers holds the state that counts, or may prove another does."""
        return any(self.is_holder(status) or self.may_tell(who) for who, status in workers)


def _denies(process: Process, status: Status, begun: Begun) -> bool:
    """Whether a worker says that a generation of which it was a member took no step."""
    if begun.is_confirmed or process not in begun.members:
        return False
    if status.state_version >= begun.number:
        return False
    has_left = status.generation > begun.number
    has_given_up = status.generation == begun.number and not status.ready
    return has_left or has_given_up


def restorable(status: Status) -> tuple[int, int] | None:
    """Return the newest step that a worker can go back to, and its version: FRESH on disk."""
    own = (status.step, status.state_version) if status.state_version != FRESH else None
    saved = (status.checkpoint, FRESH) if status.checkpoint is not None else None
    return max((state for state in (own, saved) if state is not None), default=None)
