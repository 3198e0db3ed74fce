"""Decides which state of a job counts, so that training never forks or silently starts over.

A **generation** that got its go message may have taken steps that the coordinator does not know of.
So from then on the state that counts is that of its members, until it is proved that they took no
step. The proof is a member whose status says that it was never up to date in that generation. A
sum needs all members, so without this one no step was completed.

Knows statuses, not sockets or clocks. `CoordinatorRecord` is what a coordinator keeps on disk.
"""

from dataclasses import dataclass, field
from functools import cached_property

from msgspec.structs import replace

from meshmend.membership.generation import Generation, GenerationNumber, Term, term_after
from meshmend.membership.job import JobFingerprint
from meshmend.membership.messages import FRESH, StateVersion, Status
from meshmend.topology.failures import Chip, Link
from meshmend.transport.codec import Count, Value
from meshmend.transport.listener import Address

Process = tuple[Chip, Address]  # one worker process; a second one of this chip has another address


class BegunGeneration(Value, frozen=True, dict=True):
    """A generation that got its go message, and the processes that were its members.

    `is_confirmed`: a worker was up to date in it, and the next generation continued from its state.
    It began with the state that generation `base` had after `step`; `is_restored`: it was read from
    a checkpoint. `until`: the step with whose state the next generation began.
    """

    number: GenerationNumber
    members: tuple[Process, ...]
    is_confirmed: bool = False
    base: StateVersion = FRESH
    step: Count = 0
    is_restored: bool = False
    term: Term = 0
    until: Count | None = None

    @cached_property
    def _members(self) -> frozenset[Process]:
        return frozenset(self.members)

    @property
    def has_base(self) -> bool:
        """Whether it began with a state of another generation."""
        return self.base != FRESH and not self.is_restored

    def has_member(self, process: Process) -> bool:
        """Whether a process was a member."""
        return process in self._members


class VoidGeneration(Value, frozen=True):
    """A generation that took no step: whoever was up to date in it holds what it began with.

    That state counts as `version`. One that was read from a checkpoint counts as that of its own
    generation, until a generation begins with another state; from then on it is FRESH. So is one
    whose steps were given up, because the job went on with the state of a generation before it.
    """

    number: GenerationNumber
    version: StateVersion


class CoordinatorRecord(Value, frozen=True, tag_field="kind", tag="coordinator"):
    """What a coordinator saves for the next coordinator of its job.

    `begun` holds at most two generations: last, the latest to begin, if it may have taken steps;
    before it, the one whose state it began with. `void` holds the generations since then that took
    no step, or whose steps were given up. `step` is the highest step that a worker reported.
    `highest` is the highest generation number in use. All workers have the same `fingerprint`.
    `term` is the coordinator's. `lineage` holds the terms before it, each with the highest of its
    generations that belong to this history. `formed` is the latest generation that was formed:
    workers only name it.
    `is_unknown`: the record before this one could not be read, or was lost, and no generation has
    begun since: a state exists, but it is not known which.
    `cut_on_purpose`: the links that the user has cut and not mended.
    """

    job: str
    begun: tuple[BegunGeneration, ...] = ()
    step: Count = 0
    highest: GenerationNumber = 0
    fingerprint: JobFingerprint | None = None
    void: tuple[VoidGeneration, ...] = ()
    term: Term = 0
    lineage: tuple[tuple[Term, GenerationNumber], ...] = ()
    is_unknown: bool = False
    formed: Generation | None = None
    cut_on_purpose: tuple[Link, ...] = ()


@dataclass
class History:
    """What the coordinator knows about the state that counts.

    `is_restarted`: no worker of the recorded run is left, so that nobody waits for one; without a
    checkpoint the job begins again. `is_committed`: this coordinator has begun a generation, or
    gone on with one. From then on a state of another coordinator's term that it does not know of
    counts no more.
    `dropped`: the terms and steps that it took back from its own record for a later term's.
    """

    record: CoordinatorRecord
    is_restarted: bool = False
    is_committed: bool = False
    dropped: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_unknown(self) -> bool:
        """Whether a state exists of which it is not known which one it is."""
        return self.record.is_unknown

    @property
    def is_new(self) -> bool:
        """Whether no generation of the job has begun, as far as is known."""
        return not self.record.begun and not self.is_unknown

    @property
    def _has_parts(self) -> bool:
        """Whether each worker holds a part of the state."""
        ours = self.record.fingerprint
        return ours is not None and bool(ours.tile)

    @property
    def latest(self) -> int:
        """The state version that a holder must have; FRESH means that any version will do."""
        return self.record.begun[-1].number if self.record.begun else FRESH

    @property
    def step(self) -> int:
        """The highest step that a worker reported."""
        return self.record.step

    def begin(self, generation: Generation, *, version: int, step: int) -> None:
        """Record that a generation gets its go message, with this state version and step.

        FRESH means a new start, or a start from a checkpoint. If that generation takes no step, the
        state that was lost before it counts again; once a generation begins with that one, the
        state from the checkpoint counts no more.
        """
        is_restored = version == FRESH and not self.is_new
        void = tuple(map(_superseded, self._void_except(version)))
        if version != FRESH:  # what a generation after that one did was given up
            given_up = (each.number for each in self.record.begun if each.number > version)
            void = (*void, *(VoidGeneration(number, FRESH) for number in given_up))
        if version == FRESH:
            version = self.latest  # a checkpoint holds an earlier state of the latest generation
        known = {begun.number: begun for begun in self.record.begun}
        before = () if version == FRESH else (known.get(version, BegunGeneration(version, ())),)
        until = None if is_restored else step
        members = tuple((seat.chip, seat.address) for seat in generation.seats)
        begun = (
            *(replace(each, is_confirmed=True, until=until) for each in before),
            BegunGeneration(
                generation.number,
                members,
                base=version,
                step=step,
                is_restored=is_restored,
                term=generation.term,
            ),
        )
        void = tuple(each for each in void if each.number > begun[0].base)  # others never count
        self.record = replace(self.record, begun=begun, void=void, step=step, is_unknown=False)
        self.use_number(generation.number)
        self.is_restarted, self.is_committed = False, True

    def take_term(self, known: int, token: int) -> None:
        """Take a term that is higher than this one and than those of all earlier coordinators."""
        before, lineage = self.record, self.record.lineage
        # One that was formed but, for all that is recorded, never began has no state in it.
        began = [begun.number for begun in before.begun] + [void.number for void in before.void]
        if began:
            until = {**dict(lineage), before.term: max(began)}
            lineage = tuple(until.items())
        term = term_after(max(known, before.term), token)
        self.record = replace(before, term=term, lineage=lineage)

    def contains(self, status: Status) -> bool:
        """Whether a worker's state was made by a generation that belongs to this history."""
        if status.state_version == FRESH or status.term in (0, self.record.term):
            return True
        return status.state_version <= dict(self.record.lineage).get(status.term, FRESH)

    def _adopt(self, status: Status) -> None:
        """Make a state the one that counts that a coordinator made which this one knows not of."""
        begun, version = self.record.begun, status.state_version
        known = dict(self.record.lineage)
        if begun and begun[-1].term != status.term:
            self.dropped.append((begun[-1].term, self.record.step))
        is_same = status.term in known or not begun or begun[-1].term == status.term
        lineage = {**(known if is_same else {}), status.term: version}
        self.record = replace(
            self.record,
            begun=(BegunGeneration(version, (), is_confirmed=True, term=status.term),),
            highest=max(self.record.highest, version),
            void=(),
            lineage=tuple(lineage.items()),
            step=status.step,
        )

    def use_number(self, number: int) -> None:
        """Record that a generation is formed with this number, so that no other one gets it."""
        self.record = replace(self.record, highest=max(self.record.highest, number))

    def update(self, process: Process, status: Status) -> None:
        """Record a worker's status; it may prove that the latest generation took no step."""
        if not self.contains(status) and not self.is_committed:
            latest = self.record.begun[-1] if self.record.begun else None
            state = status.term, status.state_version
            if latest is None or state > (latest.term, latest.number):
                self._adopt(status)
        begun, version = self.record.begun, self.version_of(status)
        if version > self.latest:
            # It is up to date in a generation whose begin this coordinator does not know of.
            begun = (BegunGeneration(version, (), is_confirmed=True, term=status.term),)
            highest, void = max(self.record.highest, version), self._void_except(version)
            # Its steps are counted from its state: it may have gone back to a checkpoint.
            self.record = replace(
                self.record, begun=begun, highest=highest, void=void, step=status.step
            )
        elif begun and _proves_no_step(process, status, begun[-1], has_part=self._has_parts):
            void = self.record.void
            # Without a base there is no other state that could count. But where chips hold parts of
            # a state, those that began and those that did not must go on together.
            if begun[-1].base != FRESH or self._has_parts:
                void = (*void, _void(begun[-1]))
            self.record = replace(self.record, begun=begun[:-1], void=void)
        if self.is_new and status.generation > self.record.highest and status.step > 0:
            # It has trained, and lacks a part of its state.
            self.record = replace(self.record, is_unknown=True)
        if self.is_holder(status) and self.version_of(status) != FRESH:
            latest = self.record.begun[-1] if self.record.begun else None
            # The steps after it were given up: whoever has done them is not waited for.
            if latest is None or latest.until is None or status.step <= latest.until:
                self.update_step(status.step)

    def update_step(self, step: int) -> None:
        """Record that a worker has finished a step."""
        if step > self.record.step:
            self.record = replace(self.record, step=step)

    def version_of(self, status: Status) -> int:
        """Return the state version that a worker's state counts as; FRESH in another history."""
        if not self.contains(status):
            return FRESH
        counts_as = {each.number: each.version for each in self.record.void}
        return counts_as.get(status.state_version, status.state_version)

    def _void_except(self, version: int) -> tuple[VoidGeneration, ...]:
        return tuple(each for each in self.record.void if each.number != version)

    def is_holder(self, status: Status) -> bool:
        """Whether a worker's state is the one that counts."""
        version = self.version_of(status)
        is_state = version != FRESH or not self.is_unknown
        return is_state and version >= self.latest  # of an unknown history, the newest seen so far

    def wait_s(self, timeout_s: float) -> float:
        """Return how long to wait for a holder: not at all if no worker of the run is left."""
        return 0.0 if self.is_restarted else timeout_s

    def why_waiting(self, timeout_s: float) -> str:
        """Return why a worker waits while no connected one is a holder."""
        lost = f"no connected chip holds the state after step {self.step}"
        return f"{lost}; waiting {timeout_s:g} s for one that does"

    def why_lost(self, timeout_s: float) -> str:
        """Return why the job fails after it has waited for a holder."""
        lost = f"no chip that is left holds the state after step {self.step}"
        return f"{lost}, none came back within {timeout_s:g} s, and there is no complete checkpoint"

    def restorable(self, status: Status) -> tuple[tuple[int, int], ...]:
        """Return the steps that a worker can go back to, each with its state version.

        The version is FRESH if the step is that of a checkpoint, or of its initial state after a
        restart of the whole job. Empty: it has no state at all.
        A worker that the others went on without holds an earlier state of the job only up to the
        step that they went on from. What it did after that step, they did again.
        """
        version = self.version_of(status)
        until = [begun.step for begun in self.record.begun if version == begun.base != FRESH]
        is_holder = version != FRESH and self.is_holder(status)
        found = [
            (step, version)
            for step in _steps_of(status)
            if is_holder or any(step <= last for last in until)
        ]
        # What a generation began with is still what its base had. Parts of both make one state.
        found += [
            (begun.step, begun.base)
            for begun in self.record.begun
            if version == begun.number and begun.step in _steps_of(status) and begun.has_base
        ]
        if status.checkpoint is not None:
            found.append((status.checkpoint, FRESH))
        if self.is_restarted and status.state_version == FRESH:
            found.append((status.step, FRESH))
        return tuple(found)

    def states_of(self, status: Status) -> tuple[tuple[int, int], ...]:
        """Return the states that a worker holds: as which version it counts, and the step."""
        version = self.version_of(status)
        return tuple((version, step) for step in _steps_of(status))

    def is_witness(self, process: Process) -> bool:
        """Whether a worker was a member of the latest generation, which is not yet confirmed.

        It either holds the state of that generation or can prove that it took no step.
        """
        begun = self.record.begun
        return bool(begun) and not begun[-1].is_confirmed and begun[-1].has_member(process)

    def knows_state(self, process: Process, status: Status) -> bool:
        """Whether a worker holds the state that counts, or can prove which state does."""
        return self.is_holder(status) or self.is_witness(process)

    def may_deny(self, process: Process, status: Status) -> bool:
        """Whether a worker may come to prove that the latest generation took no step."""
        return self.is_witness(process) and not self.is_holder(status)

    def may_move(self, process: Process, status: Status) -> bool:
        """Whether a worker may hold another state now than it has said: while it may step."""
        is_stepping = status.ready and status.generation == status.state_version != FRESH
        return is_stepping or self.may_deny(process, status)

    def has_base(self, process: Process, status: Status) -> bool:
        """Whether a worker knows the state that counts if the latest generation took no step."""
        begun = self.record.begun
        is_base = bool(begun) and self.version_of(status) == begun[-1].base != FRESH
        return is_base or self.is_witness(process)


def _steps_of(status: Status) -> tuple[int, ...]:
    return (status.step,) if status.also is None else (status.step, status.also)


def _void(begun: BegunGeneration) -> VoidGeneration:
    """Return a generation that took no step."""
    return VoidGeneration(begun.number, begun.number if begun.is_restored else begun.base)


def _superseded(void: VoidGeneration) -> VoidGeneration:
    """Return a generation that took no step after another one has begun with another state."""
    return replace(void, version=FRESH) if void.version == void.number else void


def _proves_no_step(
    process: Process, status: Status, begun: BegunGeneration, *, has_part: bool
) -> bool:
    """Whether a member's status proves that its generation took no step.

    It was never up to date in it; or it was, holds a part of the state, and has tried no step: a
    step counts when all have tried it.
    """
    has_begun = status.state_version == begun.number and status.step == begun.step
    has_tried_none = has_part and has_begun and status.also is None
    if begun.is_confirmed or (status.state_version >= begun.number and not has_tried_none):
        return False
    has_left = status.generation > begun.number
    has_given_up = status.generation == begun.number and not status.ready
    return (has_left or has_given_up) and begun.has_member(process)
