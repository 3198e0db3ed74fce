"""Who keeps the others waiting: a worker that lives and says so, but whose loop stands still.

A heartbeat comes from a thread of its own, so it says nothing of the loop. With it comes the
**turn** that the loop has reached: the generation it is in and the step whose sum it has begun. In
a sum all wait for the last; a worker that is behind the others for too long is stuck.

No clock: times are given.
"""

from collections.abc import Iterable

from meshmend.topology.failures import Chip

LoopPosition = tuple[int, int]  # generation, step; a generation begins with step 0


class Stragglers:
    """The turns of some workers; one may be behind the others for `patience_s`, 0 for ever."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._turns: dict[Chip, LoopPosition] = {}
        self._behind_since: dict[Chip, float] = {}

    def note(self, chip: Chip, turn: LoopPosition) -> None:
        """Take in which turn a worker has reached."""
        if self._turns.get(chip) != turn:
            self._turns[chip] = turn
            self._behind_since.pop(chip, None)

    def forget(self, chip: Chip) -> None:
        """Take in that a worker is gone."""
        self._turns.pop(chip, None)
        self._behind_since.pop(chip, None)

    def excuse(self) -> None:
        """Count from now on: the coordinator itself was held up."""
        self._behind_since.clear()

    def stuck(self, members: Iterable[Chip], now: float) -> list[tuple[Chip, float]]:
        """Return who of some workers has been behind for too long, and for how long."""
        known = {chip: self._turns[chip] for chip in members if chip in self._turns}
        furthest = max(known.values(), default=(0, 0))
        found = []
        for chip, turn in known.items():
            if turn == furthest:
                self._behind_since.pop(chip, None)
                continue
            behind_s = now - self._behind_since.setdefault(chip, now)
            if 0 < self._patience_s < behind_s:
                found.append((chip, behind_s))
        return found
