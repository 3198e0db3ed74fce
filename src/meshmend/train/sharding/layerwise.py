"""LARS and LAMB: optimizers that scale the step of each tensor by a ratio of two of its norms.

The norms are those of whole tensors. Where the parameters of the optimizer are only parts of
tensors, because the chips of a job share the update, `squared_norms` gives the part of each
parameter. Whoever has added up the parts of all chips puts the norms into `norms`.

Both keep their state by element, so it can be cut and joined as that of any elementwise optimizer.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from meshmend.errors import InputError

Norms = tuple[float, float]  # of the weights, and of the gradient (LARS) or direction (LAMB)
_Group = dict[str, Any]


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017): SGD with momentum.

    The gradient of a tensor, with weight decay, is scaled by trust |w| / (|g| + decay |w|). A group
    with `adapts=False` is plain SGD, as is usual for biases and norms; see `layerwise_groups`.
    """

    norms: Mapping[torch.Tensor, Norms] | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 1e-3,
        adapts: bool = True,
    ) -> None:
        _check_settings("LARS", lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust)
        settings = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "adapts": adapts,
        }
        super().__init__(params, settings)

    @torch.no_grad()
    def squared_norms(self) -> Iterator[tuple[torch.Tensor, float, float]]:
        """Yield each parameter that is to be scaled, and the squares of its two norms."""
        for parameter, gradient, _ in _with_gradients(self.param_groups, only_adapting=True):
            yield parameter, _square(parameter), _square(gradient)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's stubs
        """Update all parameters that have a gradient."""
        norms = _norms_of(self)
        for parameter, gradient, group in _with_gradients(self.param_groups):
            decay, rate = group["weight_decay"], group["lr"]
            if group["adapts"]:
                weights, gradients = norms[parameter]
                if weights > 0 and gradients > 0:
                    rate *= group["trust"] * weights / (gradients + decay * weights)
            change = gradient.add(parameter, alpha=decay).mul_(rate)
            state = self.state[parameter]
            if "momentum_buffer" in state:
                state["momentum_buffer"].mul_(group["momentum"]).add_(change)
            else:
                state["momentum_buffer"] = change
            parameter.sub_(state["momentum_buffer"])


class LAMB(torch.optim.Optimizer):
    """Layer-wise adaptive moments (You et al. 2020): Adam whose step has the norm of the weights.

    The direction r of a tensor is that of AdamW, with weight decay. It is scaled by |w| / |r|. A
    group with `adapts=False` is not scaled, as is usual for biases and norms; see
    `layerwise_groups`.
    """

    norms: Mapping[torch.Tensor, Norms] | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapts: bool = True,
    ) -> None:
        _check_settings("LAMB", lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise InputError(f"LAMB needs betas from 0 to below 1, but got {betas}")
        settings = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adapts": adapts,
        }
        super().__init__(params, settings)

    @torch.no_grad()
    def squared_norms(self) -> Iterator[tuple[torch.Tensor, float, float]]:
        """Yield each parameter that is to be scaled, and the squares of its two norms."""
        for parameter, gradient, group in _with_gradients(self.param_groups, only_adapting=True):
            _, direction = _moments(parameter, gradient, group, self.state.get(parameter, {}))
            yield parameter, _square(parameter), _square(direction)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's stubs
        """Update all parameters that have a gradient."""
        norms = self.norms
        for parameter, gradient, group in _with_gradients(self.param_groups):
            state, direction = _moments(parameter, gradient, group, self.state[parameter])
            self.state[parameter].update(state)
            rate = group["lr"]
            if group["adapts"]:
                weights, directions = (
                    (_square(parameter) ** 0.5, _square(direction) ** 0.5)
                    if norms is None
                    else norms[parameter]
                )
                if weights > 0 and directions > 0:
                    rate *= weights / directions
            parameter.sub_(direction.mul_(rate))


LAYERWISE: Final = (LARS, LAMB)


def layerwise_groups(model: torch.nn.Module) -> list[_Group]:
    """Return two groups: matrices and filters, and vectors, which are neither scaled nor decayed.

    Vectors are the biases, and the factors of norms.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    vectors = [each for each in parameters if each.dim() < 2]
    return [
        {"params": [each for each in parameters if each.dim() >= 2]},
        {"params": vectors, "adapts": False, "weight_decay": 0.0},
    ]


def _moments(
    parameter: torch.Tensor, gradient: torch.Tensor, group: _Group, before: Mapping[str, Any]
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the state of LAMB after a step, in new tensors, and the direction of the step."""
    first, second = group["betas"]
    number = before.get("step", 0) + 1
    if before:
        mean = before["exp_avg"].mul(first)
        square = before["exp_avg_sq"].mul(second)
    else:
        mean, square = torch.zeros_like(parameter), torch.zeros_like(parameter)
    mean.add_(gradient, alpha=1 - first)
    square.addcmul_(gradient, gradient, value=1 - second)
    root = square.div(1 - second**number).sqrt_().add_(group["eps"])
    direction = mean.div(1 - first**number).div_(root)
    direction.add_(parameter, alpha=group["weight_decay"])
    return {"step": number, "exp_avg": mean, "exp_avg_sq": square}, direction


def _norms_of(optimizer: LARS) -> Mapping[torch.Tensor, Norms]:
    if optimizer.norms is not None:
        return optimizer.norms
    return {
        parameter: (one**0.5, other**0.5) for parameter, one, other in optimizer.squared_norms()
    }


def _with_gradients(
    groups: Iterable[_Group], *, only_adapting: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor, _Group]]:
    """Yield the parameters with gradients, these, and their groups."""
    for group in groups:
        if only_adapting and not group["adapts"]:
            continue
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter, parameter.grad, group


def _square(values: torch.Tensor) -> float:
    """Return the square of a norm, added up in double precision."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _check_settings(name: str, **settings: float) -> None:
    for key, value in settings.items():
        if not value >= 0:
            raise InputError(f"{name} needs {key} of 0 or more, but got {value}")
