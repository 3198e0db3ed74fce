"""Telling what is under way: a step in words and, where it is known, the part that is done."""

from collections.abc import Iterator
from typing import Protocol


class ProgressCallback(Protocol):
    """Is told the step that is under way and the part of all work that is done, from 0 to 1."""

    def __call__(self, step: str, part: float | None = None, /) -> None: ...


def no_progress(step: str, part: float | None = None, /) -> None:
    """Tell nobody."""


class ProgressShares:
    """Several pieces of work of about equal size, told as one; they may run side by side."""

    def __init__(self, progress: ProgressCallback, n_shares: int) -> None:
        self._tell = progress
        self._parts = [0.0] * n_shares

    def of(self, share: int) -> ProgressCallback:
        """Return whom one of the pieces tells; its part never falls."""

        def told(step: str, part: float | None = None, /) -> None:
            self._parts[share] = max(self._parts[share], part or 0.0)
            self._tell(step, sum(self._parts) / len(self._parts))

        return told

    def in_turn(self) -> Iterator[ProgressCallback]:
        """Yield whom each piece tells, one after another: the one before is then done."""
        for share in range(len(self._parts)):
            yield self.of(share)
            self._parts[share] = 1.0
