"""Whatever breaks, no two chips run a step with different plans; other agreements are caught.

A seed that fails is replayed, with all that happened, by
`python tests/helpers/simulate_protocol.py --plans --seed SEED --trace`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from meshmend.train.core.plan_agreement import PlanAgreement
from simulation.plans import SimulatedPlans
from simulation.runs import check_caught, parts_of, problems, simulate

N_SEEDS = 120  # in `make test`; `make slow` does four thousand
N_PARTS = 2

Patch = pytest.MonkeyPatch

run_of = partial(simulate, swaps_plans=True)


@pytest.mark.parametrize("seeds", parts_of(0, N_SEEDS, N_PARTS), ids=str)
def test_all_chips_of_a_generation_swap_plans_before_the_same_step(seeds: range) -> None:
    assert list(problems(seeds, run_of)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seeds", parts_of(N_SEEDS, 4_000, 10), ids=str)
def test_four_thousand_seeds_in_which_plans_are_swapped(seeds: range) -> None:
    assert list(problems(seeds, run_of)) == []


def test_the_seeds_swap_plans() -> None:
    swaps = []
    for seed in range(20):
        trace = run_of(seed, traces=True).trace
        swaps.append(sum("swaps its plan" in line for line in trace))

    assert sum(n > 0 for n in swaps) >= 10


def swap_one_step_later_on_one_chip(patch: Patch) -> None:
    """The second chip of a generation runs the quick plan in the step after the swap, too."""
    swap = PlanAgreement.swap

    def swap_later(agreement: PlanAgreement) -> bool:
        plans = agreement._plans
        assert isinstance(plans, SimulatedPlans)
        has_swapped = swap(agreement)
        if has_swapped and agreement._members.rank == 1:
            plans.take_quick(0)
        return has_swapped

    patch.setattr(PlanAgreement, "swap", swap_later)


def begin_with_what_is_here(patch: Patch) -> None:
    """Each chip takes the searched plan if it has it, whatever the others have."""

    def begin(agreement: PlanAgreement) -> None:
        for number, digest in enumerate(agreement._plans.digests()):
            if digest:
                agreement._plans.take(number, None)
            else:
                agreement._plans.take_quick(number)

    patch.setattr(PlanAgreement, "begin", begin)


def take_a_plan_when_it_is_found(patch: Patch) -> None:
    """A chip takes the searched plan once it lies in its own folder."""

    def swap(agreement: PlanAgreement) -> bool:
        if not agreement._plans.has_found(agreement._quick):
            return False
        for number in agreement._quick:
            agreement._plans.take(number, None)
        agreement._quick = []
        return True

    patch.setattr(PlanAgreement, "swap", swap)


def send_to_those_who_lack_it_alone(patch: Patch) -> None:
    """A plan that some have is sent, but those who have none believe that nobody has."""
    begin = PlanAgreement.begin

    def deaf(agreement: PlanAgreement) -> None:
        gather = agreement._members.gather_numbers

        class Deaf:
            rank = agreement._members.rank
            members = agreement._members.members
            spread = agreement._members.spread

            def gather_numbers(self, mine: Sequence[int]) -> Sequence[Sequence[int]]:
                told = gather(mine)
                return told if any(mine) else [[0] * len(mine)] * len(told)

        agreement._members, members = Deaf(), agreement._members
        try:
            begin(agreement)
        finally:
            agreement._members = members

    patch.setattr(PlanAgreement, "begin", deaf)


MUTANTS: tuple[Callable[[Patch], None], ...] = (
    swap_one_step_later_on_one_chip,
    begin_with_what_is_here,
    take_a_plan_when_it_is_found,
    send_to_those_who_lack_it_alone,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[each.__name__ for each in MUTANTS])
def test_another_agreement_is_caught(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)

    check_caught(200, run_of)
