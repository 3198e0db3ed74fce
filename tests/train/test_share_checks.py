"""Which chip computed wrong: every chip hears the same, and no other chip is ever named."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import InputError, WrongResultError
from meshmend.forecast.scenario import TRUSTED_CHECKS
from meshmend.train.core import share_checks
from meshmend.train.core.share_checks import (
    Dispute,
    Finding,
    Kind,
    ShareChecks,
    checked_rank,
    is_check_step,
    n_trusted_steps,
    wrong_one,
)

RIGHT = 7


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5, 6, 8, 10, 15, 16, 64])
def test_about_one_step_in_so_many_is_checked(every: int) -> None:
    steps = [step for step in range(1000 * every) if is_check_step(step, every)]

    assert 1000 <= len(steps) <= 1060
    assert max(after - before for before, after in pairwise(steps)) <= every + 1


@pytest.mark.parametrize("every", [*range(1, 41), 64, 100])
def test_a_chip_that_is_wrong_in_every_fifth_step_is_caught_soon(every: int) -> None:
    assert n_trusted_steps(every) == TRUSTED_CHECKS * every  # so forecasts have it
    checks = [step for step in range(every * 320) if is_check_step(step, every)]
    for phase in range(5):
        hits = [-1, *(step for step in checks if step % 5 == phase)]
        assert max(after - before for before, after in pairwise(hits)) <= 5 * every


@pytest.mark.parametrize("every", [10, 15, 20])
def test_checks_that_are_always_equally_far_apart_would_miss_it(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant of the places: the test above finds it."""
    monkeypatch.setattr(share_checks, "_is_on_beat", lambda step, every: step % every == 0)

    checks = [step for step in range(every * 30) if is_check_step(step, every)]

    assert len({step % 5 for step in checks}) == 1


@pytest.mark.parametrize("every", [2, 3, 4, 5, 6, 7, 10, 15, 16, 30, 32, 64])
@pytest.mark.parametrize("period", [2, 3, 4, 5, 6, 7, 8, 10, 16, 25])
def test_no_chip_that_is_wrong_now_and_then_escapes(every: int, period: int) -> None:
    windows = 200 * period
    checks = [step for step in range(every * windows) if is_check_step(step, every)]

    assert {step % period for step in checks} == set(range(period))


@given(st.integers(2, 12), st.integers(1, 20))
def test_every_chip_is_checked_by_every_other_one_in_turn(n_chips: int, every: int) -> None:
    seen: set[tuple[int, int]] = set()
    for window in range(n_chips - 1):
        ranks = [checked_rank(rank, n_chips, window * every, every) for rank in range(n_chips)]
        assert sorted(ranks) == list(range(n_chips))
        seen |= set(enumerate(ranks))

    assert len(seen) == n_chips * (n_chips - 1)


def test_a_third_chip_decides_and_only_for_one_of_the_two() -> None:
    dispute = Dispute(owner=0, checker=2, owners="a", checkers="b")

    assert wrong_one(dispute, ["b", "a", "b"]) == 2
    assert wrong_one(dispute, ["a", "b", "a"]) == 0
    assert wrong_one(dispute, ["a", "c", "b"]) is None  # the third one is wrong now, or all are
    assert wrong_one(dispute, ["a", "a", "b", "b"]) is None
    assert wrong_one(dispute, ["b", "a", "b", "a", "c"]) == 2
    assert wrong_one(Dispute(0, 1, "a", "b"), ["a", "b"]) is None  # there is no third one


@dataclass
class Place:
    """Where a simulated chip is, as an exchange knows it."""

    rank: int
    n_live: int
    generation_number: int = 1

    @property
    def mesh(self) -> "Place":
        return self


@dataclass
class Payload:
    """What a simulated chip has computed: one number."""

    value: int = RIGHT

    @property
    def sizes(self) -> list[tuple[int, str]]:
        return [(1, "int32")]  # such sums are not checked

    def payload_hashes(self, number: int) -> dict[str, int]:
        return {"first": RIGHT, "second": self.value}


class Chips:
    """Chips that compute shares twice; `wrong(rank, turn)` is what a chip computes instead."""

    def __init__(self, n_chips: int, every: int, *, is_tested: bool = True) -> None:
        self.payloads = [Payload() for _ in range(n_chips)]
        self.checks: list[ShareChecks] = []
        self.places = [Place(rank, n_chips) for rank in range(n_chips)]
        for rank, payload in enumerate(self.payloads):
            place: Any = self.places[rank]
            learner: Any = payload
            self.checks.append(ShareChecks(learner, place, every=every))
        if is_tested:
            assert self.step(0, lambda rank: RIGHT) == Finding()

    def step(self, step: int, computes: Any) -> Finding:
        """Let all chips compute what they are to; return what all of them find."""
        for rank, check in enumerate(self.checks):
            for _ in check.begin(step):
                self.payloads[rank].value = computes(rank)
                check.add_second()
            self.payloads[rank].value = computes(rank)
            check.note_own(0)
        if self.checks[0].kind is Kind.NOTHING:
            return Finding()
        told = [check.told() for check in self.checks]
        chips = [(0, rank) for rank in range(len(self.checks))]
        found = {check.judge(step, told, chips) for check in self.checks}
        assert len(found) == 1
        return found.pop()


@given(st.integers(3, 9), st.integers(1, 6), st.integers(0, 10**9), st.floats(0.05, 1.0))
def test_no_other_chip_is_named_however_often_one_is_wrong(
    n_chips: int, every: int, seed: int, rate: float
) -> None:
    chance = random.Random(seed)
    bad = chance.randrange(n_chips)
    chips, named = Chips(n_chips, every), set[int]()

    def computes(rank: int) -> int:
        return chance.getrandbits(60) if rank == bad and chance.random() < rate else RIGHT

    step = 0
    while step < 12 * every and not named:
        finding = chips.step(step, computes)
        named |= set(finding.wrong)
        step += not finding.is_void

    assert named <= {bad}
    assert named or rate < 1.0


def test_a_single_wrong_share_in_a_step_that_is_checked_is_always_found() -> None:
    for bad in range(4):
        for turn in range(2):  # its own share, or that of another which it checks
            chips, results = Chips(4, 2), [RIGHT, RIGHT]
            results[turn] = RIGHT + 1
            left = iter(results)

            def computes(rank: int, bad: int = bad, left: Iterator[int] = left) -> int:
                return next(left) if rank == bad else RIGHT

            assert chips.step(0, computes) == Finding(is_void=True)
            finding = chips.step(0, lambda rank: RIGHT)
            assert finding.wrong == (bad,)
            assert finding.parameters == ("second",)
            assert finding.is_void


def test_undisturbed_chips_raise_no_alarm() -> None:
    chips = Chips(4, 3)

    findings = [chips.step(step, lambda rank: RIGHT) for step in range(300)]

    assert findings == 300 * [Finding()]
    assert chips.checks[0].right_until is not None
    assert 300 - 7 * 3 < chips.checks[0].right_until <= 300 - 5 * 3


def test_chips_that_do_not_compute_the_same_are_refused_before_the_first_step() -> None:
    chips = Chips(4, 8, is_tested=False)

    with pytest.raises(InputError, match=r"chips \(0, 2\) differ from the others or from") as error:
        chips.step(0, lambda rank: RIGHT + (rank == 2))
    assert "\n" not in str(error.value)


def test_a_model_that_cannot_be_repeated_is_refused_before_the_first_step() -> None:
    numbers = iter(range(100))

    with pytest.raises(InputError, match="and 1 more differ"):
        Chips(4, 8, is_tested=False).step(0, lambda rank: next(numbers))


def test_a_chip_that_comes_later_and_computes_otherwise_is_named() -> None:
    chips = Chips(4, 1)
    for place in chips.places:
        place.generation_number = 2

    finding = chips.step(1, lambda rank: RIGHT + (rank == 3))

    assert finding == Finding(is_void=True, wrong=(3,))


def test_two_chips_that_differ_again_and_again_end_the_job_for_nobody_knows_which() -> None:
    chips = Chips(2, 1)

    for _ in range(5):
        assert chips.step(0, lambda rank: RIGHT + rank) == Finding(is_void=True)
    with pytest.raises(WrongResultError, match="it cannot be said which one is wrong"):
        chips.step(0, lambda rank: RIGHT + rank)
