"""The objects of a script whose state all chips of an elastic process group keep equal.

Knows modules, optimizers and other objects with a `state_dict`, and what PyTorch ties to a process
group: `DistributedDataParallel` gets the new group, and a `DTensor` is packed as the plain tensor
that this chip holds of it. Knows nothing of chips and generations.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from meshmend.errors import InputError
from meshmend.train.state.fingerprint import parameter_words
from meshmend.train.state.raw_state import Bytes, map_state, unpack_raw
from meshmend.train.state.torch_state import digest, packed, unpacked
from meshmend.train.torch.group_undo import StateBefore, is_scaler
from meshmend.train.torch.learner import Stateful

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
        self.before = StateBefore(self.objects)
        self._moving: set[str] = set()  # buffers that steps change

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
        state = [map_state(_plain_leaf, _state_of(each)) for each in self.objects]
        return packed({"step": step, "objects": state, "moving": sorted(self._moving)})

    def load(self, data: Bytes) -> int:
        """Replace the states of all objects by those in the bytes; return the steps done.

        Bytes of a chip that had made no objects yet change nothing.
        """
        state = unpacked(data)
        if not state["objects"]:
            return int(state["step"])
        for each, its_state in zip(self.objects, state["objects"], strict=True):
            if isinstance(each, torch.nn.Module):
                _load_module(each, its_state)
            elif isinstance(each, torch.optim.Optimizer):
                _load_optimizer(each, its_state)
            else:
                each.load_state_dict(its_state)
        self._moving = set(state["moving"])
        return int(state["step"])

    def step_in(self, data: Bytes) -> int:
        """Return the number of steps done that the bytes name."""
        return int(unpack_raw(data)["step"])

    def note_moving(self) -> None:
        """Note which buffers the step that ends now has changed."""
        among = {name: each for name, each in self._buffers() if name not in self._moving}
        if among:
            self._moving |= self.before.changed_buffers(among)

    def digest(self) -> str:
        """Return a hash of all objects, but for the buffers that steps change.

        `DistributedDataParallel` makes those equal when a step begins, not when it ends.
        """
        states = [
            dict(each.named_parameters())
            if isinstance(each, torch.nn.Module)
            else each.state_dict()
            for each in self.objects
        ]
        buffers = {name: each for name, each in self._buffers() if name not in self._moving}
        return digest(map_state(_plain_leaf, [states, buffers]))

    def use_default_group(self) -> None:
        """Make each `DistributedDataParallel` sum over the present default process group."""
        for module in self._distributed():
            _rebind(module)

    def check_comparable(self) -> None:
        """Raise InputError if a part of the training changes from step to step out of sight.

        Neither could a failed step be undone in it, nor would a chip that joins get it.
        """
        for module in self._distributed():
            for hook, state in module._comm_hooks:
                is_kept = any(state is each for each in self.objects)
                if not (state is None or isinstance(state, dist.ProcessGroup) or is_kept):
                    raise InputError(
                        f"reconfigure needs communication hooks without a state, but "
                        f"{getattr(hook, '__name__', hook)} has a {type(state).__name__}; use one "
                        "such as fp16_compress_hook, or give the state a state_dict and pass it "
                        "to reconfigure"
                    )
        kinds = torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler
        others = [each for each in self.objects if not isinstance(each, kinds)]
        for optimizer in self.optimizers:
            if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not others:
                raise InputError(
                    f"reconfigure needs the scheduler of {type(optimizer).__name__}, but did not "
                    "get it; pass it too: reconfigure(model, optimizer, scheduler)"
                )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise InputError if an optimizer steps parameters of the objects but is none of them."""
        if any(optimizer is each for each in self.optimizers):
            return
        mine = {id(each) for module in self._modules() for each in module.parameters()}
        if any(id(each) in mine for group in optimizer.param_groups for each in group["params"]):
            raise InputError(
                f"reconfigure needs every optimizer, but a {type(optimizer).__name__} that it did "
                "not get steps the model's parameters; pass it too"
            )

    def check_scaler(self, scaler: object) -> None:
        """Raise InputError if a `GradScaler` is in use but none of the objects."""
        if is_scaler(scaler) and not any(scaler is each for each in self.objects):
            raise InputError(
                "reconfigure needs the GradScaler, but did not get it; pass it too: "
                "reconfigure(model, optimizer, scaler)"
            )

    def _modules(self) -> list[torch.nn.Module]:
        return [each for each in self.objects if isinstance(each, torch.nn.Module)]

    def _distributed(self) -> list[Any]:
        return [
            each
            for module in self._modules()
            for each in module.modules()
            if isinstance(each, DistributedDataParallel)
        ]

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for at, each in enumerate(self.objects):
            if isinstance(each, torch.nn.Module):
                yield from ((f"{at}.{name}", buffer) for name, buffer in each.named_buffers())


def _state_of(each: Stateful) -> dict[str, Any]:
    """Return the state of an object: of a module, also what its `state_dict` leaves out."""
    if not isinstance(each, torch.nn.Module):
        return each.state_dict()
    state = each.state_dict()
    buffers = dict(each.named_buffers())
    return {
        "state": state,
        "kept": [name for name in buffers if name in state],
        "others": {name: buffer for name, buffer in buffers.items() if name not in state},
        "frozen": [name for name, value in each.named_parameters() if not value.requires_grad],
        "resting": [name for name, module in each.named_modules() if not module.training],
    }


def _load_module(module: torch.nn.Module, packed_state: dict[str, Any]) -> None:
    state = packed_state["state"]
    for name in packed_state["kept"]:
        _set_buffer(module, name, state[name], is_kept=True)
    for name, value in packed_state["others"].items():
        _set_buffer(module, name, value, is_kept=False)
    like = module.state_dict()
    module.load_state_dict({name: _as(like.get(name), state[name]) for name in state})
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in packed_state["frozen"])
    for name, each in module.named_modules():
        each.training = name not in packed_state["resting"]


@torch.no_grad()
def _set_buffer(module: torch.nn.Module, name: str, value: torch.Tensor, *, is_kept: bool) -> None:
    """Give a buffer a value; steps may have made it, or made it anew in another shape."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    present = owner._buffers.get(last)
    if present is not None and (present.shape, present.dtype) == (value.shape, value.dtype):
        present.copy_(_as(present, value))
    else:
        owner._buffers[last] = value if present is None else value.to(present.device)
        if not is_kept:
            owner._non_persistent_buffers_set.add(last)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Replace the state of an optimizer; its groups stay the same dicts, which others may hold."""
    groups = optimizer.param_groups
    optimizer.load_state_dict(_as_optimizer(optimizer, state))
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    optimizer.param_groups = groups


def _rebind(module: Any) -> None:
    """Tie a `DistributedDataParallel` to the default process group, as if it were new.

    That is what PyTorch does with one that was pickled. Its `_update_process_group` would keep the
    buckets, whose order it learned in the old group: a chip that joins has them in another order,
    and gradients of different parameters would be added up.
    """
    builtin, old_group = _builtin_hook(module), module.process_group
    kept = dict(module.__dict__)
    for name in ("process_group", "reducer", "logger"):
        del kept[name]
        delattr(module, name)  # a reducer that is gone takes its hooks off the parameters
    kept["_has_rebuilt_buckets"] = False
    kept["_static_graph_delay_allreduce_enqueued"] = False  # the new reducer has learned no graph
    kept["require_forward_param_sync"] = (
        True  # what an evaluation leaves; who joins has not done it
    )
    module.__setstate__(kept)
    if builtin is not None:
        module._register_builtin_comm_hook(builtin)
    for at, (hook, state) in enumerate(module._comm_hooks):
        if state is old_group:
            module._comm_hooks[at] = hook, state = hook, module.process_group
        dist._register_comm_hook(module.reducer, state, hook)


def _builtin_hook(module: Any) -> Any:
    """Return the kind of a `DistributedDataParallel`'s built-in communication hook, or None."""
    name = module._get_ddp_logging_data().get("comm_hook", "")
    return dist.BuiltinCommHookType.__members__.get(name.rpartition(".")[2])


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
