"""A sharded update survives deaths in each of its collectives, also while it recovers from one."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from meshmend.train.sharding.layerwise import LAMB  # noqa: E402  # it needs torch
from sharded_chips import Death, ThreadJob, plain_weights  # noqa: E402  # it needs torch

STEPS = 3
BOARDS = [frozenset({(row, 0), (row, 1)}) for row in range(3)]


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


def lamb(parameters: Any) -> Any:
    return LAMB(parameters, lr=0.01)


N_CALLS = 10  # collectives of a generation without a death
WANTED = plain_weights(STEPS, adamw)
WANTED_OF_LAMB = plain_weights(STEPS, lamb)


def check(job: ThreadJob) -> None:
    """Check that all chips have the weights of a run without chips, and mirrors of all states."""
    for each in job.chips.values():
        assert each.step_number == STEPS
        assert all(torch.equal(*pair) for pair in zip(each.parameters, WANTED, strict=True))
    check_mirrors(job)


def check_lamb(job: ThreadJob) -> None:
    """Check that all chips have the same bits, near those of a run without chips."""
    first = next(iter(job.chips.values())).parameters
    for each in job.chips.values():
        assert each.step_number == STEPS
        assert all(torch.equal(*pair) for pair in zip(each.parameters, first, strict=True))
    assert all(torch.allclose(*pair, rtol=1e-6) for pair in zip(first, WANTED_OF_LAMB, strict=True))
    check_mirrors(job)


def check_mirrors(job: ThreadJob) -> None:
    """Check that owner and mirror of each share keep the same bits, on different boards."""
    ranks = [job.chips[chip] for chip in sorted(job.chips)]
    shares = ranks[0].update._shares
    for owner, mirror in enumerate(shares.mirror_of):
        span = shares.owned(owner)
        one, other = (ranks[rank].sharded.packed_span(span) for rank in (owner, mirror))
        assert one.tobytes() == other.tobytes()
        assert ranks[owner].chip[0] != ranks[mirror].chip[0]


def test_without_a_death_all_chips_have_the_weights_of_an_unsharded_optimizer() -> None:
    job = ThreadJob(3, adamw)

    assert job.run(STEPS) == N_CALLS
    check(job)


def deaths(n_calls: int, board: frozenset[Any]) -> list[Death]:
    """Return the deaths of a board in each collective, with no, one, or all finishers."""
    others = sorted(frozenset.union(*BOARDS) - board)
    return [
        Death(number, board, has_contributed=has_contributed, finishers=frozenset(finishers))
        for number in range(n_calls)
        for has_contributed, finishers in (
            (False, ()),
            (True, ()),
            (True, others[:1]),
            (True, others[1:]),
            (True, others),
        )
    ]


def die_and_come_back(death: Death) -> None:
    """Check that a board may die so and come back before the last step."""
    job = ThreadJob(3, adamw)
    job.run(STEPS, death)
    job.run(STEPS - 1)
    job.repair()
    job.run(STEPS)

    check(job)


def test_a_board_may_die_in_any_collective_and_come_back() -> None:
    for death in deaths(N_CALLS, BOARDS[1])[2::4]:
        die_and_come_back(death)


def test_a_board_may_die_in_the_sum_of_norms_and_in_any_other_collective_of_lamb() -> None:
    job = ThreadJob(3, lamb)
    n_calls = job.run(STEPS)
    assert n_calls == N_CALLS + STEPS
    check_lamb(job)
    for death in deaths(n_calls, BOARDS[1])[1::4]:
        job = ThreadJob(3, lamb)
        job.run(STEPS, death)
        job.run(STEPS - 1)
        job.repair()
        job.run(STEPS)
        check_lamb(job)


@pytest.mark.slow
@pytest.mark.parametrize("board", BOARDS)
def test_any_board_may_die_in_any_collective_and_come_back(board: frozenset[Any]) -> None:
    for death in deaths(N_CALLS, board):
        die_and_come_back(death)


def break_twice(first: Death, number: int) -> None:
    """Check that a recovery may break on the way: one chip goes on, the others do not."""
    job = ThreadJob(3, adamw)
    job.run(STEPS, first)
    one = frozenset(sorted(job.chips)[1:2])
    job.run(STEPS, Death(number, frozenset(), has_contributed=True, finishers=one))
    job.run(STEPS)

    check(job)


def test_a_recovery_may_break_in_any_of_its_collectives() -> None:
    for number in range(8):
        break_twice(Death(6, BOARDS[0]), number)


@pytest.mark.slow
def test_a_recovery_from_any_death_may_break_in_any_of_its_collectives() -> None:
    for board in BOARDS:
        for first in deaths(N_CALLS, board)[::3]:
            for number in range(8):
                break_twice(first, number)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_boards_that_die_one_after_another_and_come_back_never_give_wrong_weights(
    data: st.DataObject,
) -> None:
    job = ThreadJob(3, adamw)
    for _ in range(data.draw(st.integers(1, 4))):
        if len(job.chips) < 6:
            job.repair()
        victims = data.draw(st.sampled_from(BOARDS))
        others = sorted(set(job.chips) - victims)
        death = Death(
            data.draw(st.integers(0, 14)),
            victims,
            has_contributed=data.draw(st.booleans()),
            finishers=frozenset(data.draw(st.sets(st.sampled_from(others)))),
        )
        job.run(data.draw(st.integers(1, STEPS)), death)
        if any(each.has_lost for each in job.chips.values()):
            return
    job.run(STEPS)

    if not any(each.has_lost for each in job.chips.values()):
        check(job)


def test_the_loss_of_owner_and_mirror_is_told_and_changes_no_weights() -> None:
    job = ThreadJob(3, adamw)
    job.run(2)
    weights = [each.detach().clone() for each in job.chips[0, 0].parameters]
    job.chips = {chip: each for chip, each in job.chips.items() if chip[0] == 0}
    job.run(STEPS)

    assert all(each.has_lost and each.update.has_lost_state for each in job.chips.values())
    after = job.chips[0, 0].parameters
    assert all(torch.equal(*pair) for pair in zip(weights, after, strict=True))


def test_a_first_state_is_complete_on_a_new_chip_if_its_owner_and_mirror_are_gone() -> None:
    """Nothing was trained yet, so nothing is lost: a new chip has the same first state."""
    job = ThreadJob(3, adamw)
    job.run(0)
    job.chips = {chip: each for chip, each in job.chips.items() if chip[0] == 0}
    job.repair()
    job.run(STEPS)

    assert not any(each.has_lost for each in job.chips.values())
    check(job)


def test_a_first_state_completes_nothing_after_a_step() -> None:
    job = ThreadJob(3, adamw)
    job.run(1)
    job.chips = {chip: each for chip, each in job.chips.items() if chip[0] == 0}
    job.repair()
    job.run(STEPS)

    assert all(each.has_lost for each in job.chips.values())
