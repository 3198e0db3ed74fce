"""Sums that were started and not waited for yet."""

from typing import Protocol


class PendingSum(Protocol):
    """A sum in flight; its payload must not be touched until `wait` returns or raises.

    When one sum of a generation fails, all that are in flight fail.
    """

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    def wait(self) -> None:
        """Return when the payload is the sum; raise what `Exchange.sum` raises."""


class FinishedSum:
    """A sum that needed no other chip."""

    is_done = True

    def wait(self) -> None:
        """Return at once."""
