"""The protocol with a shared optimizer under one simulated clock; its mutants are caught.

A seed that fails is replayed, with all that happened, by
`python tests/helpers/simulate_protocol.py --sharded --seed SEED --trace`.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

pytest.importorskip("torch")

from meshmend.train.sharding import sharded_update
from meshmend.train.sharding.sharded_update import ShardedUpdate
from simulation.runs import check_caught, parts_of, problems, simulate

N_SEEDS = 120  # in `make test`; `make slow` does fifty thousand
N_PARTS = 4

Patch = pytest.MonkeyPatch

run = partial(simulate, is_sharded=True)
run_of = cache(run)  # of the protocol as it is: no mutant may ask


@pytest.mark.parametrize("seeds", parts_of(0, N_SEEDS, N_PARTS), ids=str)
def test_whatever_breaks_no_chip_steps_with_a_state_of_another_history(seeds: range) -> None:
    assert list(problems(seeds, run_of)) == []


@pytest.mark.parametrize("seed", [1383, 1539])
def test_a_member_that_lacks_a_part_makes_room_for_a_chip_that_waits_with_the_state(
    seed: int,
) -> None:
    """The job stood still: the state counted on a chip that was no member, and nothing changed."""
    assert run_of(seed).problem == ""


def test_a_part_of_a_later_state_is_not_given_up_without_a_word() -> None:
    """A coordinator without a record went on after step 0, while others had parts of step 2."""
    assert run_of(1643).problem == ""


@pytest.mark.slow
@pytest.mark.parametrize("seeds", parts_of(N_SEEDS, 50_000, 50), ids=str)
def test_fifty_thousand_seeds(seeds: range) -> None:
    assert list(problems(seeds, run_of)) == []


def test_the_seeds_see_states_that_only_a_shared_optimizer_loses() -> None:
    """Otherwise the faults would be too mild to prove anything."""
    plain, shared = (
        sum(each(seed).n_restores for seed in range(20)) for each in (simulate, run_of)
    )

    assert shared > plain


def believe_any_name(patch: Patch) -> None:
    """A state of an earlier step, or of a step that did not count, is taken for that of now."""
    patch.setattr(sharded_update._Holding, "of", lambda holding, holder: holding.spans)


def never_step_late(patch: Patch) -> None:
    """A chip whose gather failed leaves its state as it was, though the step counts."""

    def join(update: Any, holder: Any, state: Any, *, keeps: bool) -> None:
        update._replica.take_state(state)
        update._optimizers.name = holder.name

    patch.setattr(ShardedUpdate, "_join", join)


def miss_no_part(patch: Patch) -> None:
    """A part of the state that is nowhere is not missed."""
    patch.setattr(ShardedUpdate, "_check_complete", lambda update, held, go: None)


def count_before_all_have_gathered(patch: Patch) -> None:
    """A step counts though the new weights of others have not come."""

    def gather(update: Any) -> None:
        name = update._exchange.generation_number, update._replica.step_number + 1
        update._optimizers.trial(name, update._shares)

    patch.setattr(ShardedUpdate, "gather", gather)


# A chip that forgets a state while others still wait for theirs is not among them: the state is
# then lost and read from a checkpoint, which the rules allow. `tests/train/test_sharded_update.py`
# finds that flaw: there a board dies in each collective of a recovery, and nothing may be lost.
MUTANTS: tuple[Callable[[Patch], None], ...] = (
    believe_any_name,
    never_step_late,
    miss_no_part,
    count_before_all_have_gathered,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_shared_update_with_a_flaw_is_caught(
    mutant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    """The test of the test: the seeds pass without the flaw, and one of them fails with it."""
    mutant(monkeypatch)

    check_caught(1000, run)
