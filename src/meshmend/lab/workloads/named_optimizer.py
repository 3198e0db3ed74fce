"""The optimizers that `meshmend train --optimizer` offers, by name, with usual learning rates."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch

from meshmend.lab.workloads.workload import Workload
from meshmend.train.sharding.layerwise import LAMB, LARS, layerwise_groups

_MAKERS: Final[dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    "lars": lambda model: LARS(layerwise_groups(model), lr=1.0),
    "lamb": lambda model: LAMB(layerwise_groups(model), lr=1e-2),
}


def with_optimizer(workload: Workload, name: str) -> Workload:
    """Return a workload with another optimizer; it keeps its own if that has this name."""
    own = workload.optimizer

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        mine: Any = own(model)
        is_own = type(mine).__name__.lower() == name
        return mine if is_own else _MAKERS[name](model)

    return replace(workload, optimizer=optimizer)
