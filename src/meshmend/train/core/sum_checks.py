"""Sums checked: a few elements of a sum are summed again, from what all chips have put in.

It finds a chip that adds wrong, and a link that changes bytes. A chip whose own copy of the sum is
wrong is named. If all have the same wrong sum, some chip on the way has added wrong: nobody can say
which, and the step is done again.

Knows hashes of no state: see `share_checks`. All chips get the same numbers, and conclude the same.
"""

import random
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from meshmend.train.core.exchange import Exchange
from meshmend.train.core.learner import Learner

_MOST_ELEMENTS: Final = 64
_TYPES: Final = ("float32", "float64")  # NumPy adds those as the kernels do

PutAndGot = tuple[bytes, bytes]  # some elements of a sum, before and after it


class SumCheck:
    """One chip's part in checking some elements of one sum of a step."""

    def __init__(self, learner: Learner, exchange: Exchange) -> None:
        self._learner, self._exchange = learner, exchange
        self._number = -1  # of the sum that is checked; -1: none
        self._span = slice(0, 0)
        self._sums_again: Any = None
        self._before: Any = None  # what this chip has put in

    def begin(self, step: int, *, is_checked: bool = True) -> None:
        """Choose a sum and some elements of it, the same on all chips, if the step is checked."""
        sizes = self._learner.sum_sizes()
        numbers = [at for at, (n, dtype) in enumerate(sizes) if n > 0 and dtype in _TYPES]
        self._number = -1
        if not numbers or not is_checked:
            return
        chance = random.Random(f"{self._exchange.generation_number} {step}")
        self._number = chance.choice(numbers)
        n_elements, dtype = sizes[self._number]
        element = chance.randrange(n_elements)
        _, stop, self._sums_again = self._exchange.sum_order(n_elements, dtype, element)
        self._span = slice(element, min(stop, element + _MOST_ELEMENTS))

    def note(self, number: int) -> None:
        """Keep what this chip puts into a sum, which begins now."""
        if number == self._number:
            self._before = self._elements().copy()

    def told(self) -> PutAndGot | None:
        """Return what this chip has put in and what it has got, after the sums."""
        if self._number < 0:
            return None
        return self._before.tobytes(), self._elements().tobytes()

    def wrong_ranks(self, told: Sequence[PutAndGot | None]) -> list[int]:
        """Return the ranks whose sum is not that of what all have put in."""
        if self._number < 0:
            return []
        dtype = self._before.dtype
        known = [each for each in told if each is not None]
        parts = [np.frombuffer(put, dtype=dtype) for put, _ in known]
        right = [each.tobytes() for each in self._sums_again(parts)]
        return [rank for rank, (_, got) in enumerate(known) if got != right[rank]]

    def _elements(self) -> Any:
        dtype = self._learner.sum_sizes()[self._number][1]
        return self._learner.payloads()[self._number].view(dtype)[self._span]
