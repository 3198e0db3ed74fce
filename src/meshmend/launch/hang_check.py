"""Notices a coordinator that hangs: it lives, and accepts connections, but does not answer."""

from collections.abc import Callable
from typing import Final

_ASK_AFTER_S: Final = 10.0  # from its start
_ASK_EVERY_S: Final = 2.0
_MOST_UNANSWERED: Final = 3  # in a row


class HangCheck:
    """Asks a coordinator from time to time; it hangs if it has not answered three times in a row.

    `is_answered()` asks it once.
    """

    def __init__(self, is_answered: Callable[[], bool], now: float) -> None:
        self._is_answered = is_answered
        self._ask_at = now + _ASK_AFTER_S
        self._n_unanswered = 0

    def is_hanging(self, now: float) -> bool:
        """Ask the coordinator, if that is due; return whether it hangs."""
        if now >= self._ask_at:
            self._ask_at = now + _ASK_EVERY_S
            self._n_unanswered = 0 if self._is_answered() else self._n_unanswered + 1
        return self._n_unanswered >= _MOST_UNANSWERED
