"""Whatever breaks, all chips at one step know the same speeds of links; other ways are caught.

A seed that fails is replayed, with all that happened, by
`python tests/helpers/simulate_protocol.py --links --seed SEED --trace`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from simulation.link_speeds import SimulatedLinkSpeeds
from simulation.runs import check_caught, parts_of, problems, simulate
from simulation.simulated_worker import SimulatedWorker

N_SEEDS = 80  # in `make test`; `make slow` does two thousand

Patch = pytest.MonkeyPatch

run_of = partial(simulate, watches_links=True)


def test_all_chips_at_one_step_know_the_same_links() -> None:
    assert list(problems(range(N_SEEDS), run_of)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seeds", parts_of(N_SEEDS, 2_000, 5), ids=str)
def test_two_thousand_seeds_in_which_links_are_slow(seeds: range) -> None:
    assert list(problems(seeds, run_of)) == []


def test_the_seeds_find_slow_links_and_such_that_are_fast_again() -> None:
    found = []
    for seed in range(20):
        trace = run_of(seed, traces=True).trace
        found += [line.rsplit("=")[-1] for line in trace if " finds link:" in line]

    assert len(found) > 20
    assert {"0.25", "1.0"} <= set(found)


def know_at_once(patch: Patch) -> None:
    """What a look finds is a part of the state before the step, which may fail on some chips."""
    look, attempt = SimulatedLinkSpeeds.look, SimulatedWorker._attempt
    workers: dict[SimulatedLinkSpeeds | None, SimulatedWorker] = {}

    def attempt_known(worker: SimulatedWorker) -> None:
        workers[worker.links] = worker
        attempt(worker)

    def look_and_know(links: SimulatedLinkSpeeds, known: str) -> None:
        look(links, known)
        replica = workers[links].replica
        replica.state = replace(replica.state, links=links.found(known))

    patch.setattr(SimulatedWorker, "_attempt", attempt_known)
    patch.setattr(SimulatedLinkSpeeds, "look", look_and_know)


def begin_with_own_links(patch: Patch) -> None:
    """A generation begins with what each chip found itself, whatever the state says."""
    look = SimulatedLinkSpeeds.look
    own: dict[SimulatedLinkSpeeds, str] = {}

    def look_at_own(links: SimulatedLinkSpeeds, known: str) -> None:
        look(links, own.get(links, known))
        own[links] = links.found(known)

    patch.setattr(SimulatedLinkSpeeds, "look", look_at_own)


MUTANTS: dict[Callable[[Patch], None], int] = {know_at_once: 17, begin_with_own_links: 22}  # seeds


@pytest.mark.parametrize("mutant", MUTANTS, ids=[each.__name__ for each in MUTANTS])
def test_another_way_to_know_is_caught(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)

    check_caught(N_SEEDS, run_of, first=MUTANTS[mutant], problem="knows other links")
