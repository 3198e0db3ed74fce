"""A chip that computes wrong numbers is turned away, and never another one, whatever else breaks.

A seed that fails is replayed by `simulate(SEED, scenario_of=Scenario.of_wrong, traces=True)`.
"""

from collections.abc import Callable
from functools import cache, partial

import pytest

from meshmend.membership.coordinator import Coordinator
from meshmend.train.core import share_checks
from meshmend.train.core.share_checks import Dispute, ShareChecks
from simulation.runs import check_caught, parts_of, problems, simulate
from simulation.world import Scenario

N_SEEDS = 40  # in `make test`; `make slow` does four thousand
N_PARTS = 2

Patch = pytest.MonkeyPatch

run = partial(simulate, scenario_of=Scenario.of_wrong)
run_of = cache(run)  # of the protocol as it is: no mutant may ask


@pytest.mark.parametrize("seeds", parts_of(0, N_SEEDS, N_PARTS), ids=str)
def test_only_a_chip_that_was_wrong_is_turned_away_and_the_job_goes_on(seeds: range) -> None:
    assert list(problems(seeds, run_of)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seeds", parts_of(N_SEEDS, 4_000, 10), ids=str)
def test_four_thousand_seeds_with_a_wrong_chip(seeds: range) -> None:
    assert list(problems(seeds, run_of)) == []


def test_the_seeds_see_chips_turned_away_and_jobs_that_go_back() -> None:
    runs = [run_of(seed) for seed in range(20)]

    assert sum(bool(run.expelled) for run in runs) > 10
    assert any(run.n_restores for run in runs)


def trust_one_accuser(patch: Patch) -> None:
    """The coordinator turns away whomever a single chip accuses; a wrong one accuses others."""
    judge = ShareChecks.judge

    def accuse_another(checks: ShareChecks, *told: object) -> object:
        finding = judge(checks, *told)  # type: ignore[arg-type]
        is_wrong = checks._exchange.rank in finding.wrong
        other = (checks._exchange.rank + 1) % checks._exchange.mesh.n_live
        return share_checks.Finding(is_void=True, wrong=(other,)) if is_wrong else finding

    def hear(coordinator: Coordinator, accuser: object, status: object) -> None:
        generation = coordinator._membership.generation
        for accused in getattr(status, "wrong", ()):
            if generation is not None and accused in coordinator._worker_of:
                coordinator._expel(coordinator._worker_of[accused], accused)

    patch.setattr(ShareChecks, "judge", accuse_another)
    patch.setattr(Coordinator, "_hear_accusations", hear)


def blame_the_checked_one(patch: Patch) -> None:
    """Of two that differ, it is always the one that was checked."""

    def owner(dispute: Dispute, votes: object) -> int:
        return dispute.owner

    patch.setattr(share_checks, "wrong_one", owner)


@pytest.mark.parametrize("mutant", [trust_one_accuser, blame_the_checked_one])
def test_mutants_are_caught(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)

    check_caught(30, run)
