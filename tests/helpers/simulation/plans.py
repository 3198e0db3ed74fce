"""The plans of a simulated chip: a number each, which says by which trees sums go.

What a chip has at the beginning, and when the searched plan lies in its folder, is drawn from the
seed, the chip and the generation, so that a world without plans plays as it did before.
"""

from collections.abc import Callable, Sequence
from random import Random

QUICK = 1
_SEARCHED = 2
_N_SUMS = 2  # that are searched for; a step runs the first
_HAS_IT = 0.15
_LONGEST_SEARCH_S = 0.4


class SimulatedPlans:
    """One chip's plans in one generation; `plan` is the one that its sums run."""

    def __init__(self, name: str, now: Callable[[], float]) -> None:
        random = Random(name)
        self._now = now
        is_luck = random.random() < _HAS_IT
        self._found_at = now() + random.uniform(0.0, _LONGEST_SEARCH_S)
        self._digests = [_SEARCHED + number if is_luck else 0 for number in range(_N_SUMS)]
        self._taken = [QUICK] * _N_SUMS

    @property
    def plan(self) -> int:
        """The plan that the sum of a step runs."""
        return self._taken[0]

    def digests(self) -> list[int]:
        """Return what this chip has."""
        return self._digests

    def packed(self, number: int) -> bytes:
        """Return a plan as bytes."""
        assert self._digests[number], "a plan that this chip does not have"
        return bytes([self._digests[number]])

    def take(self, number: int, packed: bytes | None) -> None:
        """Run the searched plan."""
        self._taken[number] = packed[0] if packed is not None else self._digests[number]
        assert self._taken[number] == _SEARCHED + number, "no plan was sent, and none is here"

    def take_quick(self, number: int) -> None:
        """Run the quick plan."""
        self._taken[number] = QUICK

    def has_found(self, numbers: Sequence[int]) -> bool:
        """Whether the search has ended."""
        if self._now() >= self._found_at:
            for number in numbers:
                self._digests[number] = _SEARCHED + number
        return all(self._digests[number] for number in numbers)
