"""Prints the events of a coordinator on standard error, one line each; steps are left out."""

import time
from dataclasses import replace

from meshmend.cli.console import note
from meshmend.membership import events
from meshmend.membership.events import Event, TimedEvent
from meshmend.report.event_words import event_words, seconds
from meshmend.topology.failures import Chip

_SHOWN = (
    events.GenerationBegan,
    events.FaultHappened,
    events.FaultRecovered,
    events.FaultMissed,
    events.CoordinatorChanged,
    events.ConnectionRefused,
    events.WorkerTurnedAway,
    events.CheckpointSaved,
    events.WorkerSaved,
    events.ChipsWaiting,
    events.WorkerLeft,
    events.StateLost,
    events.StateRestored,
    events.JobFailed,
    events.WriteFailed,
)


def job_line(timed: TimedEvent) -> str | None:
    """Return the line that shows an event of a job, or None if it is not shown."""
    if not isinstance(timed.event, _SHOWN):
        return None
    return _line(timed.t, event_words(timed.event))


class JobLines:
    """Prints the events of a coordinator in this process, and how long each change took.

    A change begins when the first worker leaves, or else when the last one connects. It ends when
    every chip of the new generation has finished a step.
    """

    def __init__(self, n_mesh_chips: int) -> None:
        self._n_mesh_chips = n_mesh_chips
        self._connected: set[Chip] = set()
        self._started = time.monotonic()
        self._left_at: float | None = None
        self._arrived_at: float | None = None
        self._why = ""
        self._expected: set[Chip] = set()
        self._n_chips = 0

    def take(self, clock: float, event: Event) -> None:
        """Print the line of an event, if it is shown."""
        t = clock - self._started
        match event:
            case events.WorkerArrived():
                self._arrived_at = clock
                self._connected.add(event.chip)
                count = f"{len(self._connected)} of {self._n_mesh_chips}"
                note(_line(t, f"chip {event.chip} connected, {count}"))
            case events.WorkerLeft() | events.WorkerTurnedAway():
                self._connected.discard(event.chip)
                self._left_at = self._left_at or clock
            case events.GenerationForming():
                self._why = event.why
            case events.GenerationBegan():
                event = replace(event, why=self._why)
                self._expected = set(event.chips)
                self._n_chips = len(self._expected)
            case events.WorkerStepped(first=True):
                self._step(clock, event)
        if line := job_line(TimedEvent(t, event)):
            note(line)

    def _step(self, clock: float, event: events.WorkerStepped) -> None:
        """Print how long a change took, once its last chip has finished a step."""
        self._expected.discard(event.chip)
        since = self._left_at or self._arrived_at
        if self._expected or since is None:
            return
        after = "the first chip left" if self._left_at else "the last chip connected"
        done = f"all {self._n_chips} chips have finished step {event.step}"
        note(_line(clock - self._started, f"{done}, {seconds(clock - since)} after {after}"))
        self._left_at = self._arrived_at = None


def _line(t: float, text: str) -> str:
    return f"{t:9.2f} s  {text}"
