"""The whole protocol under one simulated clock: it survives all seeds, its mutants do not.

A seed that fails is replayed, with all that happened, by
`python tests/helpers/simulate_protocol.py --seed SEED --trace`.
"""

from collections.abc import Callable
from functools import cache, partial

import pytest

from meshmend.membership import history as history_rules
from meshmend.membership.admission import Admission
from meshmend.membership.coordinator import Coordinator
from meshmend.membership.history import History
from meshmend.membership.job import JobFingerprint
from meshmend.membership.membership import Membership
from meshmend.membership.messages import FRESH, Go, Hello, Message, Status
from meshmend.membership.record_file import RecordSaver
from meshmend.topology.failures import Chip
from meshmend.train.core.worker_loop import WorkerLoop
from simulation import world
from simulation.network import NEVER
from simulation.runs import check_caught, parts_of, problems, simulate

N_SEEDS = 400  # in `make test`; `make slow` does fifty thousand
N_PARTS = 4
N_LARGE = 50  # on 1024 chips

Patch = pytest.MonkeyPatch

run_of = cache(simulate)  # of the protocol as it is: no mutant may ask


@pytest.mark.parametrize("seeds", parts_of(0, N_SEEDS, N_PARTS), ids=str)
def test_whatever_breaks_a_job_keeps_one_history_and_goes_on(seeds: range) -> None:
    assert list(problems(seeds, run_of)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seeds", parts_of(N_SEEDS, 50_000, 50), ids=str)
def test_fifty_thousand_seeds(seeds: range) -> None:
    assert list(problems(seeds)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seeds", parts_of(0, N_LARGE, 5), ids=str)
def test_a_thousand_chips_keep_one_history_whatever_breaks(seeds: range) -> None:
    assert list(problems(seeds, partial(simulate, scenario_of=world.Scenario.of_large))) == []


def test_a_seed_plays_the_same_history_again() -> None:
    one, other = (simulate(4, traces=True) for _ in range(2))

    assert one == other
    assert len(one.trace) > 100


def test_the_seeds_see_restores_and_jobs_that_fail() -> None:
    """Otherwise the faults would be too mild to prove anything."""
    runs = [run_of(seed) for seed in range(150)]

    assert any(run.n_restores for run in runs)
    assert sum(run.n_generations for run in runs) > 2 * len(runs)
    assert any(run_of(seed).is_failed_job for seed in range(N_SEEDS))


def let_anyone_begin(patch: Patch) -> None:
    """A new worker begins anew although others trained before."""
    patch.setattr(History, "is_holder", lambda history, status: True)
    patch.setattr(History, "knows_state", lambda history, process, status: True)


def never_miss_a_link(patch: Patch) -> None:
    """No end of a connection finds out that the other is silent."""
    patch.setattr(world, "LINK_TIMEOUT_S", NEVER)


def never_miss_a_worker(patch: Patch) -> None:
    """The coordinator waits for ever for a worker that hangs."""
    patch.setattr(Coordinator, "_drop_silent", lambda coordinator, timeout_s: None)
    patch.setattr(Coordinator, "_drop_stuck", lambda coordinator: None)


def accept_two_hellos(patch: Patch) -> None:
    """A worker may say twice on one connection who it is."""
    handle = Coordinator._handle_worker

    def handle_again(
        coordinator: Coordinator, connection: object, chip: Chip, message: Message
    ) -> None:
        if isinstance(message, Hello):
            connection.chip = None  # type: ignore[attr-defined]  # as the old code left it
            coordinator._handle_hello(connection, message)  # type: ignore[arg-type]
        else:
            handle(coordinator, connection, chip, message)  # type: ignore[arg-type]

    patch.setattr(Coordinator, "_handle_worker", handle_again)


def believe_every_number(patch: Patch) -> None:
    """A worker may speak of any generation."""
    patch.setattr(Admission, "_why_impossible", lambda admission, hello, status: "")


def compare_no_arguments(patch: Patch) -> None:
    """A worker with another batch is let in."""
    patch.setattr(JobFingerprint, "difference", lambda ours, theirs: "")


def begin_before_all_are_ready(patch: Patch) -> None:
    """The word to begin is given as soon as a generation is made."""

    def begin_when_ready(membership: Membership, now: float) -> Go | None:
        generation = membership.generation
        if generation is None or membership.go is not None:
            return None
        if not all(chip in membership.workers for chip in generation.chips):
            return None
        best = max(max(membership._counting_states_of(chip)) for chip in generation.chips)
        holders = tuple(
            chip for chip in generation.chips if best in membership._counting_states_of(chip)
        )
        membership.go = Go(generation.number, best[1], holders[:1])
        membership.history.begin(generation, version=best[0], step=best[1])
        return membership.go

    patch.setattr(Membership, "_begin_when_ready", begin_when_ready)


def accept_stale_workers(patch: Patch) -> None:
    """A worker that the others went on without gives its old state to them."""

    def is_holder(history: History, status: Status) -> bool:
        return status.state_version != FRESH or history.latest == FRESH

    patch.setattr(History, "is_holder", is_holder)


def keep_no_record(patch: Patch) -> None:
    """A coordinator that is started again knows nothing of the one before."""
    patch.setattr(RecordSaver, "save", lambda saver, record: None)


def forget_who_is_turned_away(patch: Patch) -> None:
    """A worker that was silent for a moment has to throw away what it holds."""
    join = WorkerLoop._join

    def join_as_new(loop: WorkerLoop) -> None:
        loop.state_version = FRESH
        join(loop)

    patch.setattr(WorkerLoop, "_join", join_as_new)


def restore_any_state(patch: Patch) -> None:
    """A worker that the others went on without gives back a step that they did again."""

    def restorable(history: History, status: Status) -> tuple[tuple[int, int], ...]:
        held = (status.step, status.state_version) if status.state_version != FRESH else None
        saved = (status.checkpoint, FRESH) if status.checkpoint is not None else None
        return tuple(state for state in (held, saved) if state is not None)

    patch.setattr(History, "restorable", restorable)


def use_numbers_again(patch: Patch) -> None:
    """A generation may have the number of one that came before."""
    patch.setattr(History, "use_number", lambda history, number: None)


def believe_no_denial(patch: Patch) -> None:
    """A generation that took no step counts for ever."""
    patch.setattr(history_rules, "_proves_no_step", lambda *_, has_part: False)


def believe_every_denial(patch: Patch) -> None:
    """A member that comes back proves that its generation took no step."""
    patch.setattr(
        history_rules,
        "_proves_no_step",
        lambda process, _, begun, has_part: not begun.is_confirmed and process in begun.members,
    )


# Each with a seed that caught it, which is tried first; after a change of the protocol it may be
# another one.
MUTANTS: dict[Callable[[Patch], None], int] = {
    let_anyone_begin: 6,
    never_miss_a_link: 45,
    never_miss_a_worker: 13,
    accept_two_hellos: 85,
    believe_every_number: 85,
    compare_no_arguments: 6,
    begin_before_all_are_ready: 4,
    accept_stale_workers: 7,
    keep_no_record: 136,
    forget_who_is_turned_away: 42,
    restore_any_state: 154,
    use_numbers_again: 0,
    believe_no_denial: 10,
    believe_every_denial: 42,
}


@pytest.mark.parametrize(
    ("mutant", "seed"), MUTANTS.items(), ids=[each.__name__ for each in MUTANTS]
)
def test_a_protocol_with_a_flaw_is_caught(
    mutant: Callable[[Patch], None], seed: int, monkeypatch: Patch
) -> None:
    """The test of the test: the seeds pass without the flaw, and one of them fails with it."""
    mutant(monkeypatch)

    check_caught(N_SEEDS, first=seed)
