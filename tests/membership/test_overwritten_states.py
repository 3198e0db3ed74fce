"""A new worker whose state is overwritten in part counts as no holder: in the simulated world.

The real transfer, `train/core/state_transfer.py`, writes over the tensors of a worker that has
never been up to date. Here a worker's loop does the same with simulated states.
"""

from collections.abc import Callable

import pytest

from meshmend.errors import StateLostError
from meshmend.membership.generation import Generation
from meshmend.membership.messages import FRESH, Go
from meshmend.train.core.worker_loop import WorkerLoop
from simulation.disk import State
from simulation.runs import check_caught, parts_of, problems
from simulation.simulated_worker import SimulatedReplica, SimulatedWorker

N_SEEDS = 120  # in `make test`; `make slow` does four hundred
VOID = -1  # the digest of a state that is a part of one and a part of another

Patch = pytest.MonkeyPatch
Overwrites = Callable[[WorkerLoop, Go], int | None]


def by_the_rule(loop: WorkerLoop, go: Go) -> int | None:
    """Return the step that a worker tells when its state is overwritten; None if it is not."""
    return go.step if loop.state_version == FRESH and go.step > 0 else None


def catch_up(
    worker: SimulatedWorker,
    go: Go,
    generation: Generation,
    *,
    overwrites: Overwrites,
    checks: bool = True,
) -> None:
    """Send or receive the state; a state that is overwritten is void until all of it has come."""
    replica, is_holder = worker.replica, worker.process.chip in go.holders
    if checks and is_holder and replica.state.digest == VOID:
        raise StateLostError("its state was overwritten in part")
    if len(go.holders) == len(generation.seats):
        return
    if not is_holder and (step := overwrites(worker.loop, go)) is not None:
        replica.state = State(step, 0, VOID)
    state = worker.peers.spread(replica.state if is_holder else None, go.holders)
    if not is_holder and replica.state.digest == VOID:
        replica.state = state
    elif not is_holder:
        replica.take_state(state)


def ignore_void(replica: SimulatedReplica, step: int) -> None:
    """Read a checkpoint; what is void is not given up."""
    if replica.state.digest == VOID:
        replica.state = State(0, 0, 0)
    RESTORE(replica, step)


RESTORE = SimulatedReplica.restore


def overwriting(patch: Patch, overwrites: Overwrites, *, checks: bool = True) -> None:
    patch.setattr(SimulatedReplica, "restore", ignore_void)
    patch.setattr(
        SimulatedWorker,
        "catch_up",
        lambda worker, go, generation: catch_up(
            worker, go, generation, overwrites=overwrites, checks=checks
        ),
    )


@pytest.mark.parametrize("seeds", parts_of(0, N_SEEDS, 2), ids=str)
def test_whatever_breaks_nobody_goes_on_from_half_a_state(seeds: range, monkeypatch: Patch) -> None:
    overwriting(monkeypatch, by_the_rule)

    assert list(problems(seeds)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seeds", parts_of(N_SEEDS, 400, 2), ids=str)
def test_more_seeds_in_which_nobody_goes_on_from_half_a_state(
    seeds: range, monkeypatch: Patch
) -> None:
    overwriting(monkeypatch, by_the_rule)

    assert list(problems(seeds)) == []


def of_earlier_states_too(loop: WorkerLoop, go: Go) -> int | None:
    """A worker that is a step behind may have the last state that is left."""
    return go.step


def test_a_state_that_may_still_count_is_not_overwritten(monkeypatch: Patch) -> None:
    overwriting(monkeypatch, of_earlier_states_too, checks=False)

    check_caught(200, first=44)
