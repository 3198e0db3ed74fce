"""How long a job took to recover from each fault, measured from the coordinator's events.

Uses neither processes nor sockets. A fault is detected when, after it, a worker leaves or a
generation forms. The job has recovered when the last chip of the latest generation has finished its
first step.
"""

from dataclasses import dataclass, field

from meshmend.membership.events import (
    Event,
    FaultRecovered,
    GenerationBegan,
    GenerationForming,
    WorkerLeft,
    WorkerSaved,
    WorkerStepped,
    WorkerTurnedAway,
)
from meshmend.membership.faults.fault import FaultKind
from meshmend.topology.failures import Chip

_LOST_S = 1.0  # a report that is late by so much counts as lost


@dataclass
class Recovery:
    """A fault and how the job recovered from it; all times are of one clock.

    `kind` and `chips` are as in `FaultHappened`. A fault that `is_quiet` needs no new generation:
    the job has recovered from it at the next step. The same holds if no member was among its
    `victims`, the chips that the fault takes away. A repair returns the chips `repaired`, and is
    over when they are members again. `generation` is the one that the fault hit.
    """

    fault: str
    at_step: int
    at: float
    kind: FaultKind | None = None
    chips: tuple[Chip, ...] = ()
    is_quiet: bool = False
    victims: frozenset[Chip] = frozenset()
    repaired: frozenset[Chip] = frozenset()
    generation: int = 0
    detected: float | None = None
    bound: float | None = None  # the job had recovered at this time, perhaps before
    recovered: float | None = None

    @property
    def detected_s(self) -> float | None:
        return None if self.detected is None else max(0.0, self.detected - self.at)

    @property
    def recovered_s(self) -> float | None:
        return None if self.recovered is None else max(0.0, self.recovered - self.at)

    def event(self) -> FaultRecovered:
        """Return the event that reports this recovery."""
        return FaultRecovered(
            fault=self.fault,
            at_step=self.at_step,
            detected_s=_rounded(self.detected_s),
            recovered_s=_rounded(self.recovered_s),
            kind=self.kind,
            chips=self.chips,
        )


@dataclass
class Recoveries:
    """All faults of a run so far, and the generation that trains now."""

    faults: list[Recovery] = field(default_factory=list)
    _generation: int = 0
    _members: frozenset[Chip] = frozenset()
    _expected: set[Chip] = field(default_factory=set)
    _last: float = 0.0

    def add(self, fault: Recovery) -> None:
        """Begin to measure the recovery from a fault."""
        fault.generation = self._generation
        if fault.victims and self._members and not fault.victims & self._members:
            fault.is_quiet = True
        self.faults.append(fault)

    def open(self) -> list[Recovery]:
        """Return the faults that the job has not recovered from."""
        return [fault for fault in self.faults if fault.recovered is None and not fault.is_quiet]

    def handle(self, clock: float, event: Event) -> list[Recovery]:
        """Handle an event of the coordinator; return the faults that are recovered with it."""
        match event:
            case WorkerLeft() | GenerationForming() | WorkerTurnedAway():
                self._detect(clock)
            case GenerationBegan():
                self._generation = max(self._generation, event.number)
                self._members = frozenset(event.chips)
                self._expected = set(self._members)
                self._last = 0.0
            case WorkerSaved():
                return self._end_quiet(event.at)
            case WorkerStepped():
                return self._end_quiet(event.at) + self._handle_step(event)
        return []

    def _end_quiet(self, at: float) -> list[Recovery]:
        """Count the quiet faults before this time as recovered: a worker has worked since."""
        quiet = [
            fault
            for fault in self.faults
            if fault.is_quiet and fault.recovered is None and at > fault.at
        ]
        for fault in quiet:
            fault.detected = fault.recovered = at
        return quiet

    def _handle_step(self, event: WorkerStepped) -> list[Recovery]:
        self._generation = max(self._generation, event.generation)
        if not event.first:
            return self._handle_later_step(event.at, event.generation)
        self._expected.discard(event.chip)
        self._last = max(self._last, event.at)
        return [] if self._expected else self._recover(self._last)

    def _handle_later_step(self, at: float, generation: int) -> list[Recovery]:
        """Handle a later step: all chips took part, so each of them has finished its first step.

        Reports of first steps may be lost with a coordinator. If they do not come within `_LOST_S`,
        the later step counts instead.
        """
        for fault in self._ready(at):
            if fault.generation < generation and fault.bound is None:
                fault.bound = at
        over = [fault for fault in self._ready(at) if fault.bound and at > fault.bound + _LOST_S]
        for fault in over:
            fault.recovered = fault.bound
        return over

    def _detect(self, at: float) -> None:
        for fault in self.open():
            if fault.detected is None and at >= fault.at:
                fault.detected = at

    def _recover(self, at: float) -> list[Recovery]:
        over = self._ready(at)
        for fault in over:
            fault.recovered = at
        return over

    def _ready(self, at: float) -> list[Recovery]:
        """Return the open faults that the job recovers from if the first steps end at this time."""
        return [
            fault
            for fault in self.open()
            if fault.detected is not None
            and fault.detected <= at
            and fault.repaired <= self._members
        ]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
