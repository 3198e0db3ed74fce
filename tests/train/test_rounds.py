"""Rounds between two steps, with sums that fail on some chips and succeed on others."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import StoppedError, TransportError
from meshmend.train.core.exchange import FinishedSum
from meshmend.train.core.shared_calls import Parts, Round, SharedCalls

pytest.importorskip("torch")

N_CHIPS = 3
N_ROUNDS = 3
N_PARTS = 4


class Failing:
    """Threads that sum arrays; `faults` says which sums fail on which chips.

    A fault is a number of a sum and the chips that do not get its result. All chips then enter a
    new generation at their next sum: those that have the result as well.
    """

    def __init__(self, faults: dict[int, set[int]]) -> None:
        self.faults, self.generation = faults, 1
        self.n_sums = 0
        self.changed = threading.Condition()
        self.contributions: dict[int, Any] = {}
        self.result: Any = None

    def sum(self, chip: int, seen: int, payload: Any, *, is_safe: bool = False) -> None:
        with self.changed:
            if seen != self.generation:
                raise StoppedError("a new generation")
            self.contributions[chip] = payload.copy()
            mine = self.n_sums
            if len(self.contributions) == N_CHIPS:
                self.result = np.add.reduce(list(self.contributions.values()))
                self.contributions, self.n_sums = {}, self.n_sums + 1
                if mine in self.faults and not is_safe:
                    self.generation += 1
                self.changed.notify_all()
            assert self.changed.wait_for(
                lambda: self.n_sums > mine or self.generation != seen, timeout=20
            )
            lost_by = set() if is_safe else self.faults.get(mine, set())
            if self.n_sums == mine or chip in lost_by:
                raise StoppedError("a sum failed")
            payload[:] = self.result


class Chip:
    """One chip: what rounds need of a worker loop and of an exchange."""

    def __init__(self, chips: Failing, rank: int) -> None:
        self.chips, self.rank, self.seat = chips, rank, rank
        self.members = range(N_CHIPS)
        self.number, self.is_over = 1, False
        self.mesh = SimpleNamespace(n_live=N_CHIPS)
        self.transport = SimpleNamespace(check=lambda: None)
        self.computed: list[tuple[int, int]] = []
        self.state = 0  # how many rounds the loop of this chip has made something of

    def attempt(self, run: Callable[[], None], *, is_step: bool) -> bool:
        assert not is_step
        try:
            run()
        except TransportError:
            return False
        return True

    def recover(self, *, after: int) -> None:
        with self.chips.changed:
            # A chip whose sum failed has changed the generation, or another chip has.
            assert self.chips.generation > after
            self.number = self.chips.generation
            self.chips.changed.notify_all()

    def sum(self, payload: Any, n_elements: int, dtype: str) -> None:
        self.chips.sum(self.rank, self.number, payload)

    def gather_numbers(self, mine: list[int]) -> list[list[int]]:
        numbers = np.zeros((N_CHIPS, len(mine)), dtype=np.int64)
        numbers[self.rank] = mine
        self.chips.sum(self.rank, self.number, numbers)
        gathered: list[list[int]] = numbers.tolist()
        return gathered

    def step(self) -> None:
        """Take part in the step after the rounds, which all chips finish."""
        self.chips.sum(self.rank, self.number, np.zeros(1), is_safe=True)

    def give_state(self, step: int, holders: list[int]) -> None:
        given = np.array([self.state if self.rank == holders[0] else 0])
        self.chips.sum(self.rank, self.number, given)
        if self.rank not in holders:
            self.state = int(given[0])

    def start_sum(self, payload: Any, n_elements: int, dtype: str) -> FinishedSum:
        self.sum(payload, n_elements, dtype)
        return FinishedSum()


def rounds_of(chip: Chip, *, is_late: bool = False) -> list[Parts]:
    """Hold some rounds on one chip, the second of which is a gather; return their parts.

    One that is late took the last step from another chip, and looks on.
    """
    unused: Any = None  # what only a gather within a step asks for
    place: Any = SimpleNamespace(step=4)
    rounds = SharedCalls(place, unused, unused, chip, chip)  # type: ignore[arg-type]
    rounds.forget(is_own_step=not is_late)
    results = []
    for number in range(0 if is_late else N_ROUNDS):

        def compute(part: int, number: int = number) -> bytes:
            chip.computed.append((number, part))
            return f"{number}:{part}".encode()

        gathers = number == 1
        own = {chip.rank: f"chip {chip.rank}".encode()} if gathers else {}
        results.append(rounds.hold(Round(0 if gathers else N_PARTS, compute, own)))
        chip.state += 1
    while True:
        rounds.settle()
        if chip.attempt(chip.step, is_step=False):
            return results
        chip.recover(after=chip.number)


WORKED_OUT = {part: f"0:{part}".encode() for part in range(N_PARTS)}
GATHERED = {rank: f"chip {rank}".encode() for rank in range(N_CHIPS)}
LAST = {part: f"2:{part}".encode() for part in range(N_PARTS)}


def held(faults: dict[int, set[int]], late: frozenset[int] = frozenset()) -> list[Chip]:
    """Hold the rounds on all chips; check that all got all parts, and end with one state."""
    shared = Failing(faults)
    chips = [Chip(shared, rank) for rank in range(N_CHIPS)]
    results: dict[int, list[Parts]] = {}

    def hold(chip: Chip) -> None:
        results[chip.rank] = rounds_of(chip, is_late=chip.rank in late)

    threads = [threading.Thread(target=hold, args=[chip]) for chip in chips]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gathered = {rank: GATHERED[rank] for rank in GATHERED if rank not in late}
    right = [WORKED_OUT, gathered, LAST]
    assert results == {rank: [] if rank in late else right for rank in range(N_CHIPS)}
    assert [chip.state for chip in chips] == [N_ROUNDS] * N_CHIPS
    return chips


def test_without_failures_each_part_is_computed_once() -> None:
    computed = sorted(each for chip in held({}) for each in chip.computed)

    assert computed == [(number, part) for number in (0, 2) for part in range(N_PARTS)]


@pytest.mark.parametrize("at", range(24))
@pytest.mark.parametrize("lost_by", [{0}, {1, 2}], ids=["one chip", "two chips"])
def test_chips_in_two_different_rounds_meet_again(at: int, lost_by: set[int]) -> None:
    """A sum that only some chips get lets these go on to the next round, without the others."""
    held({at: lost_by})


@given(
    st.dictionaries(
        st.integers(0, 60), st.sets(st.integers(0, N_CHIPS - 1), min_size=1), max_size=6
    )
)
def test_all_chips_get_all_parts_whatever_sums_fail_where(faults: dict[int, set[int]]) -> None:
    held(faults)


@given(
    st.dictionaries(
        st.integers(0, 60), st.sets(st.integers(0, N_CHIPS - 1), min_size=1), max_size=3
    ),
    st.frozensets(st.integers(0, N_CHIPS - 1), min_size=1, max_size=N_CHIPS - 1),
)
def test_chips_that_looked_on_take_what_the_loops_of_others_made_of_the_rounds(
    faults: dict[int, set[int]], late: frozenset[int]
) -> None:
    held(faults, late)
