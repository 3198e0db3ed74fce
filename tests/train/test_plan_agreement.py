"""Chips with different plans run the same one, and swap it between the same two steps."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshmend.errors import MismatchError
from meshmend.membership.generation import Generation, Seat
from meshmend.planning import catalogue
from meshmend.planning.catalogue import QUICK, CollectiveCall, is_searched, proved_schedule
from meshmend.planning.plan_cache import has_plan, planned_calls, store_plans
from meshmend.planning.settings import Settings
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.train.core import plan_agreement
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.plan_agreement import FolderPlans
from meshmend.transport.event_loop import load_event_loop

WHOLE = Mesh((3, 3))
LEFT = WHOLE.without("0,1")
SUMS = ((100_000, "float32"), (15_000, "float64"), (9, "float32"))  # two classes, and a short one
CALLS = planned_calls(SUMS)[:2]
SECRET = "a secret of this test"

_fork = multiprocessing.get_context("fork")


def test_searched_and_quick_plans_of_the_test_differ() -> None:
    for call in CALLS:
        assert is_searched(LEFT, "auto", *call)
        searched, quick = (proved_schedule(LEFT, name, *call)[0] for name in ("auto", QUICK))
        assert searched.digest != quick.digest


class ChipProcess:
    """An exchange in a process of its own, which does what it is told."""

    def __init__(self, chip: Chip, folder: Path) -> None:
        self.chip = chip
        self.pipe, theirs = _fork.Pipe()
        self._process = _fork.Process(target=_serve, args=(chip, folder, theirs), daemon=True)
        self._process.start()
        self.address = self.pipe.recv()

    def begin(self, what: Callable[..., Any], *arguments: Any) -> None:
        self.pipe.send((what, arguments))

    def end(self) -> Any:
        assert self.pipe.poll(60), f"{self.chip} hangs"
        result = self.pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def error(self) -> Exception | None:
        """Return what `end` raises."""
        try:
            self.end()
        except Exception as error:
            return error
        return None

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(chip: Chip, folder: Path, pipe: Connection) -> None:
    catalogue._remembered.clear()
    # On the loopback address itself sums are planned by a rule, without a search.
    settings = Settings(WHOLE, secret=SECRET, bind="127.0.0.2")
    exchange = Exchange(WHOLE, chip, settings, plans=folder)
    plan_agreement._LOOK_EVERY_S = 0.0  # type: ignore[misc]
    pipe.send(exchange.address)
    while True:
        what, arguments = pipe.recv()
        try:
            pipe.send(what(exchange, *arguments))
        except Exception as error:
            pipe.send(error)


class Chips:
    """All chips of a generation."""

    def __init__(self, folder: Path) -> None:
        self.all = [ChipProcess(chip, folder / str(rank)) for rank, chip in enumerate(LEFT.live)]

    def do(self, what: Callable[..., Any], *arguments: Any) -> list[Any]:
        for each in self.all:
            each.begin(what, *arguments)
        return [each.end() for each in self.all]

    def enter(self, number: int) -> None:
        seats = tuple(Seat(each.chip, each.address, 1) for each in self.all)
        self.do(_enter, Generation(number, seats))


@pytest.fixture
def chips(tmp_path: Path) -> Any:
    load_event_loop()  # once, not in each process
    made = Chips(tmp_path)
    yield made
    for each in made.all:
        each.close()


def _enter(exchange: Exchange, generation: Generation) -> None:
    exchange.enter(generation)
    exchange.plan(SUMS)
    exchange.prepare()


def _planned_after_go(exchange: Exchange, generation: Generation) -> int:
    """Return how many plans a chip makes once the coordinator has let its generation begin."""
    exchange.enter(generation)
    exchange.plan(SUMS)
    before = len(catalogue._remembered)
    exchange.prepare()
    assert exchange.gather_numbers([exchange.rank]) == [[rank] for rank in range(LEFT.n_live)]
    return len(catalogue._remembered) - before


def _sum(exchange: Exchange) -> list[str]:
    """Sum, and return which plan each sum ran: "auto" or "quick"."""
    ran: list[str] = []
    for size, dtype in SUMS[:2]:
        payload = np.full(size, exchange.rank + 1, dtype=dtype)
        exchange.sum(payload.view(np.uint8), size, dtype)
        assert (payload == sum(range(1, LEFT.n_live + 1))).all()
        digest = exchange._tasks[size, dtype].program.schedule.digest
        call = CALLS[len(ran)]
        names = ("auto", QUICK)
        ran += [name for name in names if proved_schedule(LEFT, name, *call)[0].digest == digest]
    return ran


def _has_searched(exchange: Exchange) -> bool:
    return catalogue.is_remembered(LEFT, "auto", *CALLS[0])


def _is_provisional(exchange: Exchange) -> bool:
    return exchange.is_provisional


def _swap(exchange: Exchange) -> None:
    exchange.swap_plans()


def test_all_plans_of_a_generation_are_made_while_the_coordinator_waits(chips: Chips) -> None:
    seats = tuple(Seat(each.chip, each.address, 1) for each in chips.all)

    assert chips.do(_planned_after_go, Generation(2, seats)) == [0] * LEFT.n_live


def test_without_a_plan_made_ahead_all_take_the_quick_one_and_swap_it_together(
    chips: Chips, tmp_path: Path
) -> None:
    chips.enter(2)
    assert set(chips.do(_has_searched)) == {False}
    assert set(chips.do(_is_provisional)) == {True}
    chips.do(_swap)  # nothing is there yet
    assert set(chips.do(_is_provisional)) == {True}
    assert set(chips.do(_has_searched)) == {False}

    store_plans(tmp_path / "0", LEFT, "auto", SUMS)  # of the first chip alone
    chips.do(_swap)

    assert set(chips.do(_has_searched)) == {True}
    assert set(chips.do(_is_provisional)) == {False}
    assert chips.do(_sum) == [["auto", "auto"]] * LEFT.n_live


def _count_swaps(exchange: Exchange, n_swaps: int) -> int:
    """Ask for better plans so often; return how often the chips told each other of any."""
    told, spread = 0, exchange.spread

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal told
        told += 1
        return spread(*arguments, **named)

    exchange.spread = counted  # type: ignore[method-assign]
    for _ in range(n_swaps):
        exchange.swap_plans()
    exchange.spread = spread  # type: ignore[method-assign]
    return told


def test_chips_whose_plan_does_not_come_ask_seldom_and_take_it_when_it_comes(
    chips: Chips, tmp_path: Path
) -> None:
    chips.enter(2)
    assert set(chips.do(_count_swaps, 1)) == {0}  # all have just told what they have
    assert set(chips.do(_count_swaps, 7)) == {3}  # before the 2nd, 4th and 8th step
    assert set(chips.do(_count_swaps, 120)) == {4}  # the 16th, 32nd, 64th, 128th
    assert set(chips.do(_count_swaps, 128)) == {2}  # the 192nd, 256th

    store_plans(tmp_path / "0", LEFT, "auto", SUMS)

    assert set(chips.do(_count_swaps, 64)) == {1}
    assert set(chips.do(_is_provisional)) == {False}
    assert chips.do(_sum) == [["auto", "auto"]] * LEFT.n_live


def test_quick_plans_sum_right_before_they_are_swapped(chips: Chips) -> None:
    chips.enter(2)

    assert chips.do(_sum) == [[QUICK, QUICK]] * LEFT.n_live


@pytest.mark.parametrize("holder", [0, 3])
def test_a_plan_that_one_chip_has_is_sent_to_all(chips: Chips, tmp_path: Path, holder: int) -> None:
    store_plans(tmp_path / str(holder), LEFT, "auto", SUMS)

    chips.enter(2)

    assert set(chips.do(_is_provisional)) == {False}
    assert set(chips.do(_has_searched)) == {True}
    assert chips.do(_sum) == [["auto", "auto"]] * LEFT.n_live


def test_of_two_sums_only_the_one_without_a_plan_runs_a_quick_one(
    chips: Chips, tmp_path: Path
) -> None:
    store_plans(tmp_path / "2", LEFT, "auto", SUMS[:1])

    chips.enter(2)

    assert set(chips.do(_is_provisional)) == {True}
    assert chips.do(_sum) == [["auto", QUICK]] * LEFT.n_live


def test_plans_without_a_search_are_made_through_the_folder_for_all_workers_of_a_host(
    chips: Chips, tmp_path: Path
) -> None:
    chips.enter(2)

    *searched, short = planned_calls(SUMS)
    for rank in range(LEFT.n_live):
        assert has_plan(tmp_path / str(rank), LEFT, "auto", *short)
        assert not any(has_plan(tmp_path / str(rank), LEFT, "auto", *call) for call in searched)


@pytest.mark.parametrize(
    ("algorithm", "n_bytes", "expected"),
    [
        ("auto", 1 << 15, False),
        ("auto", 1 << 17, True),
        ("trees", 1 << 15, True),
        ("ring-1d", 1 << 17, False),
        ("auto-on-one-host", 1 << 17, True),
        ("auto-on-one-host", 1 << 15, False),
        ("auto-on-one-host", 1 << 23, False),
    ],
)
def test_what_is_searched_for(algorithm: str, n_bytes: int, expected: bool) -> None:
    assert is_searched(LEFT, algorithm, CollectiveCall("allreduce"), n_bytes) is expected
    assert not is_searched(LEFT, algorithm, CollectiveCall("all-gather"), n_bytes)


def test_the_first_generation_searches(chips: Chips) -> None:
    chips.enter(1)

    assert set(chips.do(_is_provisional)) == {False}
    assert set(chips.do(_has_searched)) == {True}


def _swap_alone(exchange: Exchange) -> None:
    """Do what no chip may: take another plan than the others."""
    plans = FolderPlans(None, LEFT, "auto", SUMS, exchange._catalogue)
    for number, call in enumerate(CALLS):
        proved_schedule(LEFT, "auto", *call)
        plans.take(number, None)
    exchange._make_tasks()


def test_chips_that_swap_at_different_steps_are_found_out_by_their_frames(chips: Chips) -> None:
    chips.enter(2)
    chips.all[1].begin(_swap_alone)
    chips.all[1].end()

    for each in chips.all:
        each.begin(_sum)

    ended = wait([each.pipe for each in chips.all], timeout=60)
    errors = [each.error() for each in chips.all if each.pipe in ended]
    assert any(isinstance(error, MismatchError) for error in errors)
