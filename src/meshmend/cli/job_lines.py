"""Prints the events of a coordinator on standard error, one line each; steps are left out."""

import time
from typing import Any

from msgspec import structs

from meshmend.cli.console import note
from meshmend.membership import events
from meshmend.membership.change_timer import ChangeTimer
from meshmend.membership.events import Event, TimedEvent
from meshmend.pages.report.event_words import change_words, event_words
from meshmend.topology.failures import Chip
from meshmend.transport.codec import plain

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
    events.HistoryDropped,
    events.CoordinatorSuperseded,
    events.JobFailed,
    events.WriteFailed,
    events.NonFiniteSum,
    events.StatesDiffer,
)


def job_line(timed: TimedEvent) -> str | None:
    """Return the line that shows an event of a job, or None if it is not shown."""
    if not isinstance(timed.event, _SHOWN):
        return None
    return _line(timed.t, event_words(timed.event))


class JobLines:
    """Prints the events of a coordinator in this process, and how long each change took.

    `ChangeTimer` says when a change begins and ends.
    """

    def __init__(self, n_mesh_chips: int) -> None:
        self._n_mesh_chips = n_mesh_chips
        self._connected: set[Chip] = set()
        self._started = time.monotonic()
        self._why = ""
        self._timer = ChangeTimer()

    def take(self, clock: float, event: Event) -> None:
        """Print the line of an event, if it is shown."""
        t = clock - self._started
        match event:
            case events.WorkerArrived():
                self._connected.add(event.chip)
                count = f"{len(self._connected)} of {self._n_mesh_chips}"
                self._print(t, f"chip {event.chip} connected, {count}", event)
            case events.WorkerLeft() | events.WorkerTurnedAway():
                self._connected.discard(event.chip)
            case events.GenerationForming():
                self._why = event.why
            case events.GenerationBegan():
                event = structs.replace(event, why=self._why)
        if isinstance(event, _SHOWN):
            self._print(t, event_words(event), event)
        if (change := self._timer.take(clock, event)) is not None:
            self._print(t, change_words(change))

    @staticmethod
    def _print(t: float, text: str, event: Event | None = None) -> None:
        fields: dict[str, Any] = {}
        if event is not None:
            fields["event"] = plain(event)
            if (chip := getattr(event, "chip", None)) is not None:
                fields["chip"] = chip
        note(_line(t, text), message=text, **fields)


def _line(t: float, text: str) -> str:
    return f"{t:9.2f} s  {text}"
