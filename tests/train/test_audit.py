"""The checker of histories: honest jobs are clean, and every planted fault is found."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ledgers import BATCH, LedgerJob
from meshmend.membership.events import Event, GenerationBegan, StepFinished
from meshmend.train.data.audit import Restore, audit
from meshmend.train.data.samples import Share


def honest(job: LedgerJob) -> None:
    """Lose a chip in the middle of a step, go on with two, get it back."""
    job.run(1, (0, 1, 2), after=0, to=6)
    job.replace((0, 2))
    job.run(2, (0, 1), after=6, to=9)
    job.run(5, (0, 1, 2), after=9, to=12)
    job.close()


def test_a_job_that_loses_a_chip_and_gets_it_back_has_one_history(tmp_path: Path) -> None:
    honest(LedgerJob(tmp_path))

    found = audit(tmp_path)

    assert (found.steps, found.used, found.hashed) == (12, 12 * BATCH, 12)
    assert not found.is_wrong
    assert found.replicas_equal is True
    assert found.unchecked == ()
    assert found.redone == 0


def test_a_last_step_that_was_lost_with_its_chips_may_be_done_again(tmp_path: Path) -> None:
    job = LedgerJob(tmp_path)
    job.run(1, (0, 1, 2), after=0, to=6, finished_by=[2])
    job.run(2, (0, 1), after=5, to=9, bits="other")
    job.close()

    found = audit(tmp_path)

    assert not found.is_wrong
    assert (found.steps, found.used, found.redone) == (9, 9 * BATCH, 0)


def restart_silently(job: LedgerJob) -> None:
    """Issue 11, 1: the only holder hangs, and a new chip trains from step 0."""
    job.run(1, (0, 1), after=0, to=10)
    job.replace((0, 1))
    job.run(2, (0,), after=10, to=177)
    job.run(3, (1,), after=0, to=30)


def fork(job: LedgerJob) -> None:
    """A chip that was cut off goes on in its generation, the others in the next."""
    job.run(5, (0, 1), after=0, to=50)
    job.run(5, (0,), after=50, to=60)
    job.run(6, (1,), after=50, to=70, bits="other")


def fork_that_is_thrown_away(job: LedgerJob) -> None:
    """Two histories, and the later generation goes on with the state of the earlier."""
    fork(job)
    job.run(7, (0, 1), after=60, to=65)


def jump(job: LedgerJob) -> None:
    job.run(1, (0, 1), after=0, to=10)
    job.run(2, (0, 1), after=14, to=20)


def begin_in_the_middle(job: LedgerJob) -> None:
    job.run(1, (0, 1), after=7, to=10)


def repeat_within_a_generation(job: LedgerJob) -> None:
    job.run(1, (0, 1), after=0, to=10)
    job.run(1, (0,), after=4, to=5)


def skip_within_a_generation(job: LedgerJob) -> None:
    job.run(1, (0, 1), after=0, to=4)
    job.run(1, (0, 1), after=5, to=8)


def end_at_two_places(job: LedgerJob) -> None:
    job.run(1, (0, 1), after=0, to=4)
    job.worker((0, 0)).write_done(5, 1, 50)
    job.worker((0, 1)).write_done(5, 1, 48)


def draw_by_another_seed(job: LedgerJob) -> None:
    job.seeds[0, 1] = 7
    job.run(1, (0, 1, 2), after=0, to=8)


@pytest.mark.parametrize(
    ("plant", "match"),
    [
        (restart_silently, r"generation 3 begins after step 0, .* generation 2 had done step 177: "
         "177 steps were lost, but no ledger reports a restore"),
        (fork, "generation 6 begins after step 50, but generation 5 had done step 60"),
        (fork_that_is_thrown_away, "generation 6 begins after step 50, but generation 5 had"),
        (jump, "generation 2 begins after step 14, but generation 1 had done step 10: no ledger"),
        (begin_in_the_middle, "generation 1 begins after step 7, but no ledger reports a resume"),
        (repeat_within_a_generation, r"chip \(0, 0\) did step 5 of generation 1 after step 10"),
        (skip_within_a_generation, "generation 1 did steps 1 to 8, but the ledgers lack 1 of them"),
        (end_at_two_places, "step 5 of generation 1 ends at sample 48 for one chip, and at 50"),
        (draw_by_another_seed, r"chip \(0, 1\) used 37 samples in the order of seed 7, but most"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(
    tmp_path: Path, plant: Callable[[LedgerJob], None], match: str
) -> None:
    job = LedgerJob(tmp_path)
    plant(job)
    job.close()

    found = audit(tmp_path)

    assert found.is_wrong
    assert any(re.match(match, fault) for fault in found.faults), found.faults


def test_a_step_that_a_check_made_void_is_tried_again_and_its_samples_are_used_once(
    tmp_path: Path,
) -> None:
    job = LedgerJob(tmp_path)
    job.run(1, range(3), after=0, to=4)
    for chip in ((0, 0), (0, 1), (0, 2)):
        job.worker(chip).write_try(5, 1, Share(41, 44, 10), None)  # of speeds that were mended
    job.run(1, range(3), after=4, to=6)
    job.close()

    found = audit(tmp_path)

    assert (found.steps, found.used, found.lost, found.repeated) == (6, 60, 0, 0)
    assert found.faults == ()


def test_samples_that_are_not_those_of_their_places_are_found_even_if_the_seed_is_right(
    tmp_path: Path,
) -> None:
    job = LedgerJob(tmp_path)
    honest(job)
    path = job.file(1)
    text = path.read_text()
    path.write_text(re.sub(r"(try 8 2 \d+ \d+ 10) \d+", r"\1 12345", text))

    found = audit(tmp_path)

    assert found.faults == (
        "chip (0, 1) used other samples than those of its share in 1 steps, first in step 8",
    )


def test_a_restore_that_was_told_is_counted_as_redone_and_loses_nothing(tmp_path: Path) -> None:
    job = LedgerJob(tmp_path)
    job.run(2, (0, 1), after=0, to=177)
    job.replace((0, 0))
    job.replace((0, 1))
    for column in (0, 1):
        job.worker((0, column)).write_restore(150, 3)
    job.run(3, (0, 1), after=150, to=200, bits="again")
    job.close()

    found = audit(tmp_path)

    assert not found.is_wrong
    assert (found.steps, found.used, found.redone) == (200, 200 * BATCH, 27)
    assert found.restores == (Restore(generation=3, step=150, lost=177),)
    assert found.replicas_equal is True


def test_steps_that_were_lost_and_not_done_again_do_not_count(tmp_path: Path) -> None:
    job = LedgerJob(tmp_path)
    job.run(2, (0, 1), after=0, to=20)
    job.worker((0, 0)).write_restore(10, 3)
    job.run(3, (0,), after=10, to=15)
    job.close()

    found = audit(tmp_path)

    assert not found.is_wrong
    assert (found.steps, found.used, found.redone) == (15, 15 * BATCH, 10)


def test_a_restore_to_another_step_than_was_told_is_found(tmp_path: Path) -> None:
    job = LedgerJob(tmp_path)
    job.run(2, (0, 1), after=0, to=20)
    job.worker((0, 0)).write_restore(10, 3)
    job.run(3, (0, 1), after=5, to=25)
    job.close()

    (fault,) = audit(tmp_path).faults

    assert "generation 3 begins after step 5, but generation 2 had done step 20" in fault


def test_when_a_restore_took_no_step_the_lost_state_may_count_again(tmp_path: Path) -> None:
    job = LedgerJob(tmp_path)
    job.run(2, (0, 1), after=0, to=20)
    job.worker((0, 0)).write_restore(10, 3)
    job.run(4, (0, 1), after=20, to=25)
    job.close()

    found = audit(tmp_path)

    assert not found.is_wrong
    assert found.restores == ()


def test_a_job_may_begin_where_a_resume_was_told(tmp_path: Path) -> None:
    job = LedgerJob(tmp_path)
    for column in (0, 1):
        job.worker((0, column)).write_resume(60, 60 * BATCH)
    job.run(1, (0, 1), after=60, to=80)
    job.close()

    found = audit(tmp_path)

    assert not found.is_wrong
    assert (found.steps, found.used) == (20, 20 * BATCH)


def test_two_digests_of_a_step_in_one_generation_are_found_even_if_the_step_was_lost(
    tmp_path: Path,
) -> None:
    job = LedgerJob(tmp_path)
    job.run(1, (0, 1), after=0, to=5)
    job.worker((0, 1)).write_hold(5, 1, "other")
    job.worker((0, 0)).write_restore(2, 2)
    job.run(2, (0, 1), after=2, to=8, bits="again")
    job.close()

    assert audit(tmp_path).split == (5,)


@pytest.mark.parametrize(("twin", "split"), [("0.one", ()), ("0.other", (5,))])
def test_with_tiles_only_chips_of_one_colour_must_hold_the_same(
    tmp_path: Path, twin: str, split: tuple[int, ...]
) -> None:
    job = LedgerJob(tmp_path)
    job.run(1, (0, 1, 2), after=0, to=5, bits="")
    for column, bits in enumerate(["0.one", "1.two", twin]):
        job.worker((0, column)).write_hold(5, 1, bits)
    job.close()

    assert audit(tmp_path).split == split


def test_the_check_takes_microseconds_for_each_line(tmp_path: Path) -> None:
    n_chips, n_steps = 16, 1000
    job = LedgerJob(tmp_path, batch=64, n_samples=1797)
    job.run(1, range(n_chips), after=0, to=n_steps)
    job.close()

    started = time.process_time()
    found = audit(tmp_path)

    assert found.used == 64 * n_steps
    # Measured: 2.2 us a line, so that a million lines take seconds.
    assert (time.process_time() - started) / (3 * n_chips * n_steps) < 50e-6


def members(chips: int, *, to: int, number: int = 1) -> list[Event]:
    """Return the events of a generation of so many chips that does steps 1 to `to`."""
    begun = GenerationBegan(number, tuple((0, column) for column in range(chips)), 0)
    return [begun, *(StepFinished(step, number, chips, 1.0, 10) for step in range(1, to + 1))]


def test_a_member_without_a_ledger_is_unchecked_and_nobody_is_accused(tmp_path: Path) -> None:
    job = LedgerJob(tmp_path)
    job.run(1, range(3), after=0, to=8)
    next(tmp_path.glob("0-1.*")).unlink()

    found = audit(tmp_path, members(3, to=8))

    assert found.without_ledger == ((0, 1),)
    assert (found.lost, found.repeated, found.faults) == (0, 0, ())
    assert found.replicas_equal is None
    (words,) = found.unchecked
    assert "what chip (0, 1) did in steps 1 to 8, as a member of generation 1" in words


def test_when_all_ledgers_are_gone_every_member_is_unchecked(tmp_path: Path) -> None:
    found = audit(tmp_path / "gone", members(2, to=8))

    assert found.steps == 0
    assert found.without_ledger == ((0, 0), (0, 1))
    assert not found.is_wrong


def test_members_with_ledgers_and_generations_without_a_step_need_no_words(tmp_path: Path) -> None:
    job = LedgerJob(tmp_path)
    job.run(1, range(2), after=0, to=8)
    empty = GenerationBegan(2, ((0, 0), (0, 1), (0, 2)), 8)

    found = audit(tmp_path, [*members(2, to=8), empty])

    assert found.without_ledger == ()
    assert found.unchecked == ()
    assert found.replicas_equal
