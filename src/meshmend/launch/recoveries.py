"""How long a job took to recover from each fault, measured from the coordinator's events.

Events in, times out; knows neither processes nor sockets. A fault is detected when a worker leaves
or a generation forms after it. The job has recovered when the last chip of the latest generation
has finished its first step.
"""

from dataclasses import dataclass, field

from meshmend.faults.fault import FaultKind
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
from meshmend.topology.failures import Chip

_LOST_S = 1.0  # a report that has not come for so long will not come


@dataclass
class Recovery:
    """A fault and how the job recovered from it; all times are of one clock.

    `kind` and `chips` are as in `FaultHappened`. A fault that `is_quiet` needs no new generation:
    the next step ends it. So does it end one whose `victims` were not members. `back` are the chips
    of a repair, which ends when they are members again. `generation` is the one that the fault hit.
    """

    fault: str
    at_step: int
    at: float
    kind: FaultKind | None = None
    chips: tuple[Chip, ...] = ()
    is_quiet: bool = False
    victims: frozenset[Chip] = frozenset()
    back: frozenset[Chip] = frozenset()
    generation: int = 0
    detected: float | None = None
    bound: float | None = None  # when it was over at the latest
    recovered: float | None = None

    @property
    def detected_s(self) -> float | None:
        return None if self.detected is None else max(0.0, self.detected - self.at)

    @property
    def recovered_s(self) -> float | None:
        return None if self.recovered is None else max(0.0, self.recovered - self.at)

    def event(self) -> FaultRecovered:
        """Return what a run writes down of it."""
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
    """All faults of a run so far."""

    faults: list[Recovery] = field(default_factory=list)
    _number: int = 0
    _members: frozenset[Chip] = frozenset()
    _expected: set[Chip] = field(default_factory=set)
    _last: float = 0.0

    def happened(self, fault: Recovery) -> None:
        """Begin to measure a fault."""
        fault.generation = self._number
        if fault.victims and self._members and not fault.victims & self._members:
            fault.is_quiet = True
        self.faults.append(fault)

    def open(self) -> list[Recovery]:
        """Return the faults that the job has not recovered from."""
        return [fault for fault in self.faults if fault.recovered is None and not fault.is_quiet]

    def take(self, clock: float, event: Event) -> list[Recovery]:
        """Take an event of the coordinator; return the faults that the job is over with it."""
        match event:
            case WorkerLeft() | GenerationForming() | WorkerTurnedAway():
                self._detect(clock)
            case GenerationBegan():
                self._number = max(self._number, event.number)
                self._members = frozenset(event.chips)
                self._expected = set(self._members)
                self._last = 0.0
            case WorkerSaved():
                return self._end_quiet(event.at)
            case WorkerStepped():
                return self._end_quiet(event.at) + self._take_step(event)
        return []

    def _end_quiet(self, at: float) -> list[Recovery]:
        """End the quiet faults that happened before this sign of life."""
        quiet = [
            fault
            for fault in self.faults
            if fault.is_quiet and fault.recovered is None and at > fault.at
        ]
        for fault in quiet:
            fault.detected = fault.recovered = at
        return quiet

    def _take_step(self, event: WorkerStepped) -> list[Recovery]:
        self._number = max(self._number, event.generation)
        if not event.first:
            return self._bound(event.at, event.generation)
        self._expected.discard(event.chip)
        self._last = max(self._last, event.at)
        return [] if self._expected else self._recover(self._last)

    def _bound(self, at: float, generation: int) -> list[Recovery]:
        """Take a later step of a generation: all chips took part, so each has finished its first.

        Reports of those first steps that do not come were lost with a coordinator.
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
        """Return the open faults that end with a first step at this time."""
        return [
            fault
            for fault in self.open()
            if fault.detected is not None and fault.detected <= at and fault.back <= self._members
        ]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
