"""One history steps while both sides of what breaks live on; a protocol without fences is caught.

A seed that fails is replayed, with all that happened, by
`python tests/helpers/simulate_protocol.py --split --seed SEED --trace`.
"""

from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from meshmend import config
from meshmend.membership import history as history_rules
from meshmend.membership import record_file
from meshmend.membership.client import MembershipClient
from meshmend.membership.coordinator import Coordinator
from meshmend.membership.history import CoordinatorRecord, History
from meshmend.membership.messages import Message
from meshmend.membership.record_file import record_text
from simulation import coordinator_process
from simulation.runs import check_caught, parts_of, problems, simulate
from simulation.world import Scenario

N_SEEDS = 200  # in `make test`; `make slow` does ten thousand
N_PARTS = 4

Patch = pytest.MonkeyPatch

run_of = partial(simulate, scenario_of=Scenario.of_split)


@pytest.mark.parametrize("seeds", parts_of(0, N_SEEDS, N_PARTS), ids=str)
def test_while_both_sides_of_what_breaks_live_on_one_history_steps(seeds: range) -> None:
    assert list(problems(seeds, run_of)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seeds", parts_of(N_SEEDS, 10_000, 10), ids=str)
def test_ten_thousand_seeds_in_which_both_sides_live_on(seeds: range) -> None:
    assert list(problems(seeds, run_of)) == []


def step_without_a_lease(patch: Patch) -> None:
    """A worker that hears nothing from its coordinator trains on."""
    patch.setattr(MembershipClient, "has_lease", lambda client, generation: True)


def outlast_the_holder_timeout(patch: Patch) -> None:
    """The lease is longer than the time after which others go on without the worker."""
    patch.setattr(config, "_LEASE_SHARE", 3.0)


def keep_no_term(patch: Patch) -> None:
    """A coordinator that is started with the record does not know the term before its own."""
    patch.setattr(
        coordinator_process, "record_text", lambda record: record_text(replace(record, term=0))
    )


def take_the_same_term(patch: Patch) -> None:
    """A second coordinator, with a record or without, has the term of the first."""
    patch.setattr(history_rules, "term_after", lambda known, token: 1)


def never_give_way(patch: Patch) -> None:
    """A coordinator serves on though one of a later term has taken its place."""
    patch.setattr(Coordinator, "_give_way", lambda coordinator, later, *, is_on_disk=False: False)


def take_every_term_for_ones_own(patch: Patch) -> None:
    """States of two coordinators are compared by the numbers of their generations alone."""
    patch.setattr(History, "contains", lambda history, status: True)


def drop_without_a_word(patch: Patch) -> None:
    """Steps that another coordinator led are given up, and nobody hears of it."""
    patch.setattr(Coordinator, "_tell_dropped", lambda coordinator, chip, status, after=None: None)


def go_back_to_an_earlier_term(patch: Patch) -> None:
    """A worker follows a coordinator of an earlier term than the one that it has heard of."""
    received = MembershipClient.received

    def believe(client: MembershipClient, message: Message) -> bool:
        highest, client._term = client._term, 0
        goes_on = received(client, message)
        client._term = max(highest, client._term)
        return goes_on

    patch.setattr(MembershipClient, "received", believe)


def believe_a_rotten_record(patch: Patch) -> None:
    """The checksum of a record is not looked at."""
    patch.setattr(record_file, "_checksum", lambda text: "0")


def take_a_spoilt_record_for_none(patch: Patch) -> None:
    """A coordinator that cannot read the record takes the job for a new one."""
    patch.setattr(record_file, "_unknown_history", lambda job, why: History(CoordinatorRecord(job)))


def forget_that_the_record_was_spoilt(patch: Patch) -> None:
    """A coordinator that could not read the record writes one that says nothing of it."""
    patch.setattr(
        coordinator_process,
        "record_text",
        lambda record: record_text(replace(record, is_unknown=False)),
    )


# Each with a seed that caught it, which is tried first; after a change of the protocol it may be
# another one.
FENCING_MUTANTS: dict[Callable[[Patch], None], int] = {
    step_without_a_lease: 29,
    outlast_the_holder_timeout: 29,
    keep_no_term: 36,
    take_the_same_term: 186,
    never_give_way: 24,
    take_every_term_for_ones_own: 354,
    drop_without_a_word: 354,
    go_back_to_an_earlier_term: 36,
    believe_a_rotten_record: 117,
    take_a_spoilt_record_for_none: 49,
    forget_that_the_record_was_spoilt: 282,
}


@pytest.mark.parametrize(
    ("mutant", "seed"), FENCING_MUTANTS.items(), ids=[each.__name__ for each in FENCING_MUTANTS]
)
def test_a_protocol_that_does_not_fence_is_caught(
    mutant: Callable[[Patch], None], seed: int, monkeypatch: Patch
) -> None:
    mutant(monkeypatch)

    check_caught(1000, run_of, first=seed)
