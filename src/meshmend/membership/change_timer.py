"""Measures how long each change of the chips that train took, from the coordinator's events.

A change begins when the first worker leaves, else when the last one connects, else when a
generation forms because of a link. It ends when every chip of the new generation has finished a
step. No clock: the caller passes in times.
"""

from meshmend.membership.events import (
    Event,
    GenerationBegan,
    GenerationForming,
    WorkerArrived,
    WorkerLeft,
    WorkerStepped,
    WorkerTurnedAway,
)
from meshmend.membership.job_status import ChangeCause, FinishedChange
from meshmend.topology.failures import Chip


class ChangeTimer:
    """Follows the events of one coordinator."""

    def __init__(self) -> None:
        self._left_at: float | None = None
        self._arrived_at: float | None = None
        self._formed_at: float | None = None
        self._members: frozenset[Chip] | None = None  # None before the first generation
        self._expected: set[Chip] = set()  # members that have not finished a step

    def take(self, clock: float, event: Event) -> FinishedChange | None:
        """Follow an event; return the change that is over with it, if one is."""
        match event:
            case WorkerArrived():
                self._arrived_at = clock
                if self._members is None:  # a worker that left before the job began was replaced
                    self._left_at = None
            case WorkerLeft() | WorkerTurnedAway():
                if self._members is None or event.chip in self._members:
                    self._left_at = self._left_at or clock
            case GenerationForming() | GenerationBegan():
                self._formed_at = self._formed_at or clock
                self._members = frozenset(event.chips)
                self._expected = set(event.chips)
            case WorkerStepped(first=True):
                return self._step(clock, event)
        return None

    def _step(self, clock: float, event: WorkerStepped) -> FinishedChange | None:
        self._expected.discard(event.chip)
        if self._expected or self._formed_at is None:
            return None
        if self._left_at is not None:
            cause, since = ChangeCause.LEFT, self._left_at
        elif self._arrived_at is not None:
            cause, since = ChangeCause.CONNECTED, self._arrived_at
        else:
            cause, since = ChangeCause.LINKS, self._formed_at
        self._left_at = self._arrived_at = self._formed_at = None
        took_s = max(0.0, clock - since)
        n_chips = len(self._members or ())
        return FinishedChange(cause, took_s, n_chips, event.step, event.generation)
