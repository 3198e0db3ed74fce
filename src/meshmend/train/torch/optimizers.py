"""The optimizers of a job, one or several, stepped together, with or without a loss scale.

Every chip has the same summed gradients, bit for bit. So every chip clips them by the same norm,
finds the same infinities in them, and changes the scale in the same way.

A model of bfloat16 or float16 loses small changes. With **master weights** the changes are made to
float32 copies, and the parameters are the masters, rounded. A master is a part of the optimizer's
state, under the name `master`: it is saved, sent and sharded as the rest of it.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from meshmend.errors import InputError
from meshmend.train.sharding.pieces import n_bytes_of

Optimizers = (
    torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]
)

MASTER: Final = "master"
_SHORT: Final = (torch.bfloat16, torch.float16)


def optimizers_of(optimizer: Optimizers) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of a job by name, given one, a sequence of them, or a dict."""
    if isinstance(optimizer, Mapping):
        return dict(optimizer)
    if isinstance(optimizer, Sequence):
        return {str(at): each for at, each in enumerate(optimizer)}
    return {"": optimizer}


def check_of_model(optimizers: Iterable[torch.optim.Optimizer], model: torch.nn.Module) -> None:
    """Raise InputError if an optimizer steps what is no parameter of the model."""
    mine = {id(each) for each in model.parameters()}
    for optimizer in optimizers:
        others = [each for each in parameters_of(optimizer) if id(each) not in mine]
        if others:
            raise InputError(
                f"Job needs optimizers of its model's parameters, but {type(optimizer).__name__} "
                f"steps one of shape {list(others[0].shape)} that the model has not: its gradients "
                "would not be summed; pass all modules in a list, or make the optimizer of "
                "model.parameters()"
            )


class SteppedOptimizers:
    """Optimizers by name, in the order in which they step; a single one is called ''.

    With `has_masters`, they step on float32 copies of parameters of 16 bits.

    Raises:
        InputError: one of them needs a closure, or the scaler cannot scale its gradients.
    """

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None = None,
        *,
        has_masters: bool = False,
    ) -> None:
        self._optimizers = dict(optimizers)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        for optimizer in self._optimizers.values():
            _refuse_closure(optimizer)
        self._trained = list(
            {each: None for one in self._optimizers.values() for each in parameters_of(one)}
        )
        if self._scaler and any(each.dtype == torch.float16 for each in self._trained):
            raise InputError(
                "a GradScaler needs parameters of float32, but some are float16; keep the model in "
                "float32 and compute within torch.autocast"
            )
        self._masters = (
            {name: MasterWeights(each) for name, each in self._optimizers.items()}
            if has_masters
            else {}
        )

    @property
    def skips_non_finite(self) -> bool:
        """Whether a step with gradients that are not finite changes nothing but the scale."""
        return self._scaler is not None

    def step(self, max_norm: float | None) -> float | None:
        """Step all optimizers; first clip the gradients to a norm, and return what it was."""
        with_gradients = [each for each in self._optimizers.values() if _has_gradients(each)]
        if self._scaler is not None:
            self._begin_to_scale(self._scaler)
            for optimizer in with_gradients:
                self._scaler.unscale_(optimizer)
        norm = None
        if max_norm is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(self._trained, max_norm))
        for masters in self._masters.values():
            masters.take_gradients()
        if self._scaler is None:
            for optimizer in self._optimizers.values():
                optimizer.step()
        elif with_gradients:
            for optimizer in with_gradients:
                self._scaler.step(optimizer)
            self._scaler.update()
        for masters in self._masters.values():
            masters.give_weights()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the only optimizer, or those of several by their names."""
        states = {
            name: self._masters.get(name, optimizer).state_dict()
            for name, optimizer in self._optimizers.items()
        }
        return states[""] if list(states) == [""] else states

    def load_state_dict(self, state: dict[str, Any], *, keeps_types: bool = True) -> None:
        """Replace the states by those that `state_dict` returned, perhaps in another type of model.

        Raises:
            InputError: they have masters, and this job has none.
        """
        states = {"": state} if list(self._optimizers) == [""] else state
        for name, optimizer in self._optimizers.items():
            if name in self._masters:
                self._masters[name].load_state_dict(states[name])
            else:
                check_no_masters(states[name]["state"].values())
                load_optimizer(optimizer, states[name], keeps_types=keeps_types)

    def n_state_bytes(self) -> int:
        """Return the bytes of the tensors of all states."""
        states = (state for each in self._optimizers.values() for state in each.state.values())
        return n_bytes_of(states) + sum(each.n_bytes for each in self._masters.values())

    def _begin_to_scale(self, scaler: torch.amp.GradScaler) -> None:
        """Make a scaler ready that has scaled no loss, because its chip has had no samples yet."""
        device = self._trained[0].device if self._trained else None
        scaler.scale(torch.zeros((), device=device))


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def before_other_hooks(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    """Call a hook after each step, before those of the loop; return what removes it."""
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = vars(optimizer)["_optimizer_step_post_hooks"]
    hooks.move_to_end(handle.id, last=False)
    return handle


def has_closure(arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether a call of `step`, as its hooks see it, has a closure."""
    return any(each is not None for each in (*arguments[1:], *named.values()))


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in parameters_of(optimizer))


def _refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError if an optimizer computes the loss several times in a step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"Job cannot step {type(optimizer).__name__}: it needs a closure that computes the "
            "loss several times in a step; use an optimizer that steps once, such as SGD or AdamW"
        )


def part_name(
    name: str,
    optimizers: Mapping[str, torch.optim.Optimizer],
    parameter_names: Mapping[torch.Tensor, str],
) -> str:
    """Return the name of a part of the training state, with that of its parameter, if it has one.

    `optimizer.state.3.exp_avg` becomes `the optimizer's exp_avg of layer.weight`.
    """
    for key, optimizer in optimizers.items():
        start = f"optimizer.{key}.state." if key else "optimizer.state."
        if name.startswith(start):
            number, _, what = name.removeprefix(start).partition(".")
            parameters = list(parameters_of(optimizer))
            if number.isdigit() and int(number) < len(parameters):
                whose = parameter_names.get(parameters[int(number)], f"parameter {number}")
                return f"the optimizer's {what or 'state'} of {whose}"
    return name


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
        load_optimizer(self._optimizer, {**document, "state": kept})


def load_optimizer(
    optimizer: torch.optim.Optimizer, document: Mapping[str, Any], *, keeps_types: bool = True
) -> None:
    """Replace the state of an optimizer; its groups stay the same dicts, which others may hold.

    PyTorch makes each tensor but `step` one of its parameter's type. So the float32 of NAdam beside
    parameters of other types would be another number than on the chip that it comes from.
    """
    groups = optimizer.param_groups
    optimizer.load_state_dict(dict(document))
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    optimizer.param_groups = groups
    numbers = [number for group in document["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=True):
        for name, value in document["state"].get(number, {}).items() if keeps_types else ():
            made = optimizer.state[parameter][name]
            if isinstance(value, torch.Tensor) and made.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(made.device, copy=True)


def needs_master(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of a type that loses small changes."""
    return parameter.dtype in _SHORT


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
