"""How long a job took to get over each fault, from what its coordinator says happened.

Events in, times out; knows neither processes nor sockets. A fault is detected when the first word
of a new generation comes after it, and recovered from when the last chip of the latest generation
has finished its first step.
"""

from dataclasses import dataclass, field
from typing import Any

from meshmend.topology.failures import Chip

Event = dict[str, Any]

_LOST_S = 1.0  # a report that has not come for so long will not come


@dataclass
class Recovery:
    """A fault and how it went; all times are of one clock.

    One that `is_quiet` needs no new generation: the next step says that it did no harm; so is one
    whose `victims` were no members. `back` are the chips of a repair: it is over when they are
    members again. `generation` was the one before.
    """

    fault: str
    at_step: int
    at: float
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

    def as_json(self) -> Event:
        """Return what a report shows of it."""
        return {
            "fault": self.fault,
            "at_step": self.at_step,
            "detected_s": _rounded(self.detected_s),
            "recovered_s": _rounded(self.recovered_s),
        }


@dataclass
class Recoveries:
    """All faults of a run so far."""

    faults: list[Recovery] = field(default_factory=list)
    _number: int = 0
    _members: frozenset[Chip] = frozenset()
    _expected: set[Chip] = field(default_factory=set)
    _last: float = 0.0

    def happened(self, fault: Recovery) -> None:
        """Take up a fault."""
        fault.generation = self._number
        if fault.victims and self._members and not fault.victims & self._members:
            fault.is_quiet = True
        self.faults.append(fault)

    def open(self) -> list[Recovery]:
        """Return the faults that the job is not over yet."""
        return [fault for fault in self.faults if fault.recovered is None and not fault.is_quiet]

    def take(self, event: Event) -> list[Recovery]:
        """Take up an event of the coordinator; return the faults that this is the end of."""
        kind = event["event"]
        if kind in ("left", "forming", "turned away"):
            self._detect(event["clock"])
        elif kind == "generation":
            self._number = max(self._number, event["number"])
            self._members = frozenset(tuple(chip) for chip in event["chips"])
            self._expected = set(self._members)
            self._last = 0.0
        elif kind == "done":
            return self._take_step(event)
        return []

    def _take_step(self, event: Event) -> list[Recovery]:
        quiet = [
            fault
            for fault in self.faults
            if fault.is_quiet and fault.recovered is None and event["at"] > fault.at
        ]
        for fault in quiet:
            fault.detected = fault.recovered = event["at"]
        if "generation" not in event:
            return quiet
        self._number = max(self._number, event["generation"])
        if event["first"]:
            self._expected.discard(tuple(event["chip"]))
            self._last = max(self._last, event["at"])
            return quiet if self._expected else quiet + self._recover(self._last)
        return quiet + self._bound(event["at"], event["generation"])

    def _bound(self, at: float, generation: int) -> list[Recovery]:
        """Take up a later step of a generation: it took all chips, so each has done its first.

        If their own reports do not come, they were lost with a coordinator.
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
        """Return the open faults that a generation which steps at this time is an answer to."""
        return [
            fault
            for fault in self.open()
            if fault.detected is not None and fault.detected <= at and fault.back <= self._members
        ]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
