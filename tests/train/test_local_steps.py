"""Optimizers of sharded models that step on plain tensors: the same bits, and the same state."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed

from meshmend.train.state.state_tree import merged, tree_of
from meshmend.train.state.torch_state import TORCH
from meshmend.train.torch.group_state import GroupState
from meshmend.train.torch.local_steps import LocalSteps
from meshmend.train.torch.local_tensors import is_dtensor, local_of
from meshmend.train.torch.tile_checkpoints import load_whole, whole_state

dist: Any = torch.distributed

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda these: torch.optim.SGD(these, lr=0.1, momentum=0.9),
    "adamw": lambda these: torch.optim.AdamW(these, lr=0.1),
    "fused adam": lambda these: torch.optim.Adam(these, lr=0.1, fused=True),
    "adagrad": lambda these: torch.optim.Adagrad(these, lr=0.1),
    "amsgrad": lambda these: torch.optim.AdamW(these, lr=0.1, amsgrad=True),
}


@pytest.fixture
def mesh(tmp_path: Any) -> Iterator[Any]:
    """A mesh of one chip: a `DTensor` on it has a placement, but its part is all of it."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh: Any) -> torch.nn.Parameter:
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    return torch.nn.Parameter(distribute_tensor(torch.randn(7, 3), mesh, [Shard(0)]))


def stepped(mesh: Any, name: str, *, is_local: bool) -> tuple[torch.Tensor, Any, list[bool]]:
    """Return a parameter after three steps, its state, and what hooks of the loop saw."""
    weight, plain = sharded(mesh), torch.nn.Parameter(torch.ones(2))
    optimizer = OPTIMIZERS[name]([{"params": [weight]}, {"params": [plain]}])
    seen: list[bool] = []
    optimizer.register_step_pre_hook(
        lambda each, *_: seen.append(each.param_groups[0]["params"][0] is weight)
    )
    optimizer.register_step_post_hook(
        lambda each, *_: seen.append(each.param_groups[0]["params"][0] is weight)
    )
    if is_local:
        LocalSteps([optimizer])
    for number in range(3):
        weight.grad = weight.detach() * (number + 1)
        plain.grad = plain.detach() * 0.5
        optimizer.step()
    return weight, optimizer.state_dict()["state"], seen


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_parts_has_the_same_bits_and_leaves_the_same_state(mesh: Any, name: str) -> None:
    (wanted, states, _), (found, mine, seen) = (
        stepped(mesh, name, is_local=is_local) for is_local in (False, True)
    )

    assert torch.equal(local_of(found), local_of(wanted))
    assert seen == [True] * 6
    for number, state in states.items():
        assert mine[number].keys() == state.keys()
        for key, value in state.items():
            assert is_dtensor(mine[number][key]) == is_dtensor(value), key
            assert torch.equal(local_of(mine[number][key]), local_of(value))


def test_the_tensors_of_the_state_stay_the_same_so_that_copies_of_them_are_used_again(
    mesh: Any,
) -> None:
    weight = sharded(mesh)
    optimizer = torch.optim.Adam([weight])
    LocalSteps([optimizer])
    weight.grad = weight.detach()
    optimizer.step()
    before = dict(optimizer.state[weight])

    optimizer.step()

    assert all(optimizer.state[weight][key] is before[key] for key in ("exp_avg", "exp_avg_sq"))


def test_what_needs_more_than_parts_is_left_alone(mesh: Any) -> None:
    """A closure computes gradients of the parameters; LBFGS needs all of them at once."""
    weight = sharded(mesh)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    steps = LocalSteps([optimizer, torch.optim.LBFGS([torch.ones(3, requires_grad=True)])])

    def closure() -> float:
        weight.grad = weight.detach().clone()
        return 0.0

    optimizer.step(closure)

    assert torch.equal(local_of(weight), torch.zeros(7, 3))
    assert len(steps._handles) == 2


def test_a_second_optimizer_and_what_is_frozen_come_from_a_checkpoint_as_they_were(
    mesh: Any,
) -> None:
    from torch.distributed.fsdp import fully_shard

    def objects() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 5)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.Adam([model.weight]), torch.optim.SGD([model.bias], momentum=0.9)

    made = objects()
    for parameter in made[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    for each in made[1:]:
        each.step()
    made[0].get_parameter("bias").requires_grad_(False)
    saved = whole_state(GroupState(made, is_part=True), has_parts=True)
    read = merged([tree_of(saved, TORCH.raw)]).state(TORCH.tensor)
    again = objects()

    load_whole(again, read)

    assert not again[0].get_parameter("bias").requires_grad
    for old, new in zip(made[1:], again[1:], strict=True):
        for before, after in zip(old.state.values(), new.state.values(), strict=True):
            for key, value in before.items():
                assert is_dtensor(after[key]) == is_dtensor(value), key
                assert torch.equal(local_of(after[key]).view(-1), local_of(value).view(-1))
