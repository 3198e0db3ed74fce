"""Limits how many log lines and events per second strangers can cause.

Has no clock: the caller gives the time.
"""

from typing import Final

_WINDOW_S: Final = 1.0


class RateLimit:
    """Lets the first `most_per_s` things of every second pass, and counts the others."""

    def __init__(self, most_per_s: int) -> None:
        self._most = most_per_s
        self._window_began = float("-inf")
        self._n_passed = 0
        self._n_held_back = 0

    def lets_pass(self, now: float) -> bool:
        """Whether one more thing may happen now; if not, it is counted."""
        if now - self._window_began >= _WINDOW_S:
            self._window_began, self._n_passed = now, 0
        if self._n_passed >= self._most:
            self._n_held_back += 1
            return False
        self._n_passed += 1
        return True

    def words(self, text: str, now: float) -> str:
        """Return a text, with the number of texts held back before it, if it may be written now.

        Return an empty text if it may not.
        """
        if not self.lets_pass(now):
            return ""
        count, self._n_held_back = self._n_held_back, 0
        return f"{text}; {count} more before it" if count else text
