"""Keeps what the events of a job add up to: counts, rates, the last changes and faults.

The coordinator feeds it every event that it sends to observers. No clock: the caller passes in
times. What an earlier coordinator counted is not known.
"""

from bisect import bisect_left
from collections import Counter, deque
from typing import Final

from meshmend.membership import events
from meshmend.membership.change_timer import ChangeTimer
from meshmend.membership.events import Event
from meshmend.membership.job_status import (
    RECOVERY_BUCKETS_S,
    ChangeCause,
    FinishedChange,
    JobCounts,
    PastChange,
    PastEvent,
)
from meshmend.membership.moving_rate import MovingRate
from meshmend.topology.failures import Chip

_WINDOW_S: Final = 10.0  # of the rates
_N_LAST: Final = 10
_NOTABLE: Final = (
    events.WorkerLeft,
    events.WorkerTurnedAway,
    events.ConnectionRefused,
    events.GenerationBegan,
    events.StateLost,
    events.StateRestored,
    events.WriteFailed,
    events.NonFiniteSum,
    events.StatesDiffer,
    events.JobFailed,
    events.JobFinished,
)
_COUNTED: Final[dict[type[Event], str]] = {
    events.WorkerArrived: "arrivals",
    events.WorkerLeft: "departures",
    events.WorkerTurnedAway: "turned_away",
    events.ConnectionRefused: "refusals",
    events.StateLost: "states_lost",
    events.StateRestored: "restores",
}


class JobProgress:
    """What a coordinator has seen of its job since it began."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._recoveries = [0] * (len(RECOVERY_BUCKETS_S) + 1)
        self._recovery_s = 0.0
        self._leader: Chip | None = None
        self._led_at = 0.0  # when the leader finished its last step, by its own clock
        self._steps, self._samples = MovingRate(_WINDOW_S), MovingRate(_WINDOW_S)
        self._timer = ChangeTimer()
        self._events: deque[tuple[float, Event]] = deque(maxlen=_N_LAST)
        self._changes: deque[tuple[float, FinishedChange]] = deque(maxlen=_N_LAST)
        self.formed_at: float | None = None  # when the latest generation was formed
        self.stepped_at: float | None = None  # when the last step was reported

    def take(self, clock: float, event: Event) -> None:
        """Follow one event."""
        if name := _COUNTED.get(type(event)):
            self._counts[name] += 1
        match event:
            case events.GenerationForming():
                self.formed_at = clock
            case events.StateRestored():
                self._counts["redone_steps"] += event.lost - event.step
            case events.WorkerStepped(leads=True):
                self._count_step(clock, event)
        if isinstance(event, _NOTABLE):
            self._events.append((clock, event))
        if (change := self._timer.take(clock, event)) is not None:
            self._end_change(clock, change)

    def counts(self) -> JobCounts:
        """Return what was counted."""
        return JobCounts(
            **self._counts, recoveries=tuple(self._recoveries), recovery_s=self._recovery_s
        )

    def steps_per_s(self, now: float) -> float | None:
        """Return the mean steps per second of the last seconds; None if none is known."""
        return self._steps.at(self._leader_clock(now))

    def samples_per_s(self, now: float) -> float | None:
        """Return the mean samples per second of the last seconds; None if none is known."""
        return self._samples.at(self._leader_clock(now))

    def last_events(self, now: float) -> tuple[PastEvent, ...]:
        """Return the last events that someone who looks at a job wants to know, newest last."""
        return tuple(PastEvent(max(0.0, now - at), event) for at, event in self._events)

    def last_changes(self, now: float) -> tuple[PastChange, ...]:
        """Return the last changes of the chips that train, newest last."""
        return tuple(PastChange(max(0.0, now - at), change) for at, change in self._changes)

    def _count_step(self, clock: float, event: events.WorkerStepped) -> None:
        self._counts["steps"] += 1
        self._counts["samples"] += event.samples
        if event.chip != self._leader:  # another process, perhaps another clock
            self._leader = event.chip
            self._steps, self._samples = MovingRate(_WINDOW_S), MovingRate(_WINDOW_S)
        # Reports may come late, and many at once. So steps are timed by their leader's clock.
        self._steps.add(event.at, 1)
        self._samples.add(event.at, event.samples)
        self._led_at, self.stepped_at = event.at, clock

    def _leader_clock(self, now: float) -> float:
        """Return the time by the leader's clock."""
        return self._led_at + (0.0 if self.stepped_at is None else max(0.0, now - self.stepped_at))

    def _end_change(self, clock: float, change: FinishedChange) -> None:
        self._changes.append((clock, change))
        if change.cause is ChangeCause.LEFT:
            self._recoveries[bisect_left(RECOVERY_BUCKETS_S, change.took_s)] += 1
            self._recovery_s += change.took_s
