"""How often something may happen: log lines that strangers cause, and tries after a failure.

Has no clock: the caller gives the time, or waits.
"""

import random
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

    def text_of(self, text: str, now: float) -> str:
        """Return a text, with the number of texts held back before it, if it may be written now.

        Return an empty text if it may not.
        """
        if not self.lets_pass(now):
            return ""
        count, self._n_held_back = self._n_held_back, 0
        return f"{text}; {count} more before it" if count else text


FIRST_S: Final = 0.05
LONGEST_S: Final = 1.0


class Backoff:
    """Returns waits that double up to a longest one, each cut by a random part of up to a half.

    Callers with different seeds try at different times. So thousands of workers that lost the same
    coordinator do not reconnect in the same moment.
    """

    def __init__(
        self, seed: int, *, first_s: float = FIRST_S, longest_s: float = LONGEST_S
    ) -> None:
        self._random = random.Random(seed)
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def wait_s(self) -> float:
        """Return how long to wait after one more failed try."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return wait_s * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start with short waits again, after a try that succeeded."""
        self._next_s = self._first_s
