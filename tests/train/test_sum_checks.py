"""A few elements of a sum, summed again: wrong copies and wrong sums are found, and no others."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from meshmend.errors import WrongResultError
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.table import Collective, Schedule
from meshmend.topology.mesh import Mesh
from meshmend.train.core.share_checks import Finding, ShareChecks, SumCheck
from meshmend.transport.reference import chunk_at, run, run_chunk

N_ELEMENTS = 300
SCHEDULE = ALGORITHMS["ft-two-d"].build(Mesh((4, 4)).without("2x2@0,2"), Collective.ALLREDUCE)


@dataclass
class Plan:
    """How chips sum, as `Exchange` says it."""

    schedule: Schedule
    generation_number: int = 1

    def sum_order(self, n_elements: int, dtype: str, element: int) -> Any:
        chunk, start, stop = chunk_at(self.schedule, n_elements, element)
        return start, stop, lambda parts: run_chunk(self.schedule, chunk, parts)


@dataclass
class Sums:
    """What one chip puts into two sums, of which one has a type that is not checked."""

    array: Any

    @property
    def sizes(self) -> list[tuple[int, str]]:
        return [(4, "bfloat16"), (N_ELEMENTS, "float32")]

    @property
    def payloads(self) -> list[Any]:
        return [np.zeros(8, np.uint8), self.array.view(np.uint8)]


def summed(step: int) -> tuple[list[SumCheck], list[Sums]]:
    """Return the checks of all chips after a sum, and what they have of it."""
    random = np.random.default_rng(step)
    sums = [Sums(random.normal(size=N_ELEMENTS).astype("f4")) for _ in range(SCHEDULE.n_ranks)]
    checks = []
    for each in sums:
        learner: Any = each
        plan: Any = Plan(SCHEDULE)
        checks.append(SumCheck(learner, plan))
        checks[-1].begin(step)
        checks[-1].note(0)
        checks[-1].note(1)
    for each, result in zip(sums, run(SCHEDULE, [each.array for each in sums]), strict=True):
        each.array[:] = result
    return checks, sums


def wrong_ranks(checks: list[SumCheck]) -> list[int]:
    """Return what all chips find, which is the same."""
    told = [check.told() for check in checks]
    (found,) = {tuple(check.wrong_ranks(told)) for check in checks}
    return list(found)


@pytest.mark.parametrize("step", range(5))
def test_right_sums_raise_no_alarm_and_a_wrong_copy_is_named(step: int) -> None:
    checks, sums = summed(step)
    assert wrong_ranks(checks) == []

    where = checks[0]._span.start
    sums[3].array.view(np.uint8)[4 * where] ^= 1
    assert wrong_ranks(checks) == [3]


def test_a_sum_that_is_wrong_everywhere_is_seen_by_all() -> None:
    checks, sums = summed(0)
    for each in sums:
        each.array[checks[0]._span] += 1.0

    assert wrong_ranks(checks) == list(range(SCHEDULE.n_ranks))


def checks_of_four() -> ShareChecks:
    learner: Any = None
    plan: Any = Plan(SCHEDULE)
    return ShareChecks(learner, plan, every=4)


CHIPS = [(0, rank) for rank in range(4)]


def test_a_chip_with_a_wrong_copy_twice_in_a_row_is_wrong() -> None:
    checks = checks_of_four()

    assert checks.judge_sums(8, [2], CHIPS) == Finding(is_void=True, sums=(2,))
    assert checks.judge_sums(8, [2], CHIPS) == Finding(is_void=True, wrong=(2,), sums=(2,))


def test_a_copy_that_was_wrong_once_is_forgiven() -> None:
    checks = checks_of_four()

    assert checks.judge_sums(8, [2], CHIPS).is_void
    assert checks.judge_sums(8, [], CHIPS) == Finding()
    assert not checks.judge_sums(12, [2], CHIPS).wrong


def test_sums_that_stay_wrong_on_all_chips_end_the_job() -> None:
    checks = checks_of_four()
    for _ in range(2):
        found = checks.judge_sums(8, [0, 1, 2, 3], CHIPS)
        assert found == Finding(is_void=True, sums=(0, 1, 2, 3))

    with pytest.raises(WrongResultError, match="a chip adds wrong, or a link changes bytes; find"):
        checks.judge_sums(8, [0, 1, 2, 3], CHIPS)
