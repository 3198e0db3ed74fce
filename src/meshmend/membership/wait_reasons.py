"""Keeps why connected workers do not train, and since when; each reason is sent once.

No clock: the caller passes in times.
"""

from collections.abc import Iterator

from meshmend.membership.events import ChipsWaiting
from meshmend.membership.membership import Membership
from meshmend.topology.failures import Chip


class WaitReasons:
    """The waiting workers of one coordinator."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._reasons: dict[Chip, str] = {}
        self._since: dict[Chip, float] = {}

    def update(self, now: float) -> tuple[tuple[Chip, str], ...]:
        """Ask which workers wait now, and why; return those whose reason is new."""
        reasons = self._membership.reasons_to_wait()
        new = tuple((chip, why) for chip, why in reasons.items() if self._reasons.get(chip) != why)
        self._reasons = reasons
        self._since = {chip: self._since.get(chip, now) for chip in reasons}
        return new

    def forget(self, chip: Chip) -> None:
        """Record that a worker has left; its replacement gets the reason again."""
        self._reasons.pop(chip, None)
        self._since.pop(chip, None)

    def events(self) -> Iterator[ChipsWaiting]:
        """Yield one event per reason, for the observers."""
        for why in dict.fromkeys(self._reasons.values()):
            yield ChipsWaiting(
                tuple(chip for chip in self._reasons if self._reasons[chip] == why), why
            )

    def waited_s(self, chips: tuple[Chip, ...], now: float) -> float:
        """Return for how many seconds the first of these chips has waited."""
        return max(0.0, *(now - self._since[chip] for chip in chips))
