"""The optimizers that `meshmend train --optimizer` offers, by name, with usual learning rates."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import torch

from meshmend.workloads.workload import Workload

Parameters = Iterable[torch.nn.Parameter]

_MAKERS: Final[dict[str, Callable[[Parameters], torch.optim.Optimizer]]] = {
    "sgd": lambda each: torch.optim.SGD(each, lr=0.05, momentum=0.9),
    "adam": lambda each: torch.optim.Adam(each, lr=1e-3),
    "adamw": lambda each: torch.optim.AdamW(each, lr=1e-3),
    "adagrad": lambda each: torch.optim.Adagrad(each, lr=1e-2),
    "rmsprop": lambda each: torch.optim.RMSprop(each, lr=1e-3),
}


def with_optimizer(workload: Workload, name: str) -> Workload:
    """Return a workload with another optimizer; it keeps its own if that has this name."""
    own = workload.optimizer

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        mine: Any = own(model)
        is_own = type(mine).__name__.lower() == name
        return mine if is_own else _MAKERS[name](model.parameters())

    return replace(workload, optimizer=optimizer)
