"""Optimizers of sharded models that step on what this chip holds, as plain tensors.

An operation on a `DTensor` whose mesh is new takes PyTorch milliseconds to think about, and a fused
step of all parameters hundreds of them. After each change of the mesh all chips would wait for
that. An optimizer that updates each element by itself cannot tell a part of a parameter from a
whole one. So for the time of a step it gets the parts; before and after, also in hooks of the loop,
it has the parameters, and its state is that of a sharded model.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from meshmend.train.sharding.pieces import WHOLE
from meshmend.train.sharding.sharded_optimizers import is_elementwise
from meshmend.train.torch.local_tensors import as_tensor_like, is_dtensor, local_of
from meshmend.train.torch.optimizers import before_other_hooks, has_closure, parameters_of


class LocalSteps:
    """Lets optimizers step on parts of tensors; those for which that is not the same are left out.

    `remove` ends it.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._parameters: list[list[torch.Tensor]] = []  # of each group, while a step is on
        self._state: Any = {}  # of the optimizer that steps
        self._whole: dict[int, tuple[torch.Tensor, Any]] = {}  # by id: a part, and its tensor
        self._handles: list[Any] = []
        for optimizer in filter(_is_suited, optimizers):
            self._handles += [
                before_other_hooks(optimizer, self._after_step),  # which see the parameters again
                optimizer.register_step_pre_hook(self._before_step),
            ]

    def remove(self) -> None:
        """Let the optimizers step on their parameters again."""
        for handle in self._handles:
            handle.remove()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]
    ) -> None:
        self._parameters = []
        if has_closure(arguments, named):
            return  # a closure computes gradients in the middle of the step
        self._state, optimizer.state = optimizer.state, defaultdict(dict)
        self._whole = {}
        for group in optimizer.param_groups:
            parameters = group["params"]
            self._parameters.append(parameters)
            group["params"] = [_part(parameter) for parameter in parameters]
            for parameter, part in zip(parameters, group["params"], strict=True):
                if parameter in self._state:
                    held = self._state[parameter]
                    optimizer.state[part] = {key: self._local(each) for key, each in held.items()}

    def _local(self, value: Any) -> Any:
        if not is_dtensor(value):
            return value
        local = local_of(value)
        self._whole[id(local)] = local, value
        return local

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._parameters:
            return
        stepped, optimizer.state = optimizer.state, self._state
        for group, parameters in zip(optimizer.param_groups, self._parameters, strict=True):
            for parameter, part in zip(parameters, group["params"], strict=True):
                for key, value in stepped.get(part, {}).items():
                    optimizer.state[parameter][key] = self._spread(parameter, key, value)
            group["params"] = parameters
        self._parameters, self._whole = [], {}

    def _spread(self, parameter: torch.Tensor, key: str, value: Any) -> Any:
        """Return a value of a state as that of a whole parameter: the tensor that it was."""
        if id(value) in self._whole:
            return self._whole[id(value)][1]
        is_by_element = isinstance(value, torch.Tensor) and key not in WHOLE
        if is_by_element and value.shape == local_of(parameter).shape:
            return as_tensor_like(parameter, value)
        return value


def _is_suited(optimizer: torch.optim.Optimizer) -> bool:
    is_plain = not any(group.get("differentiable") for group in optimizer.param_groups)
    return is_plain and is_elementwise(optimizer) and any(map(is_dtensor, parameters_of(optimizer)))


def _part(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this chip holds of a parameter, with its gradient."""
    part = local_of(parameter)
    if parameter.grad is not None:
        part.grad = local_of(parameter.grad)
    return part
