"""The objects of a script whose state all chips of an elastic process group keep equal.

Knows modules, optimizers and other objects with a `state_dict`, and what PyTorch ties to a process
group: `DistributedDataParallel` gets the new group, and a `DTensor` is packed as the plain tensor
that this chip holds of it. Knows nothing of chips and generations.

A step that failed leaves no trace in the objects. Every tensor that a step may change is copied
before it: parameters, their gradients, buffers, the optimizers' states. A collective may fail after
any of them has changed (a closure, a perturbed weight, a second backward pass), and nothing tells
before. The copies are kept from step to step, so that a step copies but allocates nothing.
"""

import functools
import gc
import json
import math
import random
import weakref
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshmend.errors import InputError
from meshmend.train.sharding.sharded_optimizers import ShardedOptimizers
from meshmend.train.state.fingerprint import parameter_words
from meshmend.train.state.state_tree import Part, Placement, map_state
from meshmend.train.state.torch_state import TORCH, tensors_of
from meshmend.train.torch.learner import check_memory, load_other_buffers, other_buffers
from meshmend.train.torch.local_tensors import (
    as_tensor_like,
    first_element,
    is_dtensor,
    local_of,
    own_box,
)
from meshmend.train.torch.loop_state import Stateful
from meshmend.train.torch.optimizers import load_optimizer

# torch's stubs lack half of what c10d offers.
dist: Any = torch.distributed

Undo = Callable[[], object]


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
        self._shared: dict[
            int, ShardedOptimizers
        ] = {}  # by the id of an optimizer that twins share

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
            f"{at}.{name}": (str(parameter.dtype), tuple(parameter.shape))
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

    def _saved_state_of(self, each: Stateful) -> dict[str, Any]:
        shared = self._shared.get(id(each))
        return each.state_dict() if shared is None else shared.saved_state()

    def whole_state(self, *, has_parts: bool = True) -> dict[str, Any]:
        """Return the state of a `Job` with the same model, as far as this chip holds it: for disks.

        Without `has_parts` a twin writes this chip's part, all but what it owns of shared states.

        Raises:
            InputError: a chip's part of a tensor is none that a checkpoint knows, or there is more
                than one model.
        """
        model, optimizer, *others = self.objects
        if not isinstance(model, torch.nn.Module) or not isinstance(
            optimizer, torch.optim.Optimizer
        ):
            raise InputError(
                "a checkpoint of tiles needs build to return the model and its optimizer first, "
                f"but got {type(model).__name__} and {type(optimizer).__name__}"
            )
        state = {
            "model": model.state_dict(),
            "buffers": other_buffers(model),
            "frozen": [name for name, each in model.named_parameters() if not each.requires_grad],
            "optimizer": self._saved_state_of(optimizer),
            "also": [self._saved_state_of(each) for each in others],
        }
        leaf = _part_leaf if has_parts else _no_part_leaf
        return cast("dict[str, Any]", map_state(leaf, state))

    def load_whole(self, state: Mapping[str, Any]) -> None:
        """Take this chip's part of a whole state, of a checkpoint.

        Raises:
            InputError: it is that of another model.
        """
        model, optimizer, *others = self.objects
        assert isinstance(model, torch.nn.Module)
        assert isinstance(optimizer, torch.optim.Optimizer)
        if len(others) != len(state["also"]):
            raise InputError(
                f"the checkpoint is of another job: build returns {len(others)} objects after the "
                f"model and its optimizer, but the checkpoint has {len(state['also'])}"
            )
        _load_whole(model, state["model"])
        load_other_buffers(model, state.get("buffers", {}))
        for name in state.get("frozen", ()):
            model.get_parameter(name).requires_grad_(False)
        for each, its_state in zip(
            self.objects[1:], (state["optimizer"], *state["also"]), strict=True
        ):
            _load_whole(each, its_state)

    def load(self, state: Mapping[str, Any]) -> int:
        """Replace the states of all objects; return the steps done.

        The state of a chip that had made no objects yet changes nothing.
        """
        if not state["objects"]:
            return int(state["step"])
        for each, its_state in zip(self.objects, state["objects"], strict=True):
            if isinstance(each, torch.nn.Module):
                _load_module(each, its_state)
            elif id(each) in self._shared:
                self._shared[id(each)].load_state_dict(its_state)
            elif isinstance(each, torch.optim.Optimizer):
                _load_optimizer(each, its_state)
            else:
                each.load_state_dict(its_state)
        self._moving = set(state["moving"])
        return int(state["step"])

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

    def check_in_tile(self, ranks: Container[int], tile: str) -> None:
        """Raise InputError if an object is spread over other chips than those of one tile."""
        if self._distributed():
            raise InputError(
                f"reconfigure(tile={tile!r}) needs a model whose parts are on the chips of a tile, "
                "but got a DistributedDataParallel, which has all of it on each chip; leave out "
                "tile, or use fully_shard(model, mesh=meshmend.torch.tiles(...))"
            )
        ranks_with_parts = functools.cache(_ranks_with_parts)  # few layouts, and many parameters
        for module in self._modules():
            for name, parameter in cast("Iterator[tuple[str, Any]]", module.named_parameters()):
                if not is_dtensor(parameter):
                    continue
                together = ranks_with_parts(parameter.device_mesh, parameter.placements)
                if outside := [at for at in together if at not in ranks]:
                    raise InputError(
                        f"reconfigure(tile={tile!r}) needs each parameter whole in one tile, but "
                        f"{name} is sharded over ranks such as {outside[0]} of another; make its "
                        "mesh with meshmend.torch.tiles"
                    )

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
            if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not others:
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
        held |= {id(each) for module in self._modules() for each in module.parameters()}
        for optimizer in self.optimizers:
            for each in (each for group in optimizer.param_groups for each in group["params"]):
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
        mine = {id(each) for module in self._modules() for each in module.parameters()}
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
def _load_whole(each: Stateful, state: dict[str, Any]) -> None:
    """Load this chip's part of the whole state of an object."""
    if isinstance(each, torch.nn.Module):
        like = each.state_dict()
        if like.keys() != state.keys():
            raise InputError("the checkpoint is of another model: its tensors have other names")
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                local_of(like[name]).copy_(_own_part(like[name], value, name))
    elif isinstance(each, torch.optim.Optimizer):
        parameters = [parameter for group in each.param_groups for parameter in group["params"]]
        by_parameter = {
            number: {
                name: _own_part(parameters[number], value, name)
                if isinstance(value, torch.Tensor) and value.shape == parameters[number].shape
                else value
                for name, value in values.items()
            }
            for number, values in state["state"].items()
        }
        _load_optimizer(each, {**state, "state": by_parameter})
    else:
        each.load_state_dict(state)


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


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
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
    parameters = [each for group in optimizer.param_groups for each in group["params"]]

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


class StateBefore:
    """The state of objects at one moment; `capture` takes it, `restore` brings it back."""

    def __init__(self, objects: Sequence[Stateful]) -> None:
        self._objects = objects
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the tensor's id
        self._undo: list[Undo] = []
        self._gradients: dict[int, _Gradient] = {}  # by the parameter's id
        self._buffers: dict[str, torch.Tensor] = {}  # by their names in all modules
        self._scalers: list[dict[str, Any]] = []
        self.shared: list[ShardedOptimizers] = []  # what twins share of the optimizers' states

    @torch.no_grad()
    def capture(self) -> None:
        """Copy all that a step may change; the copies of the moment before are used again."""
        self._undo = [*_random_states()]
        gradients, self._gradients = self._gradients, {}
        tensors = list(self._tensors())
        self._copies = self._copied(tensors)
        for at, each in self._gradients.items():
            each.copy(gradients.get(at))

    @torch.no_grad()
    def restore(self) -> None:
        """Make everything what it was at the last `capture`; may be called more than once."""
        for undo in self._undo:
            undo()
        for each in self._gradients.values():
            each.restore()
        pairs = [
            (local_of(tensor), copy)
            for tensor, copy in self._copies.values()
            if not _is_odd(tensor)
        ]
        if pairs:
            torch._foreach_copy_([one for one, _ in pairs], [copy for _, copy in pairs])
        for tensor, copy in self._copies.values():
            if _is_odd(tensor):
                tensor.copy_(copy)

    def has_new_gradients(self) -> bool:
        """Whether a gradient was made or changed since the last `capture`."""
        return any(each.is_new() for each in self._gradients.values())

    def has_updated_scaler(self) -> bool:
        """Whether a `GradScaler` among the objects has decided about a step since `capture`."""
        return self._scalers != [each.state_dict() for each in self._objects if is_scaler(each)]

    def changed_buffers(self, among: Mapping[str, torch.Tensor]) -> set[str]:
        """Return which of these buffers, by name, are not what they were at the last `capture`."""
        before = {name: self._copies[id(each)][1] for name, each in self._buffers.items()}
        return {
            name
            for name, each in among.items()
            if name not in before or not torch.equal(local_of(each), before[name])
        }

    def _copied(
        self, tensors: Iterable[torch.Tensor]
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        old, copies = self._copies, dict[int, tuple[torch.Tensor, torch.Tensor]]()
        to, of = list[torch.Tensor](), list[torch.Tensor]()
        for tensor in tensors:
            known = old.get(id(tensor))
            plain = local_of(tensor)
            if id(tensor) in copies:
                continue
            if known is None or known[0] is not tensor or not _fits(known[1], plain):
                copies[id(tensor)] = tensor, plain.detach().clone()
                continue
            copies[id(tensor)] = known
            to.append(known[1])
            of.append(plain)
        if to:
            torch._foreach_copy_(to, of)
        return copies

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield what is to be copied; note how to bring back what is no tensor."""
        self._scalers, self._buffers = [], {}
        for at, each in enumerate(self._objects):
            if isinstance(each, torch.nn.Module):
                self._buffers.update({f"{at}.{name}": each for name, each in each.named_buffers()})
                yield from self._of_module(each)
            elif isinstance(each, torch.optim.Optimizer):
                yield from self._of_optimizer(each)
            else:
                self._keep_other(each)
        for shared in self.shared:
            self._undo.append(_sets(shared.states, _rebuilt(shared.states)))
            yield from tensors_of(list(shared.states.values()))

    def _of_module(self, module: torch.nn.Module) -> Iterator[torch.Tensor]:
        for each in module.modules():
            self._undo.append(_mode_undo(each))
            if type(each).get_extra_state is not torch.nn.Module.get_extra_state:
                self._undo.append(_loads(each.set_extra_state, each.get_extra_state()))
            self._undo.append(_sets(each._buffers, dict(each._buffers)))
            yield from (buffer for buffer in each._buffers.values() if buffer is not None)
        for parameter in module.parameters():
            yield from self._of_parameter(parameter)

    def _of_parameter(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        if id(parameter) not in self._gradients:
            self._gradients[id(parameter)] = _Gradient(parameter)
            self._undo.append(_parameter_undo(parameter))
            yield parameter

    def _of_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        state = {parameter: _rebuilt(each) for parameter, each in optimizer.state.items()}
        groups = [(group, _rebuilt(group)) for group in optimizer.param_groups]

        def undo() -> None:
            optimizer.state.clear()
            optimizer.state.update({key: _rebuilt(each) for key, each in state.items()})
            optimizer.param_groups[:] = [group for group, _ in groups]
            for group, before in groups:
                group.clear()
                group.update(_rebuilt(before))

        self._undo.append(undo)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield from self._of_parameter(parameter)
            yield from tensors_of({key: group[key] for key in group if key != "params"})
        yield from tensors_of(list(optimizer.state.values()))

    def _keep_other(self, each: Any) -> None:
        """Note how to bring back an object of which only its `state_dict` is known."""
        self._undo.append(_loads(each.load_state_dict, each.state_dict()))
        if is_scaler(each):
            self._scalers.append(each.state_dict())
            stages = each._per_optimizer_states  # who has unscaled: not in its state_dict
            before = {key: dict(stage) for key, stage in stages.items()}
            self._undo.append(_sets(stages, before))


class _Gradient:
    """The gradient of a parameter at one moment: its values, or that there is none.

    Keeps a copy but not the gradient itself, so that `zero_grad` frees its memory as ever.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        self._copy: torch.Tensor | None = None
        self._note()

    def _note(self) -> None:
        gradient = self._parameter.grad
        self._known = None if gradient is None else weakref.ref(gradient)
        self._version = 0 if gradient is None else gradient._version

    def copy(self, before: "_Gradient | None") -> None:
        """Copy the values, into the copy of the step before if it has one that fits."""
        gradient = self._parameter.grad
        if gradient is None:
            return
        old = None if before is None else before._copy
        if old is None or is_dtensor(gradient) or not _fits(old, gradient):
            self._copy = gradient.detach().clone()
        else:
            self._copy = old.copy_(gradient)

    def restore(self) -> None:
        """Give the parameter the gradient that it had."""
        self._parameter.grad = None if self._copy is None else self._copy.clone()
        self._note()

    def is_new(self) -> bool:
        """Whether the parameter has a gradient now that it did not have then."""
        gradient = self._parameter.grad
        if gradient is None:
            return False
        known = None if self._known is None else self._known()
        return gradient is not known or gradient._version != self._version


class RandomNumbers:
    """The random numbers that a script draws: who takes a state goes on with those of its giver.

    So chips that pick samples by the same numbers still do. It does not if the script has seeded
    its chips apart: then each has numbers of its own. That is seen when a chip joins and when its
    first step begins; a script may seed in between.
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}  # digests by the moment and the generator

    def see(self, moment: str) -> None:
        """Note what the next numbers are, once for each moment."""
        if moment not in self._seen:
            words = _random_words().items()
            self._seen[moment] = {name: zlib.crc32(each.encode()) for name, each in words}

    def state(self) -> dict[str, Any]:
        """Return what the next numbers are, as text, and what they were."""
        return {"seen": {moment: dict(of) for moment, of in self._seen.items()}, **_random_words()}

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on with the numbers of another chip, of each generator that was seeded alike there."""
        moment = next(reversed(self._seen))  # the later one
        theirs = state["seen"].get(moment, {})
        for name, digest in self._seen[moment].items():
            if theirs.get(name) == digest:
                _GENERATORS[name][1](json.loads(state[name]))
                for other, digests in state["seen"].items():
                    self._seen.setdefault(other, {})[name] = digests[name]


def _set_python(state: Any) -> None:
    random.setstate((state[0], tuple(state[1]), state[2]))


_GENERATORS: Final[Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]]] = {
    "python": (random.getstate, _set_python),
    "numpy": (
        lambda: [
            each.tolist() if isinstance(each, np.ndarray) else each
            for each in np.random.get_state()
        ],
        lambda state: np.random.set_state(tuple(state)),
    ),
    "torch": (
        lambda: torch.get_rng_state().tolist(),
        lambda state: torch.set_rng_state(torch.tensor(state, dtype=torch.uint8)),
    ),
}


def _random_words() -> dict[str, str]:
    return {name: json.dumps(get()) for name, (get, _) in _GENERATORS.items()}


def is_scaler(each: object) -> bool:
    """Whether an object is a `GradScaler` that is in use."""
    return isinstance(each, torch.amp.GradScaler) and each.is_enabled()


def _random_states() -> Iterator[Undo]:
    python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield lambda: random.setstate(python)
    yield lambda: np.random.set_state(of_numpy)
    yield lambda: torch.set_rng_state(of_torch)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's stubs
        of_cuda = torch.cuda.get_rng_state_all()
        yield lambda: torch.cuda.set_rng_state_all(of_cuda)


def _parameter_undo(parameter: torch.Tensor) -> Undo:
    needs_gradient, memory = parameter.requires_grad, parameter.detach()

    def undo() -> None:
        if local_of(parameter).data_ptr() != local_of(memory).data_ptr():
            parameter.data = memory  # some optimizers exchange the memory instead of its content
        parameter.requires_grad_(needs_gradient)

    return undo


def _mode_undo(module: torch.nn.Module) -> Undo:
    is_training = module.training
    return lambda: setattr(module, "training", is_training)


def _sets(target: dict[Any, Any], before: dict[Any, Any]) -> Undo:
    def undo() -> None:
        target.clear()
        target.update(_rebuilt(before))

    return undo


def _loads(load: Callable[[Any], object], state: Any) -> Undo:
    def cloned(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    before = map_state(cloned, state)
    return lambda: load(map_state(cloned, before))


def _rebuilt(state: Any) -> Any:
    """Return a nested state in new containers, with the same leaves."""
    return map_state(lambda leaf: leaf, state)


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


def _part_leaf(leaf: Any) -> Any:
    """Return a leaf of a state; of a `DTensor`, which elements of it this chip holds."""
    if not is_dtensor(leaf):
        return leaf
    shape, (_, extents), first = tuple(leaf.shape), own_box(leaf), first_element(leaf)
    sizes = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    split = [axis for axis, extent in enumerate(extents) if extent != shape[axis]]
    if any(axis > 0 for axis in split[:-1]):
        raise InputError(
            "a checkpoint of tiles needs tensors that are split along their first axis and one "
            f"other, but one is {leaf.placements}; save it with torch.distributed.checkpoint"
        )
    if not split or split == [0]:
        return Part(local_of(leaf), Placement(first, shape))
    run, stride = (of[split[-1]] * sizes[split[-1]] for of in (extents, shape))
    return Part(local_of(leaf), Placement(first, shape, run, stride))


def _no_part_leaf(leaf: Any) -> Any:
    """Return a leaf of a state; of a `DTensor`, no element: others have them."""
    if not is_dtensor(leaf):
        return leaf
    return Part(local_of(leaf).reshape(-1)[:0], Placement(0, tuple(leaf.shape)))


def _own_part(like: Any, whole: torch.Tensor, name: str) -> torch.Tensor:
    """Return what a chip holds of a whole tensor if its form is that of another one."""
    if whole.shape != like.shape:
        raise InputError(
            f"the checkpoint is of another model: {name} has shape {tuple(whole.shape)} there and "
            f"{tuple(like.shape)} in this job"
        )
    if not is_dtensor(like):
        return whole
    for axis, (offset, extent) in enumerate(zip(*own_box(like), strict=True)):
        whole = whole.narrow(axis, min(offset, whole.shape[axis] - extent), extent)
    return whole.clone()  # so that not all of it stays in memory


def _ranks_with_parts(mesh: DeviceMesh, placements: tuple[Any, ...]) -> set[int]:
    """Return the ranks that hold a `DTensor` together with this one."""
    at = mesh.get_coordinate()
    assert at is not None
    line = tuple(
        here if placement.is_replicate() else slice(None)
        for placement, here in zip(placements, at, strict=True)
    )
    return set(mesh.mesh[line].flatten().tolist())


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory of one piece, as a sparse gradient."""
    return tensor.layout != torch.strided


def _fits(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        not _is_odd(tensor)
        and copy.shape == tensor.shape
        and copy.dtype == tensor.dtype
        and copy.device == tensor.device
    )
