"""A sharded optimizer's checkpoint is that of an unsharded one, and nobody gathers it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshmend.errors import CheckpointDamageError, InputError  # noqa: E402  # after the check
from meshmend.train.sharding.layerwise import LAMB  # noqa: E402
from meshmend.train.sharding.sharded_optimizers import ShardedOptimizers  # noqa: E402
from meshmend.train.sharding.update_shares import UpdateShares, mirrors_of  # noqa: E402
from meshmend.train.state.checkpoint import Saving  # noqa: E402
from meshmend.train.state.shards import cut_shard, merged_state, read_shard, seal  # noqa: E402
from meshmend.train.state.torch_state import TORCH  # noqa: E402
from meshmend.train.torch.job import Job  # noqa: E402
from same_bits import is_same  # noqa: E402

SHAPES = [(97, 33), (), (5,), (1000,), (64, 64)]
DATA = [(torch.randn(8), torch.randn(1)) for _ in range(64)]
MAKERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "lamb": lambda p: LAMB(p, lr=0.01),
}


def stepped(make: Callable[[Any], Any]) -> Any:
    """Return an optimizer after two steps, in which one parameter had no gradient."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = make(parameters)
    for _ in range(2):
        for number, parameter in enumerate(parameters):
            parameter.grad = None if number == 2 else torch.randn_like(parameter)
        optimizer.step()
    return optimizer


def shards_of(optimizer: Any, n_ranks: int, lacking: int | None = None) -> list[Any]:
    """Return the shards that ranks write which share the state of an optimizer.

    The rank `lacking` has lost a piece.
    """
    found = []
    for rank in range(n_ranks):
        sharded = ShardedOptimizers({"": copy.deepcopy(optimizer)})
        shares = UpdateShares(sharded.flat.n_bytes, mirrors_of([[each] for each in range(n_ranks)]))
        sharded.keep(shares.owned(rank), shares.mirrored(rank))
        state = {"model": {"weight": torch.arange(100.0)}, "optimizer": sharded.saved_state()}
        if rank == lacking:
            state["optimizer"]["state"].pieces.pop()
        shard = cut_shard(state, TORCH, step=2, shard=rank, n_shards=n_ranks)
        found.append(read_shard(seal(shard)))
    return found


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("n_ranks", [1, 3, 40])
def test_shards_of_any_number_of_ranks_are_the_state_of_an_unsharded_optimizer(
    name: str, n_ranks: int
) -> None:
    optimizer = stepped(MAKERS[name])

    state = merged_state(shards_of(optimizer, n_ranks), TORCH)

    assert is_same(state["optimizer"], optimizer.state_dict())
    assert is_same(state["model"], {"weight": torch.arange(100.0)})


def test_a_piece_that_is_missing_is_damage() -> None:
    shards = shards_of(stepped(MAKERS["adamw"]), 3, lacking=1)

    with pytest.raises(CheckpointDamageError, match=r"lack a part of .* optimizer.state.\d"):
        merged_state(shards, TORCH)


def train(
    folder: Path,
    make: Callable[[Any], Any],
    steps: int,
    *,
    dtype: Any = torch.float32,
    **options: Any,
) -> Any:
    """Train alone, and return the model; it saves every second step."""
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1).to(dtype)
    optimizer = make(model.parameters())
    saving = Saving(folder, every=2)
    job = Job(model, optimizer, DATA, batch=8, steps=steps, saving=saving, **options)
    for inputs, targets in job:
        loss = torch.nn.functional.mse_loss(model(inputs.to(dtype)), targets.to(dtype))
        loss.backward()
        job.clip_grad_norm(0.5)
        job.step(loss)
    return model


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_job_resumes_from_a_checkpoint_of_either_kind_with_the_same_bits(
    tmp_path: Path, first: bool, second: bool
) -> None:
    make = MAKERS["adamw"]
    wanted = train(tmp_path / "plain", make, 8)
    train(tmp_path / "first", make, 4, shard_optimizer=first)
    model = train(tmp_path / "second", make, 8, shard_optimizer=second, resume=tmp_path / "first")

    assert torch.equal(model.weight, wanted.weight)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
def test_masters_of_either_kind_resume_each_other_with_the_same_bits(
    tmp_path: Path, name: str, first: bool, second: bool
) -> None:
    make = MAKERS[name]
    options = {"dtype": torch.bfloat16, "master_weights": True}
    wanted = train(tmp_path / "plain", make, 8, **options)
    train(tmp_path / "first", make, 4, shard_optimizer=first, **options)
    model = train(
        tmp_path / "second",
        make,
        8,
        shard_optimizer=second,
        resume=tmp_path / "first",
        **options,
    )

    assert torch.equal(model.weight, wanted.weight)
    assert model.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_job_without_masters_refuses_a_checkpoint_that_has_some(
    tmp_path: Path, is_shared: bool
) -> None:
    make, dtype = MAKERS["adamw"], torch.bfloat16
    train(tmp_path, make, 2, dtype=dtype, master_weights=True, shard_optimizer=is_shared)

    with pytest.raises(InputError, match="make the job with master_weights=True"):
        train(tmp_path / "again", make, 4, dtype=dtype, resume=tmp_path, shard_optimizer=is_shared)


def test_another_optimizer_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    train(tmp_path, MAKERS["adamw"], 2, shard_optimizer=True)

    with pytest.raises(InputError, match="resume needs the optimizer of the checkpoint, which has"):
        train(tmp_path / "again", MAKERS["sgd"], 4, resume=tmp_path)


def test_a_scaler_is_refused_with_a_shared_optimizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot step with a GradScaler; compute in bfloat16"):
        train(tmp_path, MAKERS["sgd"], 2, shard_optimizer=True, scaler=torch.amp.GradScaler("cpu"))
