"""Which workers fit a job: of the right mesh, with the same arguments, and with a possible status.

Knows messages, not connections. A peer that knows the secret may still be wrong, by mistake or on
purpose. What cannot be true is refused before anyone acts on it.
"""

from dataclasses import replace
from typing import Final

from meshmend.membership.events import Event, WorkerSaved, WorkerStepped, WriteFailed
from meshmend.membership.generation import LARGEST_NUMBER
from meshmend.membership.history import History
from meshmend.membership.job_fingerprint import JobFingerprint
from meshmend.membership.job_spec import JobSpec
from meshmend.membership.membership import UNHEARD, Membership
from meshmend.membership.messages import FRESH, Hello, Status
from meshmend.net.codec import shown
from meshmend.topology.failures import Chip

_MOST_OBSERVERS: Final = 32
_HIGHEST_BELIEVED: Final = LARGEST_NUMBER // 2  # so that a lie leaves numbers for the next ones


class Admission:
    """The workers that were let in, and the fingerprint that the next ones are compared with.

    The job's fingerprint is the one of its first worker. It is kept from the first generation on;
    before that it goes with the last worker that had it. A worker that holds a state knows better
    than those that are new.
    """

    def __init__(self, spec: JobSpec, history: History, membership: Membership) -> None:
        self._spec = spec
        self._history = history
        self._membership = membership
        self._hellos: dict[Chip, Hello] = {}
        self._is_proved = history.record.fingerprint is not None
        # Whether a coordinator before this one may have made generations that nobody told of.
        self._had_predecessor = bool(history.record.begun) or history.is_unknown

    def why_refused(self, hello: Hello) -> str:
        """Return why a worker that says hello cannot take part, or nothing."""
        chip, mesh = hello.chip, self._spec.mesh
        if hello.job != self._spec.job:
            return self._why_other_job(hello.job)
        if hello.shape != mesh.shape or chip not in mesh:
            return f"chip {chip} of mesh {hello.shape} is not of this mesh"
        if hello.memory is not None or hello.status.generation > self._history.record.highest:
            self._had_predecessor |= self._membership.generation is None
        if why := self._why_impossible(hello, hello.status):
            return why
        if hello.status.state_version != FRESH and hello.memory is None:
            return "it holds a state, and remembers no generation that it got it in"
        ours = self._history.record.fingerprint
        if ours is None or hello.fingerprint is None or self._knows_better(hello):
            return ""
        difference = ours.difference(hello.fingerprint)
        return f"chip {chip} refused: {difference}" if difference else ""

    def why_not_observe(self, job: str, n_observers: int) -> str:
        """Return why one more may not watch, or nothing."""
        if job != self._spec.job:
            return self._why_other_job(job)
        is_full = n_observers >= _MOST_OBSERVERS
        return f"it has {_MOST_OBSERVERS} observers already" if is_full else ""

    def why_impossible(self, chip: Chip, status: Status) -> str:
        """Return what cannot be true of the status of a worker that was let in, or nothing."""
        return self._why_impossible(self._hellos[chip], status)

    def _why_other_job(self, job: str) -> str:
        return f"it belongs to job {shown(job)}, this is {self._spec.job!r}"

    def _why_impossible(self, hello: Hello, status: Status) -> str:
        chip = hello.chip
        strange = [peer for peer in status.lost if peer == chip or peer not in self._spec.mesh]
        if strange:
            return f"chip {chip} lost {strange[0]}, which is no peer"
        number, record = max(status.generation, status.state_version), self._history.record
        believed = record.highest + (UNHEARD if self._had_predecessor else 0)
        if not self._membership.knows_all:
            believed = _HIGHEST_BELIEVED
        if number > believed:
            return f"it speaks of generation {number}, and the highest was {record.highest}"
        latest = record.begun[-1] if record.begun else None
        if latest is None or not latest.members or status.state_version != latest.number:
            return ""
        if (chip, hello.address) in latest.members:
            return ""
        return f"it holds the state of generation {latest.number}, and was no member of it"

    def admit(self, hello: Hello) -> tuple[tuple[Chip, str], ...]:
        """Take a worker in; return those that now turn out to be wrong, and why."""
        theirs = hello.fingerprint
        wrong = []
        if theirs is not None:
            if self._history.record.fingerprint is None or self._knows_better(hello):
                self._keep(theirs)
                for chip, other in self._hellos.items():
                    if other.fingerprint and (why := theirs.difference(other.fingerprint)):
                        wrong.append((chip, f"chip {chip} refused: {why}"))
            self._is_proved |= hello.status.state_version != FRESH
        self._hellos[hello.chip] = hello
        return tuple(wrong)

    def begun(self) -> None:
        """Take in that a generation begins: from now on the fingerprint stays."""
        self._is_proved |= self._history.record.fingerprint is not None

    def leave(self, chip: Chip) -> None:
        """Take in that a worker is gone."""
        self._hellos.pop(chip, None)
        if not self._is_proved and not any(each.fingerprint for each in self._hellos.values()):
            self._keep(None)

    def _knows_better(self, hello: Hello) -> bool:
        return hello.status.state_version != FRESH and not self._is_proved

    def _keep(self, fingerprint: JobFingerprint | None) -> None:
        self._history.record = replace(self._history.record, fingerprint=fingerprint)


def is_own_report(event: Event, chip: Chip) -> bool:
    """Whether an event is one that a worker may tell of itself."""
    return isinstance(event, WorkerStepped | WorkerSaved | WriteFailed) and event.chip == chip
