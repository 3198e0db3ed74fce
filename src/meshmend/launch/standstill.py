"""Detects a job in which nothing moves: no step is finished, and no chip joins or leaves.

The coordinator removes a single worker that keeps the others waiting. If all workers wait, for
example before the first step, it finds no such worker: the launcher must end the job. Callers pass
in events and times; this module uses neither processes nor a clock.
"""

from collections.abc import Iterable

from meshmend.config import Timing
from meshmend.membership import events
from meshmend.membership.events import Event
from meshmend.pages.report.event_words import chips_words
from meshmend.topology.failures import Chip


class Standstill:
    """Where each worker of a job is, and when something moved last.

    If `straggler_timeout_s` is 0, no standstill is too long.
    """

    def __init__(self, timing: Timing, now: float) -> None:
        self._timeout_s = timing.straggler_timeout_s
        # The coordinator starts to count at the next heartbeat, and should act before the launcher.
        self._margin_s = timing.heartbeat_timeout_s
        self._moved_at = now
        self._forming: events.GenerationForming | None = None
        self._generation: events.GenerationBegan | None = None
        self._step = 0
        self._connected: set[Chip] = set()
        self._waiting: dict[Chip, str] = {}

    def handle(self, now: float, event: Event) -> None:
        """Handle an event of the coordinator."""
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
                self._generation, self._step = event, event.step
                self._waiting.clear()
            case events.ChipsWaiting(chips=chips, why=why):
                self._waiting |= dict.fromkeys(chips, why)
                return
            case events.StateLost(waits_s=waits_s):
                self._moved_at = now + waits_s  # the coordinator ends that wait
                return
            case _:
                return
        self._moved_at = now

    def is_too_long(self, now: float) -> bool:
        """Whether nothing has moved for too long."""
        return 0 < self._timeout_s < now - self._moved_at - self._margin_s

    def words(self, running: Iterable[Chip]) -> str:
        """Return one line that says where each running worker is."""
        chips_at: dict[str, list[Chip]] = {}
        for chip in running:
            chips_at.setdefault(self._position(chip), []).append(chip)
        places = "; ".join(f"{chips_words(chips)} {place}" for place, chips in chips_at.items())
        return (
            f"no step was finished and no chip joined or left for {self._timeout_s:g} s: "
            f"{places or 'no worker is left'}"
        )

    def _position(self, chip: Chip) -> str:
        if chip in self._waiting:
            return f"waits: {self._waiting[chip]}"
        forming, began = self._forming, self._generation
        if forming and chip in forming.chips and (not began or began.number < forming.number):
            return f"prepares generation {forming.number}"
        if began and chip in began.chips:
            return f"is in generation {began.number} after step {self._step}"
        if chip in self._connected:
            return "is connected, in no generation"
        return "has not connected to the coordinator" if not began else "is cut off"
