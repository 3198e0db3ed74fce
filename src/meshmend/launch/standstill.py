"""Detects a job in which nothing moves: no step is finished, and no chip joins or leaves.

The coordinator removes a single worker that keeps the others waiting. If all workers wait, for
example before the first step, it finds no such worker: the launcher must end the job. Callers pass
in times; this module uses neither processes nor a clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from meshmend.config import Timing
from meshmend.membership.job_view import JobView
from meshmend.pages.report.event_words import chips_words
from meshmend.topology.failures import Chip


@dataclass(frozen=True)
class Standstill:
    """Says whether the job of a view stands still, and where its workers are.

    If `straggler_timeout_s` is 0, no standstill is too long.
    """

    view: JobView
    timing: Timing

    def is_too_long(self, now: float) -> bool:
        """Whether nothing has moved for too long."""
        # The coordinator starts to count at the next heartbeat, and should act before the launcher.
        margin_s = self.timing.heartbeat_timeout_s
        return 0 < self.timing.straggler_timeout_s < now - self.view.moved_at - margin_s

    def words(self, running: Iterable[Chip]) -> str:
        """Return one line that says where each running worker is."""
        chips_at: dict[str, list[Chip]] = {}
        for chip in running:
            chips_at.setdefault(self._position(chip), []).append(chip)
        places = "; ".join(f"{chips_words(chips)} {place}" for place, chips in chips_at.items())
        return (
            f"no step was finished and no chip joined or left for "
            f"{self.timing.straggler_timeout_s:g} s: {places or 'no worker is left'}"
        )

    def _position(self, chip: Chip) -> str:
        view = self.view
        if chip in view.waiting:
            return f"waits: {view.waiting[chip]}"
        forming, began = view.forming, view.generation
        if forming and chip in forming.chips and (not began or began.number < forming.number):
            return f"prepares generation {forming.number}"
        if began and chip in began.chips:
            return f"is in generation {began.number} after step {view.step}"
        if chip in view.connected:
            return "is connected, in no generation"
        return "has not connected to the coordinator" if not began else "is cut off"
