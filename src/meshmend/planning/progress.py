"""Reports the progress of long work: the current step and, if known, the part that is done."""

from collections.abc import Iterator
from typing import Protocol


class ProgressCallback(Protocol):
    """Receives the current step and the part of all work that is done, from 0 to 1."""

    def __call__(self, step: str, part: float | None = None, /) -> None: ...


def no_progress(step: str, part: float | None = None, /) -> None:
    """Ignore progress."""


class ProgressShares:
    """Reports several pieces of work of about equal size as one; they may run side by side."""

    def __init__(self, progress: ProgressCallback, n_shares: int) -> None:
        self._progress = progress
        self._parts = [0.0] * n_shares

    def of(self, share: int) -> ProgressCallback:
        """Return the callback of one piece; its part never decreases."""

        def report(step: str, part: float | None = None, /) -> None:
            self._parts[share] = max(self._parts[share], part or 0.0)
            self._progress(step, sum(self._parts) / len(self._parts))

        return report

    def in_turn(self) -> Iterator[ProgressCallback]:
        """Yield the callback of each piece in turn; a piece counts as done when the next begins."""
        for share in range(len(self._parts)):
            yield self.of(share)
            self._parts[share] = 1.0
