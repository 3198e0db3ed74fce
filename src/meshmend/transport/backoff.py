"""How long to wait before the next try: longer each time, and different for each caller."""

import random
from typing import Final

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
