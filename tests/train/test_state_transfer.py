"""A chip that joins gets all of the state or none, from several holders, over real connections.

The chips are threads: the event loop holds no interpreter lock.
"""

import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("torch")

import torch

from commanding import meshmend_run
from meshmend.errors import PeerLostError, StateLostError, TransportError
from meshmend.membership.generation import Generation, Seat
from meshmend.membership.messages import FRESH, Go
from meshmend.planning.settings import Settings
from meshmend.topology.failures import Chip
from meshmend.topology.text import parse_mesh
from meshmend.train.core import state_transfer
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.job_core import JobCore
from meshmend.train.core.state_transfer import StateTransfer
from meshmend.train.state.state_tree import Framework, RawArray, StateTree, encoded_without
from meshmend.train.state.torch_state import TORCH, tensors_of
from waiting import HANG_S

MESH = parse_mesh("2x2")
NEWCOMER: Chip = (1, 1)
HOLDERS: tuple[Chip, ...] = ((0, 0), (0, 1), (1, 0))
STEP = 7


class ChipThread:
    """One chip with a state, and what a transfer needs of its job."""

    def __init__(self, chip: Chip, seed: int, *, is_fresh: bool = False) -> None:
        self.chip, self.is_fresh, self.is_overwritten = chip, is_fresh, False
        self.exchange = Exchange(MESH, chip, Settings(MESH, secret="a secret of this test"))
        self.framework: Framework = TORCH
        self.held = some_state(seed)
        self.is_alive = True
        self.tile: tuple[int, ...] | None = None
        self.digest_taken = ""  # of the state that came, when it was loaded

    def state(self) -> dict[str, Any]:
        return self.held

    def begin_overwriting(self, step: int) -> bool:
        self.is_overwritten |= self.is_fresh and step > 0
        return self.is_overwritten

    def take_state(self, state: Any) -> None:
        self.held, self.is_overwritten = state, False
        self.digest_taken = digest(state)

    def enter(self, generation: Generation, go: Go) -> TransportError | StateLostError | None:
        """Be in a generation until this chip is up to date; return what went wrong."""
        self.exchange.enter(generation)
        try:
            self.exchange.prepare()
            StateTransfer(self, self.exchange, self.framework, tile=self.tile).catch_up(
                go, generation
            )
        except KilledError:
            return None
        except (TransportError, StateLostError) as error:
            # So that all others hear of it, as of a new generation.
            self.exchange.transport.drop(range(MESH.n_live))
            return error
        return None

    def die_after(self, n_reads: int) -> None:
        """Die when the state has been read so often."""
        left = [n_reads]

        def read(data: Any) -> Any:
            left[0] -= 1
            if left[0] < 0 and self.is_alive:
                self.is_alive = False
                self.exchange.close()
                raise KilledError
            return data

        self.framework = reading(read)


class KilledError(Exception):
    """This chip dies now."""


def reading(change: Callable[[Any], Any]) -> Framework:
    """Return PyTorch's way to bytes with `change(bytes)` in place of what is read of a tensor."""

    def raw(leaf: Any, where: str) -> RawArray | None:
        array = TORCH.raw(leaf, where)
        if array is None:
            return None

        def read(start: int, stop: int) -> Any:
            return change(array.read(start, stop))

        return RawArray(array.dtype, array.shape, array.element_bytes, read, array.memory)

    return Framework("torch", raw, TORCH.tensor, TORCH.room)


def some_state(seed: int) -> dict[str, Any]:
    """Return a state with large and small tensors of several kinds, and plain values."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(1 << 19, generator=generator)
    return {
        "model": {"weights": weights, "tied": weights, "image": torch.randn(8, 3, 64, 64).mT},
        "optimizer": {"half": weights[: 1 << 18].to(torch.bfloat16), "step": torch.tensor(seed)},
        "also": [{"times": torch.full((1 << 16,), seed), "who": seed}],
        "progress": {"step": STEP, "empty": torch.zeros(0)},
    }


def digest(state: dict[str, Any]) -> str:
    """Return a hash of a state without that of objects in `also`."""
    return TORCH.digest({key: state[key] for key in state if key != "also"})


def is_like(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states are equal, but for objects in `also`."""
    return digest(one) == digest(other)


@pytest.fixture
def chips(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Chip, ChipThread]]:
    """Three holders of one state, whose objects in `also` differ, and a newcomer."""
    monkeypatch.setattr(state_transfer, "_PIECE_BYTES", 1 << 18)
    made = {chip: ChipThread(chip, 1) for chip in HOLDERS}
    for seed, chip in enumerate(HOLDERS):
        made[chip].held["model"] = made[HOLDERS[0]].held["model"]
        made[chip].held["also"] = some_state(seed)["also"]
    made[NEWCOMER] = ChipThread(NEWCOMER, 2, is_fresh=True)
    yield made
    for each in made.values():
        with suppress(OSError):
            each.exchange.close()


def run(
    chips: dict[Chip, ChipThread], number: int, holders: Sequence[Chip], *, step: int = STEP
) -> dict[Chip, TransportError | StateLostError | None]:
    """Run one generation of the chips that live; return what went wrong on each."""
    alive = [each for each in chips.values() if each.is_alive]
    seats = tuple(Seat(each.chip, each.exchange.address, number) for each in alive)
    generation = Generation(number, tuple(sorted(seats, key=lambda seat: seat.chip)))
    go = Go(number, step, tuple(holders))
    with ThreadPoolExecutor(len(alive)) as pool:
        ends = {each.chip: pool.submit(each.enter, generation, go) for each in alive}
        return {chip: end.result(HANG_S) for chip, end in ends.items()}


def test_a_newcomer_gets_all_of_the_state_and_each_neighbour_sends_half(
    chips: dict[Chip, ChipThread],
) -> None:
    weights = chips[NEWCOMER].held["model"]["weights"]

    assert set(run(chips, 1, HOLDERS).values()) == {None}

    taken = chips[NEWCOMER].held
    assert is_like(taken, chips[HOLDERS[0]].held)
    assert taken["model"]["weights"].data_ptr() == weights.data_ptr(), "it has moved"
    assert taken["model"]["tied"] is taken["model"]["weights"]
    sent = [chips[chip].exchange.sent_bytes()[NEWCOMER] for chip in HOLDERS[1:]]
    assert max(sent) < 1.6 * min(sent)


def test_a_chip_of_a_tile_gets_its_part_from_its_twin_and_others_get_nothing(
    chips: dict[Chip, ChipThread],
) -> None:
    """Tiles of 1x2: the newcomer's twin is above it; the chips of the other colour hold others."""
    for chip, each in chips.items():
        each.tile = (1, 2)
        each.is_fresh = False
        if chip in ((0, 0), (1, 0)):
            each.held = some_state(3)
    others = {chip: chips[chip].held for chip in ((0, 0), (1, 0))}
    n_bytes = sum(each.nbytes for each in tensors_of(chips[0, 1].held["model"]))

    assert set(run(chips, 1, HOLDERS).values()) == {None}

    assert is_like(chips[NEWCOMER].held, chips[0, 1].held)
    assert all(chips[chip].held is before for chip, before in others.items())
    for chip, each in chips.items():
        for to, sent in each.exchange.sent_bytes().items():
            if (chip, to) == ((0, 1), NEWCOMER):
                assert sent > n_bytes / 2
            else:
                assert sent < n_bytes / 100


def test_no_chip_packs_the_state(chips: dict[Chip, ChipThread]) -> None:
    """The memory of NumPy's arrays is traced; that of PyTorch's tensors is not."""
    n_bytes = sum(each.nbytes for each in tensors_of(chips[HOLDERS[0]].held["model"]))
    run(chips, 1, HOLDERS)  # plans are made
    tracemalloc.start()
    try:
        run(chips, 2, HOLDERS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < n_bytes / 2, "and these are the copies of four chips"


def test_a_newcomer_waits_for_the_last_piece_of_a_slow_holder(
    chips: dict[Chip, ChipThread],
) -> None:
    def read_slowly(data: Any) -> Any:
        time.sleep(0.05)
        return data

    chips[0, 1].framework = reading(read_slowly)

    assert set(run(chips, 1, HOLDERS).values()) == {None}
    assert chips[NEWCOMER].digest_taken == digest(chips[HOLDERS[0]].held), "it did not wait"


@pytest.mark.parametrize(
    ("version", "step", "may"), [(FRESH, 1, True), (FRESH, 0, False), (1, 1, False), (4, 9, False)]
)
def test_a_job_has_its_state_overwritten_if_it_never_had_one_that_may_count(
    version: int, step: int, may: bool
) -> None:
    loop, shares = Mock(state_version=version), Mock(step=0)
    core = Mock(_loop=loop, _shares=shares, is_overwritten=False)

    assert JobCore.begin_overwriting(core, step) == may
    assert (core.is_overwritten, shares.step) == (may, step if may else 0)


def test_what_chips_may_have_of_their_own_comes_from_one_of_them(
    chips: dict[Chip, ChipThread],
) -> None:
    run(chips, 1, HOLDERS)

    (also,) = chips[NEWCOMER].held["also"]
    assert also["who"] in (1, 2)
    assert (also["times"] == also["who"]).all()


def test_what_is_small_may_be_of_any_length_and_only_neighbours_encode_it(
    chips: dict[Chip, ChipThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    chips[0, 1].held["also"][0]["who"] = "one"
    chips[1, 0].held["also"][0]["who"] = "the other" * 1000
    encoded: list[StateTree] = []

    def encode(tree: StateTree, large: Mapping[str, RawArray]) -> Any:
        encoded.append(tree)
        return encoded_without(tree, large)

    monkeypatch.setattr(state_transfer, "encoded_without", encode)

    assert set(run(chips, 1, HOLDERS).values()) == {None}

    assert is_like(chips[NEWCOMER].held, chips[HOLDERS[0]].held)
    assert chips[NEWCOMER].held["also"][0]["who"] in ("one", "the other" * 1000)
    assert 1 <= len(encoded) <= 2, "of the three holders two are neighbours"


def test_a_holder_with_other_objects_takes_those_of_the_first(
    chips: dict[Chip, ChipThread],
) -> None:
    chips[0, 1].held["also"] = [{"times": torch.full((1 << 17,), 5), "who": 5}]

    assert set(run(chips, 1, HOLDERS).values()) == {None}

    for chip in ((0, 1), NEWCOMER):
        assert is_like(chips[chip].held, chips[0, 0].held)
        assert chips[chip].held["also"][0]["who"] in (0, 2)


@pytest.mark.parametrize("n_reads", [3, 6, 12])
def test_a_holder_that_dies_half_way_leaves_no_half_state_and_another_one_gives_all(
    n_reads: int, chips: dict[Chip, ChipThread]
) -> None:
    newcomer = chips[NEWCOMER]
    chips[0, 1].die_after(n_reads)

    assert isinstance(run(chips, 1, HOLDERS)[NEWCOMER], PeerLostError)

    assert newcomer.is_overwritten
    assert isinstance(run(chips, 2, [NEWCOMER])[NEWCOMER], StateLostError), "it gave half a state"
    assert set(run(chips, 3, [(0, 0), (1, 0)]).values()) == {None}
    assert is_like(newcomer.held, chips[0, 0].held)
    assert not newcomer.is_overwritten


@pytest.mark.parametrize(("is_fresh", "step"), [(False, STEP), (True, 0)], ids=["behind", "begin"])
def test_a_chip_whose_state_may_count_keeps_it_until_all_of_another_has_come(
    is_fresh: bool, step: int, chips: dict[Chip, ChipThread]
) -> None:
    newcomer = chips[NEWCOMER]
    newcomer.is_fresh, before = is_fresh, TORCH.digest(newcomer.held)
    chips[0, 1].die_after(7)

    assert isinstance(run(chips, 1, HOLDERS, step=step)[NEWCOMER], PeerLostError)
    assert TORCH.digest(newcomer.held) == before
    assert not newcomer.is_overwritten

    assert set(run(chips, 2, [(0, 0), (1, 0)], step=step).values()) == {None}
    assert is_like(newcomer.held, chips[0, 0].held)


def test_a_connection_that_breaks_half_way_leaves_no_half_state(
    chips: dict[Chip, ChipThread],
) -> None:
    newcomer, cut = chips[NEWCOMER], threading.Event()

    def sever(data: Any) -> Any:
        if not cut.is_set():
            cut.set()
            newcomer.exchange.sever((1, 0))
        return data

    chips[1, 0].framework = reading(sever)

    assert isinstance(run(chips, 1, HOLDERS)[NEWCOMER], PeerLostError)
    assert set(run(chips, 2, HOLDERS).values()) == {None}
    assert is_like(newcomer.held, chips[0, 0].held)


_FLIPPED = """
import os
import torch
from meshmend.train import Job
from meshmend.train.state import torch_state

model = torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
job = Job(model, optimizer, torch.ones(64, 300), batch=8, steps=20)
room = torch_state.TORCH.room

def damaged(dtype, shape, own):  # a cable flips a bit of what comes
    tensor, memory = room(dtype, shape, own)
    take = job._core.take_state
    def flip(state):
        memory[1000] ^= 16
        take(state)
    job._core.take_state = flip
    return tensor, memory

object.__setattr__(torch_state.TORCH, "room", damaged)
for inputs in job:
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    job.step(loss)
"""


def test_a_flipped_bit_of_a_state_that_came_is_found_before_it_counts(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(dedent(_FLIPPED))
    faults = ["--inject", "kill 0,1 at 5", "--inject", "repair 0,1 at 8"]

    ended = meshmend_run("--elastic", "--mesh", "1x3", *faults, str(path))

    assert ended.returncode != 0
    assert "the states of the chips differ after step" in ended.stderr
