"""How workers ended: which of them had never trained."""

from types import SimpleNamespace
from typing import Any

from meshmend.launch.worker_ends import WorkerEnds

DEAD: Any = SimpleNamespace(code=9, traceback="", how_it_ended="exit code 9", pid=1)


def never_trained(*, next_step: int) -> tuple[str, ...]:
    ends = WorkerEnds()
    ends.note_generation(40, ((0, 0), (0, 1)))  # as a job that was resumed
    ends.add((0, 1), DEAD, is_over=False)
    ends.note_generation(next_step, ((0, 0),))
    return ends.never_trained


def test_a_chip_that_died_before_it_told_of_its_steps_has_trained() -> None:
    assert never_trained(next_step=44) == ()


def test_a_chip_that_died_before_any_step_of_its_generation_has_not() -> None:
    assert never_trained(next_step=40) == ("chip (0, 1) died: exit code 9",)
