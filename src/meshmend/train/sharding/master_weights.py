"""Master weights: the weights of 16-bit parameters in float32, which the optimizer steps on.

The model computes with parameters of bfloat16 or float16, which lose small changes. So the changes
are made to the masters, and the parameters are the masters, rounded. A master is a part of the
optimizer's state, under the name `master`: it is saved, sent and sharded as the rest of it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from meshmend.errors import InputError

MASTER: Final = "master"
_SHORT: Final = (torch.bfloat16, torch.float16)


def needs_master(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of a type that loses small changes."""
    return parameter.dtype in _SHORT


class MasterWeights:
    """The masters of all parameters of an optimizer that is not sharded.

    From now on the groups of the optimizer hold the masters in place of 16-bit parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._pairs: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # number, parameter, master
        number = 0
        for group in optimizer.param_groups:
            for at, parameter in enumerate(group["params"]):
                if needs_master(parameter):
                    master = parameter.detach().float()
                    group["params"][at] = master
                    self._pairs.append((number, parameter, master))
                    if parameter in optimizer.state:
                        state = optimizer.state.pop(parameter)
                        optimizer.state[master] = _in_float32(state)
                number += 1

    @property
    def n_bytes(self) -> int:
        """The bytes of all masters."""
        return sum(master.nbytes for _, _, master in self._pairs)

    def take_gradients(self) -> None:
        """Give the masters the gradients of the parameters."""
        for _, parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()

    @torch.no_grad()
    def give_weights(self) -> None:
        """Set the parameters to the masters, rounded; the masters' gradients go."""
        for _, parameter, master in self._pairs:
            parameter.copy_(master)
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state with the masters in it."""
        document = self._optimizer.state_dict()
        states = {number: dict(state) for number, state in document["state"].items()}
        for number, _, master in self._pairs:
            states.setdefault(number, {})[MASTER] = master
        return {**document, "state": dict(sorted(states.items()))}

    @torch.no_grad()
    def load_state_dict(self, document: dict[str, Any]) -> None:
        """Replace the optimizer's state and the masters."""
        states = {int(number): dict(state) for number, state in document["state"].items()}
        for number, parameter, master in self._pairs:
            saved = states.get(number, {}).pop(MASTER, None)
            master.copy_(parameter if saved is None else saved)
        kept = {number: state for number, state in states.items() if state}
        self._optimizer.load_state_dict({**document, "state": kept})


def check_no_masters(states: Iterable[Mapping[str, Any]]) -> None:
    """Raise InputError if a state has masters: a job without masters would lose them."""
    if any(MASTER in state for state in states):
        raise InputError(
            "this state has float32 master weights, which this job would lose; make the job with "
            "master_weights=True"
        )


def _in_float32(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.float() if isinstance(value, torch.Tensor) and value.dtype in _SHORT else value
        for key, value in state.items()
    }
