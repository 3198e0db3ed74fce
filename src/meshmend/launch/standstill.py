"""Notices a job in which nothing moves: no step is finished, and no chip comes or goes.

The coordinator finds the worker that keeps the others waiting. Where all of them wait, also before
the first step, it finds none. Events and times are given; knows neither processes nor a clock.
"""

from collections.abc import Iterable

from meshmend.membership import events
from meshmend.membership.events import Event
from meshmend.membership.timing import Timing
from meshmend.report.event_words import chips_words
from meshmend.topology.failures import Chip


class Standstill:
    """Where the workers of a job are, and since when; `straggler_timeout_s` of 0 is for ever."""

    def __init__(self, timing: Timing, now: float) -> None:
        self._timeout_s = timing.straggler_timeout_s
        # The coordinator counts from the next heartbeat on, and is to act first.
        self._margin_s = timing.heartbeat_timeout_s
        self._moved = now
        self._forming: events.GenerationForming | None = None
        self._began: events.GenerationBegan | None = None
        self._step = 0
        self._connected: set[Chip] = set()
        self._waiting: dict[Chip, str] = {}

    def take(self, now: float, event: Event) -> None:
        """Take an event of the coordinator."""
        match event:
            case events.WorkerStepped(step=step):
                self._step = max(self._step, step)
            case events.WorkerArrived(chip=chip):
                self._connected.add(chip)
            case events.WorkerLeft(chip=chip) | events.WorkerTurnedAway(chip=chip):
                self._connected.discard(chip)
                self._waiting.pop(chip, None)
            case events.GenerationForming():
                self._forming = event
                self._waiting.clear()
            case events.GenerationBegan():
                self._began, self._step = event, event.step
                self._waiting.clear()
            case events.ChipsWaiting(chips=chips, why=why):
                self._waiting |= dict.fromkeys(chips, why)
                return
            case events.StateLost(waits_s=waits_s):
                self._moved = now + waits_s  # the coordinator ends that wait
                return
            case _:
                return
        self._moved = now

    def is_too_long(self, now: float) -> bool:
        """Whether nothing has moved for too long."""
        return 0 < self._timeout_s < now - self._moved - self._margin_s

    def words(self, running: Iterable[Chip]) -> str:
        """Return where each worker that still runs stands, in one line."""
        chips_at: dict[str, list[Chip]] = {}
        for chip in running:
            chips_at.setdefault(self._position(chip), []).append(chip)
        places = "; ".join(f"{chips_words(chips)} {place}" for place, chips in chips_at.items())
        return (
            f"no step was finished and no chip came or went for {self._timeout_s:g} s: "
            f"{places or 'no worker is left'}"
        )

    def _position(self, chip: Chip) -> str:
        if chip in self._waiting:
            return f"waits: {self._waiting[chip]}"
        forming, began = self._forming, self._began
        if forming and chip in forming.chips and (not began or began.number < forming.number):
            return f"prepares generation {forming.number}"
        if began and chip in began.chips:
            return f"is in generation {began.number} after step {self._step}"
        if chip in self._connected:
            return "is connected, in no generation"
        return "has not come to the coordinator" if not began else "is cut off"
