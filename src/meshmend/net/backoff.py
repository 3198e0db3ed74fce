"""How long to wait before the next try: longer each time, and never as long as everybody else."""

import random


class Backoff:
    """Doubles the wait with every try, up to a longest one; `rng` spreads those who try at once."""

    def __init__(self, first_s: float, longest_s: float, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._rng = rng or random.Random()
        self._next_s = first_s

    def next_s(self) -> float:
        """Return how long to wait now: from half to all of what this try allows."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return wait_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with the shortest wait again."""
        self._next_s = self._first_s
