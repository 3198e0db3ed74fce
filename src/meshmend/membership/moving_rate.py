"""Samples per second of a running job: a moving mean."""

import math
from collections import deque


class MovingRate:
    """The mean samples per second since the newest step that is at least `window_s` old."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._recent: deque[tuple[float, int]] = deque()
        self._total = 0

    def begin(self, t: float) -> None:
        """Begin the first window at this time; does nothing once steps were counted."""
        if not self._total:
            self._recent = deque([(t, 0)])

    def add(self, t: float, samples: int) -> float:
        """Count a step that finished at time `t`; return the rate, NaN if none is known yet."""
        self._recent.append((t, samples))
        self._total += samples
        while len(self._recent) > 2 and self._recent[1][0] <= t - self._window_s:
            self._total -= self._recent.popleft()[1]
        rate = self.at(t)
        return math.nan if rate is None else rate

    def at(self, t: float) -> float | None:
        """Return the rate at time `t`, None if none is known; it falls while no step finishes."""
        if not self._recent or not self._total:
            return None
        since, before = self._recent[0]
        return (self._total - before) / (t - since) if t > since else None
