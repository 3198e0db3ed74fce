"""What a chip of a tile has in a checkpoint of the whole model: its parts of tensors.

The files are those of every job (`train/state/checkpoint.py`): put together they are the state of
the whole model. So a job with other tiles, larger or smaller ones, or with none, goes on from them,
and they are exported as all others. A chip that reads one reads all of it, and keeps its part.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from meshmend.errors import InputError
from meshmend.train.state.resume import check_optimizer
from meshmend.train.state.state_tree import Part, Placement, map_state
from meshmend.train.torch.group_state import GroupState, load_optimizer_state
from meshmend.train.torch.learner import load_other_buffers, other_buffers
from meshmend.train.torch.local_tensors import first_element, is_dtensor, local_of, own_box
from meshmend.train.torch.loop_state import Stateful
from meshmend.train.torch.optimizers import parameters_of


def whole_state(held: GroupState, *, has_parts: bool) -> dict[str, Any]:
    """Return the state of a `Job` with the same model, as far as this chip holds it.

    Without `has_parts` a twin writes this chip's part, all but what it owns of shared states.

    Raises:
        InputError: a chip's part of a tensor is none that a checkpoint knows, or there is more than
            one model.
    """
    model, optimizer, *others = held.objects
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            "a checkpoint of tiles needs build to return the model and its optimizer first, but "
            f"got {type(model).__name__} and {type(optimizer).__name__}"
        )
    state = {
        "model": model.state_dict(),
        "buffers": other_buffers(model),
        "frozen": [name for name, each in model.named_parameters() if not each.requires_grad],
        "optimizer": held.saved_state_of(optimizer),
        "also": [held.saved_state_of(each) for each in others],
    }
    leaf = _part_leaf if has_parts else _no_part_leaf
    return cast("dict[str, Any]", map_state(leaf, state))


def load_whole(objects: Sequence[Stateful], state: Mapping[str, Any]) -> None:
    """Give objects this chip's part of the whole state of a checkpoint.

    Raises:
        InputError: it is that of another model.
        ResumeError: it is that of another optimizer.
    """
    model, _, *others = objects
    assert isinstance(model, torch.nn.Module)
    if len(others) != len(state["also"]):
        raise InputError(
            f"the checkpoint is of another job: build returns {len(others)} objects after the "
            f"model and its optimizer, but the checkpoint has {len(state['also'])}"
        )
    states = state["model"], state["optimizer"], *state["also"]
    _load_whole(model, states[0])
    load_other_buffers(model, state.get("buffers", {}))
    for name in state.get("frozen", ()):
        model.get_parameter(name).requires_grad_(False)
    for each, its_state in zip(objects[1:], states[1:], strict=True):
        _load_whole(each, its_state)


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
        check_optimizer(state, each.state_dict())
        parameters = list(parameters_of(each))
        by_parameter = {
            number: {
                name: _own_part(parameters[number], value, name)
                if isinstance(value, torch.Tensor) and value.shape == parameters[number].shape
                else value
                for name, value in values.items()
            }
            for number, values in state["state"].items()
        }
        load_optimizer_state(each, {**state, "state": by_parameter})
    else:
        each.load_state_dict(state)


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
