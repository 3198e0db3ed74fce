"""Decides which workers may join a job: right mesh, same arguments, and a possible status.

Knows messages, not connections. A worker that knows the secret may still send wrong values, by
mistake or on purpose. The coordinator refuses impossible values before it acts on them.
"""

from typing import Final

from msgspec.structs import replace

from meshmend.errors import TopologyError
from meshmend.membership.events import (
    ChipRestored,
    ChipSlow,
    Event,
    FabricMeasured,
    LinkRestored,
    LinkSlow,
    NonFiniteSum,
    StateMended,
    StatesDiffer,
    WorkerSaved,
    WorkerStepped,
    WriteFailed,
    WrongResult,
    WrongSum,
)
from meshmend.membership.generation import LARGEST_NUMBER
from meshmend.membership.history import History
from meshmend.membership.job import JobFingerprint, JobSpec
from meshmend.membership.membership import UNHEARD_GENERATIONS, Membership
from meshmend.membership.messages import FRESH, Hello, Status
from meshmend.topology.failures import Chip, format_shape
from meshmend.topology.text import parse_tile
from meshmend.transport.codec import shown

_MOST_OBSERVERS: Final = 32
_HIGHEST_BELIEVED: Final = LARGEST_NUMBER // 2  # a false number leaves room for later generations
_START_ANEW: Final = "start its worker again, without that state"


class Admission:
    """Keeps the hellos of the admitted workers and the fingerprint that later workers must match.

    The job's fingerprint is that of its first worker, which has the coordinator's version. Once a
    generation has begun, it is fixed. Before that, it is dropped when the last worker that has one
    leaves. A worker that holds a state replaces a fingerprint that is not fixed yet: it has
    trained, and the new workers have not.
    """

    def __init__(self, spec: JobSpec, history: History, membership: Membership) -> None:
        self._spec = spec
        self._history = history
        self._membership = membership
        self._hellos: dict[Chip, Hello] = {}
        self._is_fixed = history.record.fingerprint is not None
        # Whether an earlier coordinator may have made generations that no worker has reported.
        self._had_predecessor = bool(history.record.begun) or history.is_unknown

    def why_refused(self, hello: Hello) -> str:
        """Return why the sender of a hello cannot join, or an empty text if it can."""
        chip, mesh = hello.chip, self._spec.mesh
        if hello.job != self._spec.job:
            return self._why_other_job(hello.job)
        if hello.shape != mesh.shape or chip not in mesh:
            return f"chip {chip} of mesh {hello.shape} is not in this job's mesh {mesh.shape}"
        if hello.memory is not None or hello.status.generation > self._history.record.highest:
            self._had_predecessor |= self._membership.generation is None
        if why := self._why_impossible(hello, hello.status):
            return why
        if hello.status.state_version != FRESH and hello.memory is None:
            return "it holds a state, but names no generation in which it got that state"
        if hello.fingerprint is not None and (why := self._why_no_tile(hello.fingerprint.tile)):
            return why
        ours, theirs = self._history.record.fingerprint, hello.fingerprint
        if theirs is None or self._sets_fingerprint(hello):
            return ""
        if ours is None:  # it is the first: all others will have to have its version
            ours = replace(theirs, version=self._spec.version or theirs.version)
        if not (difference := ours.difference(theirs)):
            return ""
        first = next((each for each, said in self._hellos.items() if said.fingerprint), None)
        who = "its coordinator says" if first is None else f"on chip {first}"
        return f"chip {chip} refused: {difference}, as {who}"

    def why_observer_refused(self, job: str, n_observers: int) -> str:
        """Return why one more observer cannot join, or an empty text if it can."""
        if job != self._spec.job:
            return self._why_other_job(job)
        is_full = n_observers >= _MOST_OBSERVERS
        return f"the coordinator already has {_MOST_OBSERVERS} observers" if is_full else ""

    @property
    def fingerprints(self) -> dict[Chip, JobFingerprint | None]:
        """The arguments of each admitted worker; None where it sent none."""
        return {chip: hello.fingerprint for chip, hello in self._hellos.items()}

    def why_asker_refused(self, job: str | None) -> str:
        """Return why someone who asks for the status gets none, or an empty text."""
        return self._why_other_job(job) if job is not None and job != self._spec.job else ""

    def why_impossible(self, chip: Chip, status: Status) -> str:
        """Return why an admitted worker's status is impossible, or an empty text if it is not."""
        return self._why_impossible(self._hellos[chip], status)

    def _why_no_tile(self, tile: str) -> str:
        """Return why a job cannot have such tiles, or an empty text if it can."""
        if not tile:
            return ""
        shape, mesh = self._spec.mesh.shape, format_shape(self._spec.mesh.shape)
        try:
            extents = parse_tile(tile)
        except TopologyError:
            return f"a tile needs extents such as 2x2, but it names {shown(tile)}"
        if len(extents) > len(shape) or any(n > of for n, of in zip(extents, shape, strict=False)):
            return f"a tile of {format_shape(extents)} does not fit the mesh {mesh}; take another"
        return ""

    def _why_other_job(self, job: str) -> str:
        return f"it belongs to job {shown(job)}, but this coordinator serves job {self._spec.job!r}"

    def _why_impossible(self, hello: Hello, status: Status) -> str:
        chip = hello.chip
        strange = [peer for peer in status.lost if peer == chip or peer not in self._spec.mesh]
        if strange:
            return f"chip {chip} lost {strange[0]}, which is not its peer"
        number, record = max(status.generation, status.state_version), self._history.record
        believed = record.highest + (UNHEARD_GENERATIONS if self._had_predecessor else 0)
        if not self._membership.knows_all:
            believed = _HIGHEST_BELIEVED
        if number > believed:
            highest = f"it reports generation {number}, but the highest so far is {record.highest}"
            return f"{highest}; {_START_ANEW}"
        latest = record.begun[-1] if record.begun else None
        if latest is None or not latest.members or status.state_version != latest.number:
            return ""
        if latest.has_member((chip, hello.address)) or not self._history.contains(status):
            return ""  # a state of another coordinator's term is dropped, with an event
        held = f"it holds the state of generation {latest.number}, but was not a member of it"
        return f"{held}; {_START_ANEW}"

    def admit(self, hello: Hello) -> tuple[tuple[Chip, str], ...]:
        """Admit a worker; return the admitted chips that must now be refused, and why."""
        theirs = hello.fingerprint
        wrong = []
        if theirs is not None:
            if self._history.record.fingerprint is None or self._sets_fingerprint(hello):
                self._keep(theirs)
                for chip, other in self._hellos.items():
                    if other.fingerprint and (why := theirs.difference(other.fingerprint)):
                        refused = f"chip {chip} refused: {why}, as on chip {hello.chip}"
                        wrong.append((chip, refused))
            self._is_fixed |= hello.status.state_version != FRESH
        self._hellos[hello.chip] = hello
        return tuple(wrong)

    def generation_began(self) -> None:
        """Record that a generation begins: from now on the fingerprint is fixed."""
        self._is_fixed |= self._history.record.fingerprint is not None

    def leave(self, chip: Chip) -> None:
        """Record that a worker has left."""
        self._hellos.pop(chip, None)
        if not self._is_fixed and not any(each.fingerprint for each in self._hellos.values()):
            self._keep(None)

    def _sets_fingerprint(self, hello: Hello) -> bool:
        return hello.status.state_version != FRESH and not self._is_fixed

    def _keep(self, fingerprint: JobFingerprint | None) -> None:
        self._history.record = replace(self._history.record, fingerprint=fingerprint)


def is_own_report(event: Event, chip: Chip) -> bool:
    """Whether a worker may report this event: of an allowed kind, and as its own chip."""
    told_by = WrongResult | StateMended | LinkSlow | LinkRestored | ChipSlow | ChipRestored
    told_by |= FabricMeasured
    if isinstance(event, told_by):
        return event.by == chip
    kinds = WorkerStepped | WorkerSaved | WriteFailed | NonFiniteSum | StatesDiffer | WrongSum
    return isinstance(event, kinds) and event.chip == chip
