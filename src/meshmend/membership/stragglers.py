"""Finds stragglers: workers that send heartbeats but whose training loop stands still.

A separate thread sends the heartbeats, so a heartbeat does not prove that the loop runs. Each one
holds the **position** of the loop: its generation, and the step whose sum it has begun. In a sum
all members wait for the last one, so a worker that stays behind the others for too long is stuck.

No clock: the caller passes in times.
"""

from collections.abc import Iterable

from meshmend.topology.failures import Chip

LoopPosition = tuple[int, int]  # generation, step; a generation begins with step 0


class Stragglers:
    """Keeps the position of each worker; one may stay behind for `timeout_s`, or for ever if 0."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._positions: dict[Chip, LoopPosition] = {}
        self._behind_since: dict[Chip, float] = {}

    def note(self, chip: Chip, position: LoopPosition) -> None:
        """Record the position that a worker has reached."""
        if self._positions.get(chip) != position:
            self._positions[chip] = position
            self._behind_since.pop(chip, None)

    def forget(self, chip: Chip) -> None:
        """Record that a worker has left."""
        self._positions.pop(chip, None)
        self._behind_since.pop(chip, None)

    def restart_clocks(self) -> None:
        """Measure from now on, because the coordinator itself was held up."""
        self._behind_since.clear()

    def position_of(self, chip: Chip) -> LoopPosition | None:
        """Return the last position that a worker reported."""
        return self._positions.get(chip)

    def behind_s(self, chip: Chip, now: float) -> float | None:
        """Return for how many seconds a worker has been behind; None if it is not."""
        since = self._behind_since.get(chip)
        return None if since is None else max(0.0, now - since)

    def stuck(self, members: Iterable[Chip], now: float) -> list[tuple[Chip, float]]:
        """Return the members that have been behind for too long, and for how many seconds.

        Nobody waits for a worker that is no member, so its time begins anew when it is one again.
        """
        known = {chip: self._positions[chip] for chip in members if chip in self._positions}
        furthest = max(known.values(), default=(0, 0))
        behind = [chip for chip, position in known.items() if position != furthest]
        self._behind_since = {chip: self._behind_since.get(chip, now) for chip in behind}
        times = [(chip, now - since) for chip, since in self._behind_since.items()]
        return [(chip, behind_s) for chip, behind_s in times if 0 < self._timeout_s < behind_s]
