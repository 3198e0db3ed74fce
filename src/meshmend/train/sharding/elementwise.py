"""Which optimizers can be sharded: those that update each element by itself, LARS and LAMB."""

from typing import Any, Final

import torch

from meshmend.errors import InputError
from meshmend.train.sharding.layerwise import LAYERWISE

ELEMENTWISE: Final = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError if an optimizer may need more than one element to update an element.

    LARS and LAMB do, but say what they need. An optimizer that we do not know says that it does not
    with an attribute.
    """
    known = (*ELEMENTWISE, *LAYERWISE)
    if type(optimizer) in known or getattr(optimizer, "is_elementwise", False):
        return
    name = type(optimizer).__name__
    raise InputError(
        "shard_optimizer needs an optimizer that updates each element by itself, such as SGD, "
        f"Adam or AdamW, or LARS or LAMB of meshmend.train, but got {name}; train with "
        f"shard_optimizer=False, or set {name}.is_elementwise = True if it does"
    )


def refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError if something happens between the sums and the update."""
    hooks: Any = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if hooks:
        raise InputError(
            "shard_optimizer cannot call step_pre_hooks: a step is tried before it counts; clip "
            "with job.clip_grad_norm, or train with shard_optimizer=False"
        )


def check_parameters(parameters: list[torch.Tensor]) -> None:
    """Raise InputError if the parameters of the optimizers do not lie in a row, each once."""
    if len({id(each) for each in parameters}) != len(parameters):
        raise InputError("shard_optimizer needs each parameter in one group of one optimizer")
    for number, parameter in enumerate(parameters):
        if not parameter.is_contiguous():
            raise InputError(
                f"shard_optimizer needs contiguous parameters, but number {number}, of shape "
                f"{tuple(parameter.shape)}, is not; call model.to(memory_format="
                "torch.contiguous_format)"
            )
