"""The objects of a script whose state all chips of an elastic process group keep equal.

Knows modules, optimizers and other objects with a `state_dict`, and what PyTorch ties to a process
group: `DistributedDataParallel` gets the new group, and a `DTensor` is packed as the plain tensor
that this chip holds of it. Knows nothing of chips and generations.
"""

import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from meshmend.errors import InputError
from meshmend.train.fingerprint import parameter_words
from meshmend.train.raw_state import Bytes, map_state, unpack_raw
from meshmend.train.torch_learner import Stateful
from meshmend.train.torch_state import digest, packed, unpacked

# torch's stubs lack half of what c10d offers.
dist: Any = torch.distributed


class GroupState:
    """Modules, optimizers and further objects with a state, in a fixed order."""

    def __init__(self, objects: Sequence[Stateful]) -> None:
        for each in objects:
            if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
                raise InputError(
                    "reconfigure needs objects with state_dict and load_state_dict, but got "
                    f"{type(each).__name__}; pass the model, the optimizer, and what else changes "
                    "from step to step"
                )
        self.objects = tuple(objects)
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers among the objects."""
        return [each for each in self.objects if isinstance(each, torch.optim.Optimizer)]

    def words(self) -> tuple[str, str]:
        """Return what must be equal on all chips: of the parameters, and of the classes."""
        parameters = {
            f"{at}.{name}": (str(parameter.dtype), tuple(parameter.shape))
            for at, module in enumerate(self._modules())
            for name, parameter in module.named_parameters()
        }
        classes = ", ".join(type(each).__name__ for each in self.objects)
        return parameter_words(parameters), classes

    def packed(self, step: int) -> Bytes:
        """Return the states of all objects, and the number of steps done, as bytes."""
        return packed({"step": step, "objects": self._plain()})

    def load(self, data: Bytes) -> int:
        """Replace the states of all objects by those in the bytes; return the steps done.

        Bytes of a chip that had made no objects yet change nothing.
        """
        state = unpacked(data)
        if not state["objects"]:
            return int(state["step"])
        for each, its_state in zip(self.objects, state["objects"], strict=True):
            if isinstance(each, torch.nn.Module):
                like = each.state_dict()
                each.load_state_dict({name: _as(like[name], its_state[name]) for name in its_state})
            elif isinstance(each, torch.optim.Optimizer):
                each.load_state_dict(_as_optimizer(each, its_state))
            else:
                each.load_state_dict(its_state)
        return int(state["step"])

    def step_in(self, data: Bytes) -> int:
        """Return the number of steps done that the bytes name."""
        return int(unpack_raw(data)["step"])

    def digest(self) -> str:
        """Return a hash of the bits of all objects, but for the buffers of modules.

        `DistributedDataParallel` makes them equal when a step begins, not when it ends.
        """
        states = [
            dict(each.named_parameters())
            if isinstance(each, torch.nn.Module)
            else each.state_dict()
            for each in self.objects
        ]
        return digest(map_state(_plain_leaf, states))

    def use_default_group(self) -> None:
        """Make each `DistributedDataParallel` sum over the present default process group."""
        for module in self._modules():
            if isinstance(module, DistributedDataParallel):
                _rebind(module)

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the buffers of all modules, such as running means, before a step changes them."""
        self._buffers = [
            (buffer, buffer.clone()) for module in self._modules() for buffer in module.buffers()
        ]

    @torch.no_grad()
    def undo(self) -> None:
        """Reset the buffers to the last copy, because the step does not count."""
        for buffer, before in self._buffers:
            buffer.copy_(before)

    def _modules(self) -> list[torch.nn.Module]:
        return [each for each in self.objects if isinstance(each, torch.nn.Module)]

    def _plain(self) -> list[Any]:
        return [map_state(_plain_leaf, each.state_dict()) for each in self.objects]


def _rebind(module: Any) -> None:
    """Tie a `DistributedDataParallel` to the default process group, as if it were new.

    That is what PyTorch does with one that was pickled. Its `_update_process_group` would keep the
    buckets, whose order it learned in the old group: a chip that joins has them in another order,
    and gradients of different parameters would be added up.
    """
    kept = dict(module.__dict__)
    for name in ("process_group", "reducer", "logger"):
        del kept[name]
        delattr(module, name)  # a reducer that is gone takes its hooks off the parameters
    kept["_has_rebuilt_buckets"] = False
    module.__setstate__(kept)
    for hook, state in module._comm_hooks:
        dist._register_comm_hook(module.reducer, state, hook)


def _is_dtensor(leaf: Any) -> bool:
    # To import it takes a while, and where nobody has imported it there is none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


def _plain_leaf(leaf: Any) -> Any:
    """Return a leaf of a state; of a `DTensor`, what this chip holds, which must be all of it."""
    if not _is_dtensor(leaf):
        return leaf
    local = leaf.to_local()
    if local.numel() != leaf.numel():
        raise InputError(
            f"reconfigure needs all of the state on each chip, but a tensor of shape "
            f"{tuple(leaf.shape)} is sharded as {leaf.placements}; replicate over the chips: "
            'init_device_mesh("cpu", (dist.get_world_size(), 1))'
        )
    return local


def _as(like: Any, value: Any) -> Any:
    """Return a plain tensor in the form of another: as a `DTensor`, or as it is."""
    if not _is_dtensor(like):
        return value
    return type(like).from_local(
        value,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _as_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with tensors that have a parameter's shape in the form of the parameter."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]

    def formed(parameter: torch.Tensor, value: Any) -> Any:
        is_alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
        return _as(parameter, value) if is_alike else value

    kept = {
        index: {name: formed(parameters[cast(int, index)], value) for name, value in each.items()}
        for index, each in state["state"].items()
    }
    return {**state, "state": kept}
