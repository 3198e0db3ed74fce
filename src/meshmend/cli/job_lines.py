"""What a coordinator says of its job, as plain lines on standard error; steps are left out."""

import time
from collections.abc import Mapping
from typing import Any

from meshmend.cli.console import note
from meshmend.report.training_events import chips_words, event_words, seconds

_SAID = {
    *("generation", "fault", "recovered", "missed"),
    *("coordinator", "refused", "turned away", "checkpoint"),
}


def job_line(event: Mapping[str, Any]) -> str | None:
    """Return the line that stands for an event of a job, or None if it has none."""
    kind = event["event"]
    if kind in _SAID:
        text = event_words(event)
    elif kind == "waiting":
        text = f"{chips_words(map(tuple, event['chips']))} waits: {event['why']}"
    elif kind == "left":
        text = str(event["why"])
    else:
        return None
    return f"{event['t']:9.2f} s  {text}"


class JobLines:
    """Prints the events of a coordinator in this process, who is there, and how long changes took.

    A change has taken from the first worker that went, or else the last that came, until the last
    chip has finished a step again.
    """

    def __init__(self, n_whole: int) -> None:
        self._n_whole = n_whole
        self._there: set[tuple[int, ...]] = set()
        self._started = time.monotonic()
        self._lost_at: float | None = None
        self._came_at: float | None = None
        self._why = ""
        self._expected: set[tuple[int, ...]] = set()
        self._n_chips = 0

    def take(self, message: Mapping[str, Any]) -> None:
        """Print what an event of the coordinator says, if anything."""
        kind, clock = message["event"], float(message["clock"])
        facts = {key: value for key, value in message.items() if key not in ("kind", "clock")}
        facts["t"] = clock - self._started
        if kind in ("arrived", "left", "turned away"):
            self._count(kind, facts, clock)
        elif kind == "forming":
            self._why = facts["why"]
        elif kind == "generation":
            facts["why"] = self._why
            self._expected = set(facts["chips"])
            self._n_chips = len(self._expected)
        elif kind == "done":
            self._hear_done(facts, clock)
        if line := job_line(facts):
            note(line)

    def _count(self, kind: str, facts: Mapping[str, Any], clock: float) -> None:
        """Keep count of who is there, and say who has come."""
        chip = tuple(facts["chip"])
        if kind != "arrived":
            self._there.discard(chip)
            self._lost_at = self._lost_at or clock
            return
        self._came_at = clock
        self._there.add(chip)
        note(f"{facts['t']:9.2f} s  chip {chip} is there, {len(self._there)} of {self._n_whole}")

    def _hear_done(self, facts: Mapping[str, Any], clock: float) -> None:
        if "saved" in facts:
            event = {"event": "checkpoint", "step": facts["step"], "path": facts["saved"]}
            note(job_line(event | {"t": facts["t"]}) or "")
            return
        if not facts.get("first"):
            return
        self._expected.discard(tuple(facts["chip"]))
        since = self._lost_at or self._came_at
        if self._expected or since is None:
            return
        after = "the first chip went" if self._lost_at else "the last chip came"
        note(
            f"{facts['t']:9.2f} s  all {self._n_chips} chips have finished step {facts['step']}, "
            f"{seconds(clock - since)} after {after}"
        )
        self._lost_at = self._came_at = None
