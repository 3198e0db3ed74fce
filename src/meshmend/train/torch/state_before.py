"""The state of objects before a step, so that a step that failed leaves no trace in them.

Every tensor that a step may change is copied before it: parameters, their gradients, buffers, the
optimizers' states. A collective may fail after any of them has changed (a closure, a perturbed
weight, a second backward pass), and nothing tells before. The copies are kept from step to step, so
that a step copies but allocates nothing. Knows nothing of what chips send each other.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from meshmend.train.data.random_numbers import random_states, set_random_state
from meshmend.train.sharding.sharded_optimizers import ShardedOptimizers
from meshmend.train.state.state_tree import map_state
from meshmend.train.state.torch_state import tensors_of
from meshmend.train.torch.local_tensors import is_dtensor, local_of
from meshmend.train.torch.loop_state import Stateful

Undo = Callable[[], object]


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
    def capture(self, *, with_random: bool = True) -> None:
        """Copy all that a step may change; the copies of the moment before are used again."""
        self._undo = [*_random_undos()] if with_random else []
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


def is_scaler(each: object) -> bool:
    """Whether an object is a `GradScaler` that is in use."""
    return isinstance(each, torch.amp.GradScaler) and each.is_enabled()


def _random_undos() -> Iterator[Undo]:
    for name, state in random_states().items():
        yield partial(set_random_state, name, state)
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
