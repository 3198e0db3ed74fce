"""Prints the events of a coordinator on standard error, one line each; steps are left out."""

import time
from typing import Any

from msgspec import structs

from meshmend.cli.console import note
from meshmend.membership import events
from meshmend.membership.events import Event, TimedEvent
from meshmend.membership.job_view import JobView
from meshmend.pages.report.event_words import TROUBLE, change_words, event_words
from meshmend.transport.codec import plain

_SHOWN = (
    *TROUBLE,
    events.GenerationBegan,
    events.FaultHappened,
    events.FaultRecovered,
    events.FaultMissed,
    events.CoordinatorChanged,
    events.CheckpointSaved,
    events.WorkerSaved,
    events.WorkerLeft,
)


def job_line(timed: TimedEvent) -> str | None:
    """Return the line that shows an event of a job, or None if it is not shown."""
    if not isinstance(timed.event, _SHOWN):
        return None
    return _line(timed.t, event_words(timed.event))


class JobLines:
    """Prints the events of a coordinator in this process, and how long each change took."""

    def __init__(self, n_mesh_chips: int) -> None:
        self._n_mesh_chips = n_mesh_chips
        self._started = time.monotonic()
        self._view = JobView()

    def take(self, clock: float, event: Event) -> None:
        """Print the line of an event, if it is shown."""
        t, view = clock - self._started, self._view
        ends = view.take(clock, event)
        match event:
            case events.WorkerArrived():
                count = f"{len(view.connected)} of {self._n_mesh_chips}"
                self._print(t, f"chip {event.chip} connected, {count}", event)
            case events.GenerationBegan():
                event = structs.replace(event, why=view.forming.why if view.forming else "")
        if isinstance(event, _SHOWN):
            self._print(t, event_words(event), event)
        if ends.change is not None:
            self._print(t, change_words(ends.change))

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
