"""The objects of a script whose state all chips of an elastic process group keep equal.

Knows modules, optimizers and other objects with a `state_dict`, and what PyTorch ties to a process
group: `DistributedDataParallel` gets the new group, and a `DTensor` is packed as the plain tensor
that this chip holds of it. Knows nothing of chips and generations; `StateBefore` undoes steps.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from meshmend.errors import InputError
from meshmend.torch.call_arguments import dist
from meshmend.train.sharding.sharded_optimizers import ShardedOptimizers
from meshmend.train.state.fingerprint import parameter_words
from meshmend.train.state.state_tree import map_state
from meshmend.train.state.torch_state import TORCH, tensors_of
from meshmend.train.torch.learner import check_memory
from meshmend.train.torch.local_tensors import as_tensor_like, is_dtensor, local_of
from meshmend.train.torch.loop_state import Stateful, is_scheduled
from meshmend.train.torch.optimizers import load_optimizer, parameters_of
from meshmend.train.torch.state_before import StateBefore, is_scaler


class GroupState:
    """Modules, optimizers and further objects with a state, in a fixed order.

    `is_part`: the state is the part that this chip holds; others of its tile hold the rest.
    """

    def __init__(self, objects: Sequence[Stateful], *, is_part: bool = False) -> None:
        for each in objects:
            if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
                raise InputError(
                    "reconfigure needs objects with state_dict and load_state_dict, but got "
                    f"{type(each).__name__}; pass the model, the optimizer, and what else changes "
                    "from step to step"
                )
            if hasattr(each, "consolidate_state_dict"):
                raise InputError(
                    "reconfigure needs all of an optimizer's state on each chip, but a "
                    f"{type(each).__name__} has a part of it on each: a chip that dies would take "
                    "its part along; pass the optimizer itself, or use "
                    "meshmend.train.Job(shard_optimizer=True)"
                )
            if isinstance(each, torch.nn.Module):
                check_memory(each, "reconfigure")
        self.objects = tuple(objects)
        self._leaf = _local_leaf if is_part else _plain_leaf
        self.before = StateBefore(self.objects)
        self._moving: set[str] = set()  # buffers that steps change
        self._shared: dict[int, ShardedOptimizers] = {}  # by the id of an optimizer

    def share(self, optimizers: Mapping[torch.optim.Optimizer, ShardedOptimizers]) -> None:
        """Leave the states of some optimizers to those who share them.

        Raises:
            InputError: there is a `GradScaler`, which may skip a step on some chips alone.
        """
        if any(map(is_scaler, self.objects)):
            raise InputError(
                "shard_optimizer needs steps that all chips do, but a GradScaler skips some; train "
                "in bfloat16, or leave out shard_optimizer"
            )
        self._shared = {id(each): shared for each, shared in optimizers.items()}
        self.before.shared = list(optimizers.values())

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers among the objects."""
        return [each for each in self.objects if isinstance(each, torch.optim.Optimizer)]

    def words(self) -> tuple[str, str]:
        """Return what must be equal on all chips: of the parameters, and of the classes."""
        parameters = {
            f"{at}.{name}": parameter
            for at, module in enumerate(self._modules())
            for name, parameter in module.named_parameters()
        }
        classes = ", ".join(type(each).__name__ for each in self.objects)
        return parameter_words(parameters), classes

    def state(self, step: int) -> dict[str, Any]:
        """Return the states of all objects, and the number of steps done.

        The tensors are those of the objects.
        """
        states = [map_state(self._leaf, self._state_of(each)) for each in self.objects]
        return {"step": step, "objects": states, "moving": sorted(self._moving)}

    def _state_of(self, each: Stateful) -> dict[str, Any]:
        shared = self._shared.get(id(each))
        return _state_of(each) if shared is None else shared.state_dict()

    def saved_state_of(self, each: Stateful) -> dict[str, Any]:
        """Return the state of an object for disks: of a shared optimizer, what this chip owns."""
        shared = self._shared.get(id(each))
        return each.state_dict() if shared is None else shared.saved_state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace the states of all objects.

        The state of a chip that had made no objects yet changes nothing.
        """
        if not state["objects"]:
            return
        for each, its_state in zip(self.objects, state["objects"], strict=True):
            if isinstance(each, torch.nn.Module):
                _load_module(each, its_state)
            elif id(each) in self._shared:
                self._shared[id(each)].load_state_dict(its_state)
            elif isinstance(each, torch.optim.Optimizer):
                load_optimizer_state(each, its_state)
            else:
                each.load_state_dict(its_state)
        self._moving = set(state["moving"])

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
            else self._state_of(each)
            for each in self.objects
        ]
        buffers = {name: each for name, each in self._buffers() if name not in self._moving}
        return TORCH.digest(map_state(self._leaf, [states, buffers]))

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
        self._check_weights()
        self._check_wrappers()
        kinds = torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler
        others = [each for each in self.objects if not isinstance(each, kinds)]
        for optimizer in self.optimizers:
            if is_scheduled(optimizer) and not others:
                raise InputError(
                    f"reconfigure needs the scheduler of {type(optimizer).__name__}, but did not "
                    "get it; pass it too: reconfigure(model, optimizer, scheduler)"
                )

    def _check_weights(self) -> None:
        """Raise InputError if an optimizer steps what is in the state of no object.

        A chip that joins would not get it, and nobody would compare it.
        """
        held = {
            local_of(tensor).data_ptr()
            for each in self.objects
            if not isinstance(each, torch.optim.Optimizer)
            for tensor in tensors_of(each.state_dict())
        }
        held |= self._parameter_ids()
        for optimizer in self.optimizers:
            for each in parameters_of(optimizer):
                if id(each) not in held and local_of(each).data_ptr() not in held:
                    raise InputError(
                        f"reconfigure needs all that a {type(optimizer).__name__} steps, but did "
                        f"not get a parameter of shape {list(each.shape)}: a chip that joins would "
                        "have another one; pass the model that has it too, as in "
                        "reconfigure(model, optimizer)"
                    )

    def _check_wrappers(self) -> None:
        """Raise InputError if a `DistributedDataParallel` is in use but none of the objects."""
        known = {id(each) for each in self._distributed()}
        mine = self._parameter_ids()
        for each in gc.get_objects():
            if type(each) is not DistributedDataParallel or id(each) in known:
                continue
            if self.objects and all(id(one) not in mine for one in each.parameters()):
                continue  # one that `build` has made for an earlier group
            got = f"the {type(each.module).__name__} inside of it" if self.objects else "nothing"
            raise InputError(
                f"reconfigure needs the DistributedDataParallel around the model, but got {got}: "
                "its sums would stay in a group that is gone; pass what "
                "DistributedDataParallel(...) returned, as in reconfigure(model, optimizer)"
            )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise InputError if an optimizer steps parameters of the objects but is none of them."""
        if any(optimizer is each for each in self.optimizers):
            return
        mine = self._parameter_ids()
        if any(id(each) in mine for each in parameters_of(optimizer)):
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

    def _parameter_ids(self) -> set[int]:
        return {id(each) for module in self._modules() for each in module.parameters()}

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
    # What a chip holds of a `DTensor` is copied as it is: operations on one cost a millisecond each
    # when its mesh is new.
    like = module.state_dict()
    plain = {name: value for name, value in state.items() if not is_dtensor(like.get(name))}
    for name in state.keys() - plain.keys():
        local_of(like[name]).copy_(state[name])
    module.load_state_dict(plain, strict=len(plain) == len(state))
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
        present.copy_(as_tensor_like(present, value))
    else:
        owner._buffers[last] = value if present is None else value.to(present.device)
        if not is_kept:
            owner._non_persistent_buffers_set.add(last)


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Replace the state of an optimizer by that of another chip."""
    groups = optimizer.param_groups
    if len(groups) != len(state["param_groups"]):
        raise InputError(
            f"this chip's {type(optimizer).__name__} has {len(groups)} groups of parameters, but "
            f"that of the other chips {len(state['param_groups'])}; make all groups before "
            "reconfigure, with a learning rate of 0 for as long as they are to stay as they are"
        )
    load_optimizer(optimizer, _as_optimizer(optimizer, state))


def _as_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with tensors that have a parameter's shape in the form of the parameter."""
    parameters = list(parameters_of(optimizer))

    def formed(parameter: torch.Tensor, value: Any) -> Any:
        is_alike = isinstance(value, torch.Tensor) and value.shape == local_of(parameter).shape
        return as_tensor_like(parameter, value) if is_alike else value

    kept = {
        index: {name: formed(parameters[cast(int, index)], value) for name, value in each.items()}
        for index, each in state["state"].items()
    }
    return {**state, "state": kept}


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


def _plain_leaf(leaf: Any) -> Any:
    """Return a leaf of a state; of a `DTensor`, what this chip holds, which must be all of it."""
    if not is_dtensor(leaf):
        return leaf
    local = leaf.to_local()
    if local.numel() != leaf.numel():
        raise InputError(
            f"reconfigure needs all of the state on each chip, but a tensor of shape "
            f"{tuple(leaf.shape)} is sharded as {leaf.placements}; replicate over the chips: "
            'init_device_mesh("cpu", (dist.get_world_size(), 1)), or pass tile= to reconfigure'
        )
    return local


def _local_leaf(leaf: Any) -> Any:
    """Return a leaf of a state; of a `DTensor`, what this chip holds."""
    return local_of(leaf) if is_dtensor(leaf) else leaf
