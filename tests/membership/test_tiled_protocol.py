"""The protocol with replicas of several chips under one simulated clock; its mutants are caught.

A seed that fails is replayed, with all that happened, by
`python tests/helpers/simulate_protocol.py --few-tiles --seed SEED --trace`, or with `--tiles`.
"""

from collections.abc import Callable, Iterable
from functools import partial

import pytest
from msgspec.structs import replace

from meshmend.config import Timing
from meshmend.membership.admission import Admission
from meshmend.membership.generation import Generation
from meshmend.membership.history import CoordinatorRecord, History
from meshmend.membership.job import JobFingerprint
from meshmend.membership.membership import Decision, Membership
from meshmend.membership.messages import FRESH, Status
from meshmend.topology.failures import Chip
from meshmend.topology.text import parse_mesh
from meshmend.train.core.worker_loop import WorkerLoop
from simulation.runs import check_caught, parts_of, problems, simulate
from simulation.simulated_worker import SimulatedReplica, SimulatedWorker
from simulation.world import Scenario

N_SEEDS = 1000  # of short jobs, in `make test`; `make slow` does twenty thousand longer ones
N_PARTS = 4
N_LONGER = 60
N_MOMENTS = 100

Patch = pytest.MonkeyPatch

FEW_TILES, TILES, MOMENTS = (
    partial(simulate, scenario_of=each)
    for each in (Scenario.of_few_tiles, Scenario.of_tiles, Scenario.of_moments)
)


@pytest.mark.parametrize("seeds", parts_of(0, N_SEEDS, N_PARTS), ids=str)
def test_whatever_breaks_tiles_keep_one_history_and_every_part_of_it(seeds: range) -> None:
    """Short jobs: with as much processor time they find more of the flaws below than long ones."""
    assert list(problems(seeds, FEW_TILES)) == []


@pytest.mark.parametrize("seeds", parts_of(0, N_MOMENTS, 2), ids=str)
def test_chips_that_die_at_the_worst_moments_keep_nobody_waiting_who_could_go_on(
    seeds: range,
) -> None:
    """Nobody is repaired: whole tiles that hold the state go on without a wait for the dead."""
    assert list(problems(seeds, MOMENTS)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seeds", parts_of(0, 10_000, 10), ids=str)
def test_ten_thousand_seeds_of_chips_that_die_at_the_worst_moments(seeds: range) -> None:
    assert list(problems(seeds, MOMENTS)) == []


@pytest.mark.parametrize("seed", [2502, 3298, 11263])
def test_a_job_that_goes_back_to_a_checkpoint_begins_there_once(seed: int) -> None:
    """The decision to go back formed a second generation, which found the state lost again."""
    run = TILES(seed)

    assert not run.problem
    assert run.n_restores <= 3


def test_chips_that_hold_parts_of_one_state_go_on_though_a_generation_lies_between_them() -> None:
    """A chip began a generation with the state that another one, which waited, still held."""
    assert not TILES(4234).problem


@pytest.mark.parametrize("seed", [3217, 12163])
def test_a_job_whose_only_checkpoint_is_damaged_fails_when_nobody_is_left_to_come(
    seed: int,
) -> None:
    """One chip had not read it yet, and so the job waited for a chip of another colour for ever."""
    assert not TILES(seed).problem


def test_a_job_goes_on_if_one_chip_of_its_only_tile_has_begun_and_the_other_has_not() -> None:
    """A coordinator lost its record just then: each chip held the first state as another one."""
    assert not FEW_TILES(216).problem


def test_a_checkpoint_that_was_gone_back_to_counts_though_a_chip_died_before_a_step() -> None:
    """The step that had been given up counted again, and the job waited for it once more."""
    assert not MOMENTS(1189).problem


def test_a_state_that_was_given_up_does_not_count_again() -> None:
    """It hid the parts of the state that the job had gone on with, which read a checkpoint."""
    assert not MOMENTS(9354).problem


def test_a_step_that_was_given_up_is_not_waited_for_again() -> None:
    """The chips that went back to the step before it died before they could do it again."""
    assert not MOMENTS(1610).problem


@pytest.mark.slow
@pytest.mark.parametrize("seeds", parts_of(0, 20_000, 20), ids=str)
def test_twenty_thousand_seeds(seeds: range) -> None:
    assert list(problems(seeds, TILES)) == []


@pytest.mark.parametrize(
    ("holders", "members"),
    [
        ([(0, 1), (0, 4)], [(0, 1), (0, 2), (0, 3), (0, 4)]),  # not 0 1 . 3 4, which falls apart
        ([(0, 0), (0, 1)], [(0, 0), (0, 1), (0, 2), (0, 3)]),
    ],
)
def test_tiles_are_laid_so_that_one_part_holds_all_colours(
    holders: list[Chip], members: list[Chip]
) -> None:
    ours = JobFingerprint("1", 1, 1, 0, "", "", "", 1, "", tile="1x2")
    history = History(CoordinatorRecord("job", fingerprint=ours))
    membership = Membership(parse_mesh("1x5"), Timing(), board=(1, 1), history=history)

    for at in range(5):
        chip = (0, at)
        status = Status(state_version=1, step=3) if chip in holders else Status()
        membership.arrive(chip, ("host", at), status=status, memory=None, now=0.0)
    generation = membership.decide(9.0).generation

    assert generation is not None
    assert list(generation.chips) == members


def begun_on(mesh: str) -> tuple[Membership, Generation, Status]:
    """Return a job with tiles of 1x2 after step 3, its generation, and what its chips said."""
    ours = JobFingerprint("1", 1, 1, 0, "", "", "", 1, "", tile="1x2")
    history = History(CoordinatorRecord("job", fingerprint=ours))
    membership = Membership(parse_mesh(mesh), Timing(), board=(1, 1), history=history)
    for at, chip in enumerate(parse_mesh(mesh).live):
        membership.arrive(chip, ("host", at), status=Status(), memory=None, now=0.0)
    first = membership.decide(9.0).generation
    assert first is not None
    for chip in first.chips:
        membership.update_status(chip, Status(generation=first.number, ready=True), 9.0)
    assert membership.decide(9.0).go is not None
    done = Status(generation=first.number, ready=True, state_version=first.number, step=3)
    for chip in first.chips:
        membership.update_status(chip, done, 9.0)
    return membership, first, done


def test_members_that_form_no_tile_are_told_to_wait_and_go_on_when_a_tile_is_whole() -> None:
    """Their loops must not take the sums that fail meanwhile for errors of the script."""
    membership, first, _ = begun_on("1x4")

    membership.leave((0, 1), "gone", 10.0)
    membership.leave((0, 2), "gone", 10.0)

    assert membership.decide(11.0) == Decision(stands_still=True)
    assert membership.decide(12.0) == Decision()
    assert membership.active_members == ()
    assert membership.reasons_to_wait() == dict.fromkeys(
        [(0, 0), (0, 3)], "no whole tiles of 1x2 are left that hold the state"
    )
    membership.arrive((0, 2), ("host", 7), status=Status(), memory=None, now=13.0)
    assert membership.decide(14.0) == Decision()  # nobody in a tile has the first colour
    membership.arrive((0, 1), ("host", 8), status=Status(), memory=None, now=15.0)
    again = membership.decide(16.0).generation
    assert again is not None
    assert again.chips == first.chips


def left_with_the_last_tile(also: int | None) -> Membership:
    """Return a job of three tiles in a row: the middle one dies in step 4, then a chip of the next.

    The first tile has begun a generation after step 4, and has tried no step in it. The last one
    holds step 3, and `also` that step.
    """
    membership, _, done = begun_on("1x6")
    tried = replace(done, ready=False, also=4)
    membership.leave((0, 2), "gone", 10.0)
    membership.leave((0, 3), "gone", 10.0)
    for chip in [(0, 0), (0, 1)]:
        membership.update_status(chip, tried, 10.0)
    for chip in [(0, 4), (0, 5)]:
        membership.update_status(chip, replace(tried, also=also), 10.0)
    second = membership.decide(11.0).generation
    assert second is not None
    assert second.chips == ((0, 0), (0, 1))
    for chip in second.chips:
        entered = replace(tried, generation=second.number, ready=True)
        membership.update_status(chip, entered, 11.0)
    go = membership.decide(11.0).go
    assert go is not None
    assert go.step == 4
    begun = Status(generation=second.number, ready=False, state_version=second.number, step=4)
    membership.leave((0, 0), "gone", 12.0)
    membership.update_status((0, 1), begun, 12.0)
    return membership


def test_tiles_do_not_wait_for_a_chip_that_died_before_anybody_tried_a_step() -> None:
    """A chip that was up to date in that generation, and has stopped, proves that it took none."""
    membership = left_with_the_last_tile(also=4)

    again = membership.decide(13.0).generation

    assert again is not None
    assert again.chips == ((0, 4), (0, 5))


def test_parts_of_two_steps_are_no_state_and_the_job_goes_back_to_the_earlier_one() -> None:
    """Chips of each colour are left; but one colour of the step that counts died with its chips."""
    membership = left_with_the_last_tile(also=None)

    assert Decision(lost_step=4) in [membership.decide(at) for at in (13.0, 13.1)]
    (again,) = filter(None, (membership.decide(at).generation for at in (1e3, 1e4)))
    assert again.chips == ((0, 4), (0, 5))
    held = Status(generation=again.number, ready=True, state_version=1, step=3)
    for chip in again.chips:
        membership.update_status(chip, held, 1e4)
    decision = membership.decide(1e4)
    assert decision.go is not None
    assert (decision.go.step, decision.lost_step) == (3, 4)


@pytest.mark.parametrize("checkpoint", [2, None])
def test_a_job_that_lost_a_colour_waits_for_its_chips_if_there_is_a_checkpoint(
    checkpoint: int | None,
) -> None:
    """Chips of one colour cannot go back to it alone, however long they wait."""
    membership, _, done = begun_on("1x2")

    membership.leave((0, 1), "gone", 10.0)
    left = replace(done, ready=False, checkpoint=checkpoint)
    membership.update_status((0, 0), left, 10.0)

    lost = [membership.decide(at) for at in (11.0, 12.0)]
    late = [membership.decide(at) for at in (1e3, 1e4, 1e5)]

    assert Decision(lost_step=3) in lost
    if checkpoint is None:
        assert "no complete checkpoint" in late[0].failed
        return
    assert late == [Decision()] * 3
    asks_at = membership.settled_at()
    assert asks_at is not None
    assert asks_at > 1e5
    back = Status(checkpoint=checkpoint)
    membership.arrive((0, 1), ("host", 7), status=back, memory=None, now=2e5)
    (again,) = filter(None, (membership.decide(at).generation for at in (3e5, 4e5)))
    for chip in again.chips:
        membership.update_status(
            chip,
            replace(left if chip == (0, 0) else back, generation=again.number, ready=True),
            4e5,
        )
    go = membership.decide(5e5).go
    assert go is not None
    assert (go.step, go.restores, go.holders) == (2, True, again.chips)


def test_the_seeds_see_restores_and_steps_that_not_all_chips_have_done() -> None:
    """Otherwise the faults would be too mild to prove anything."""
    runs = [TILES(seed, traces=True) for seed in range(N_LONGER)]

    assert not any(run.problem for run in runs)
    assert any(run.n_restores for run in runs)
    assert sum(run.n_generations for run in runs) > 1.5 * len(runs)
    assert any("also=" in line and "also=None" not in line for run in runs for line in run.trace)


def let_any_holder_be_enough(patch: Patch) -> None:
    """A part of the mesh goes on though nobody there holds some of the colours."""
    patch.setattr(Membership, "_is_all", lambda membership, chips: any(True for _ in chips))


def count_colours_of_stale_states(patch: Patch) -> None:
    """A worker that the others went on without counts for the colour that it holds."""

    def is_all(membership: Membership, chips: Iterable[Chip]) -> bool:
        stale = [
            chip
            for chip, worker in membership.workers.items()
            if worker.status.state_version != FRESH
        ]
        found = list(chips)
        return bool(found) and IS_ALL(membership, [*found, *stale])

    patch.setattr(Membership, "_is_all", is_all)


IS_ALL = Membership._is_all


def count_a_step_before_all_have_done_it(patch: Patch) -> None:
    """A chip gives up its part of the state before a step though others may not have done it."""
    patch.setattr(SimulatedWorker, "await_all", lambda worker: None)


def keep_no_state_beside(patch: Patch) -> None:
    """A chip does not say that it has done a step, of which others have no part."""
    hidden = property(lambda loop: None, lambda loop, step: None)
    patch.setattr(WorkerLoop, "also", hidden, raising=False)


def forget_what_was_tried(patch: Patch) -> None:
    """A chip that is to go on after a step that it tried has dropped its part of it."""

    def settle(replica: SimulatedReplica, step: int) -> bool:
        replica.also = None
        return replica.state.step == step

    patch.setattr(SimulatedReplica, "settle", settle)


def let_spares_train(patch: Patch) -> None:
    """Chips in no tile are members."""
    patch.setattr(Membership, "_tile", None)
    patch.setattr(Admission, "_why_no_tile", lambda admission, tile: "")


def trust_cut_links_for_ever(patch: Patch) -> None:
    """The job waits although the links that no tile can do without work again."""
    patch.setattr(Membership, "_part_across_cuts", lambda membership: frozenset())


# Each with a seed that caught it, which is tried first; after a change of the protocol it may be
# another one.
MUTANTS: dict[Callable[[Patch], None], int] = {
    let_any_holder_be_enough: 9,
    count_colours_of_stale_states: 399,
    count_a_step_before_all_have_done_it: 83,
    keep_no_state_beside: 115,
    forget_what_was_tried: 235,
    let_spares_train: 0,
    trust_cut_links_for_ever: 158,
}
# Where chips are repaired, these only take time: a step that one chip has not done is lost.
MOMENTS_FOR = (count_a_step_before_all_have_done_it, keep_no_state_beside)


@pytest.mark.parametrize(
    ("mutant", "seed"), MUTANTS.items(), ids=[each.__name__ for each in MUTANTS]
)
def test_a_protocol_with_a_flaw_is_caught(
    mutant: Callable[[Patch], None], seed: int, monkeypatch: Patch
) -> None:
    """The test of the test: the seeds pass without the flaw, and one of them fails with it."""
    mutant(monkeypatch)

    check_caught(N_SEEDS, MOMENTS if mutant in MOMENTS_FOR else FEW_TILES, first=seed)
