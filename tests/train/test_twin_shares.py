"""Optimizers whose state twins share: who keeps what when the mesh changes; what is refused."""

import pytest
import torch

from meshmend.errors import InputError, StateLostError
from meshmend.membership.generation import Generation, Seat
from meshmend.train.sharding.layerwise import LAMB
from meshmend.train.sharding.update_shares import UpdateShares
from meshmend.train.torch.group_state import GroupState
from meshmend.train.torch.tile_job import TileJob
from meshmend.train.torch.twin_shares import Holding, TwinShares, _moves, mirrors_of_twins

CHIPS = [(0, column) for column in range(6)]  # tiles of 1x2: even columns have one colour
TILE, BOARD = (1, 2), (1, 1)


def generation(chips: list[tuple[int, int]]) -> Generation:
    seats = tuple(Seat(chip, ("127.0.0.1", 1000 + chip[1]), 1) for chip in chips)
    return Generation(1, seats)


def kept(chips: list[tuple[int, int]], chip: tuple[int, int], n_bytes: int) -> Holding:
    """What a chip keeps in a generation of these chips."""
    twins = [each for each in chips if each[1] % 2 == chip[1] % 2]
    mirror_of = mirrors_of_twins(twins, generation(chips), BOARD)
    return Holding(False, ((n_bytes, UpdateShares(n_bytes, mirror_of).kept(twins.index(chip))),))


@pytest.mark.parametrize("lost", [0, 2, 4])
def test_after_the_loss_of_a_tile_every_chip_gets_what_it_lacks(lost: int) -> None:
    left = [chip for chip in CHIPS if chip[1] not in (lost, lost + 1)]
    held = [kept(CHIPS, chip, 3072) for chip in left]

    moves = [move for _, each in _moves(left, held, generation(left), TILE, BOARD) for move in each]

    for rank, chip in enumerate(left):
        has = {at for low, high in held[rank].rows[0][1] for at in range(low, high)}
        has |= {at for move in moves if move.target == rank for at in range(*move.span)}
        assert has == set(range(3072))  # two twins are left, so each keeps all
        assert all(move.source % 2 == rank % 2 for move in moves if move.target == rank), chip
        assert all(move.source != rank for move in moves if move.target == rank)


def test_a_share_that_nobody_has_is_told_to_all() -> None:
    left = CHIPS[:2]  # of three twins each two are gone

    with pytest.raises(StateLostError, match="the chips that kept it and their mirrors are gone"):
        _moves(left, [kept(CHIPS, chip, 3072) for chip in left], generation(left), TILE, BOARD)


def test_a_chip_that_comes_gets_its_shares_and_one_that_reads_them_gets_none() -> None:
    before = CHIPS[:4]
    held = [kept(before, chip, 3072) for chip in before]

    for new, n_bytes in ((Holding(is_all=False), 2 * 2048), (Holding(is_all=True), 0)):
        moves = _moves(CHIPS, [*held, new, new], generation(CHIPS), TILE, BOARD)

        found = [move for _, each in moves for move in each if move.target >= 4]
        assert sum(move.span[1] - move.span[0] for move in found) == n_bytes


def test_a_hook_of_the_loop_sees_whole_parameters_and_all_new_weights() -> None:
    weight = torch.nn.Parameter(torch.ones(100, 3))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["params"][0]))
    optimizer.register_step_post_hook(lambda *_: seen.append(weight.detach().clone()))
    shares = TwinShares([optimizer])
    shares.keep(0, (0,), None, [1280])
    weight.grad = torch.ones(100, 3)

    optimizer.step()

    assert seen[0] is weight
    assert torch.equal(seen[1], torch.zeros(100, 3))
    assert not optimizer.state
    assert shares.of[optimizer].n_state_bytes() == weight.nbytes


def test_what_cannot_be_shared_is_refused_in_one_line() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(InputError, match="but got LAMB, which needs norms of whole tensors"):
        TwinShares([LAMB([weight])])
    optimizer = torch.optim.SGD([weight], lr=0.1)
    shares = TwinShares([optimizer])
    with pytest.raises(InputError, match="without a closure, but got one"):
        optimizer.step(lambda: 0.0)
    state = GroupState([optimizer, torch.amp.GradScaler("cpu")])
    with pytest.raises(InputError, match="a GradScaler skips some"):
        state.share(shares.of)
    with pytest.raises(InputError, match="needs two axes, but got"):
        TileJob(
            lambda mesh: (),
            [0],
            tile="2x2",
            steps=1,
            batch=1,
            axes=("replicate", "shard", "tensor"),
            saving=object(),  # type: ignore[arg-type]  # refused before it is looked at
            shard_optimizer=True,
        )
