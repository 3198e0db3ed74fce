"""What a loop changes by itself: schedulers, averages of weights, rates and weights by hand.

A loop does so in each turn, as in plain PyTorch. The job keeps it right: a turn that does not count
leaves no trace, and checkpoints are written after it. What cannot be kept right is refused.
"""

import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch.optim import lr_scheduler

from meshmend.errors import InputError
from meshmend.train.state.state_tree import map_state
from meshmend.train.state.torch_state import TORCH, tensors_of

_STEP_IN_HOOK: Final = (
    "step it in the optimizer: optimizer.register_step_post_hook(lambda *_: scheduler.step())"
)
_IN_HOOK: Final = "in the optimizer, with optimizer.register_step_post_hook(...)"
_SMALL: Final = 1024  # elements of a tensor whose value is looked at in each turn


class Stateful(Protocol):
    """Anything whose state is part of the training, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers and text."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Replace the state."""


def is_compared(part: Stateful) -> bool:
    """Whether an object's state is the same on all chips; a trainer's holds times and who leads."""
    return bool(getattr(part, "is_compared", True))


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler was made for an optimizer: it wraps the method `step`."""
    return bool(getattr(optimizer.step, "_wrapped_by_lr_sched", False))


class LoopState:
    """The model, the objects in `also`, the settings of the optimizers: the loop may change them.

    `begin`, `check` and `restore` are for what it does before `job.step`; for weights that change
    there, see `LoopWeights`. `keep` and `put_back` are for what it does after `job.step`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        also: Sequence[Stateful],
    ) -> None:
        self._model = model
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._optimizers = list(optimizers.values())
        self._also = [part for part in also if is_compared(part)]
        self._n_parameters: list[int] = []  # of each group, when the first step began
        # Of modules that have a state beside their tensors, such as a count of their passes.
        self._counting: list[Any] = [
            each
            for each in model.modules()
            if type(each).get_extra_state is not torch.nn.Module.get_extra_state
        ]
        self._begun: _Settings | None = None  # None if there is nothing to undo
        self._seen: list[dict[str, str]] = []  # digests of `also` when the turn began
        self._marks: list[list[_Mark]] = []  # of the optimizers' states, then or at `keep`
        self._is_first = True  # no turn has been looked at
        self._kept: tuple[list[dict[str, Any]], _Settings] | None = None

    def check_groups(self) -> None:
        """Raise InputError if an optimizer has other parameters than in the first step.

        A chip that joins, and a job that resumes, could not take the optimizer's state.
        """
        found = [len(group["params"]) for group in self._groups()]
        self._n_parameters = self._n_parameters or found
        if found != self._n_parameters:
            raise InputError(
                "Job needs optimizers that keep their parameters, but the loop has given them "
                "others; make all groups before the job, with a learning rate of 0 for as long as "
                "they are to stay as they are"
            )

    def begin(self) -> None:
        """Begin a turn of the loop."""
        self._begun, self._marks = self._settings(), self._states()
        self._seen = [_digests(part, is_whole=self._is_first) for part in self._also]

    def forget(self) -> None:
        """Begin a step without a turn of the loop, or go on from another state."""
        self._begun = None
        if self._kept is not None:  # the loop has not ended its turn
            self.keep()

    def check(self) -> None:
        """Raise InputError if the loop has changed before `job.step` what is changed after it.

        That is `also` and what the optimizers keep. Both are large: to copy them in each turn, so
        that this can be undone, would cost much.
        """
        for name in self._changed():
            raise InputError(
                f"the loop over a Job must not change the state of its {name} before job.step: if "
                "the step does not count, that is not undone; change it where job.step has returned"
                f" True, or {_IN_HOOK}"
            )
        for part, seen in zip(self._also, self._seen, strict=True):
            if _digests(part, is_whole=self._is_first) != seen:
                raise InputError(
                    f"the loop over a Job must not change the {type(part).__name__} in also before "
                    "job.step: if the step does not count, that is not undone; change it after "
                    f"job.step, or {_IN_HOOK}"
                )
        self._is_first = False

    def restore(self) -> None:
        """Make settings what they were when the turn began, because the step does not count."""
        if self._begun is not None:
            self._set(self._begun)

    def keep(self) -> None:
        """Remember all of it: the step did not count, so what the loop does after it must not."""
        states = copy.deepcopy([part.state_dict() for part in self._also])
        self._kept, self._marks = (states, self._settings()), self._states()
        tensors = (*self._model.parameters(), *self._model.buffers())
        self._held = [(each, _copy(each)) for each in tensors]

    def put_back(self) -> None:
        """Undo what the loop has changed since `keep`, if that was called in this turn.

        Raises:
            InputError: it has changed what an optimizer keeps, of which there is no copy.
        """
        if self._kept is None:
            return
        for name in self._changed():
            raise InputError(
                f"the loop over a Job has changed the state of its {name} after a step that did "
                "not count, which cannot be undone; change it where job.step has returned True, or "
                f"{_IN_HOOK}"
            )
        states, settings = self._kept
        self._kept = None
        for part, state in zip(self._also, states, strict=True):
            part.load_state_dict(state)
        self._set(settings)
        held, self._held = self._held, []
        with torch.no_grad():
            for tensor, before in held:
                tensor.copy_(before)

    def _states(self) -> "list[list[_Mark]]":
        """Return marks of all tensors that each optimizer keeps."""
        return [
            [_mark(each) for each in tensors_of([*optimizer.state.values()])]
            for optimizer in self._optimizers
        ]

    def _changed(self) -> Iterator[str]:
        """Yield the kinds of the optimizers whose states have changed since they were marked."""
        for optimizer, before, now in zip(
            self._optimizers, self._marks, self._states(), strict=True
        ):
            if before != now:
                yield type(optimizer).__name__

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def _settings(self) -> "_Settings":
        """Return copies of the settings of all groups, and of the states of modules that count."""
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._groups()
        ]
        return copy.deepcopy((groups, [each.get_extra_state() for each in self._counting]))

    def _set(self, settings: "_Settings") -> None:
        groups, counts = settings
        for group, values in zip(self._groups(), groups, strict=True):
            for name, value in values.items():
                if isinstance(group[name], torch.Tensor):
                    group[name].copy_(value)  # a compiled step holds this very tensor
                else:
                    group[name] = value
        for module, count in zip(self._counting, counts, strict=True):
            module.set_extra_state(copy.deepcopy(count))


_Mark = tuple[int, int]
_Settings = tuple[list[dict[str, Any]], list[Any]]


def _digests(part: Stateful, *, is_whole: bool) -> dict[str, str]:
    """Return a digest of each value of a state, and for large tensors a mark, or one too."""

    def leaf(value: Any) -> Any:
        is_large = isinstance(value, torch.Tensor) and value.numel() > _SMALL
        return list(_mark(value)) if is_large and not is_whole else value

    return TORCH.begun_digest(map_state(leaf, part.state_dict())).wait()


class LoopWeights:
    """Weights that the loop changes before `job.step`, such as those of a teacher in the model.

    In the first turn of a job a chip copies all weights, and from then on those that were seen to
    change. A chip that joins knows them from the others: a copy of all would double what it needs.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._places = [
            (path, held, [*map(id, held.values())])
            for path, module in model.named_modules()
            for held in (module._parameters, module._modules)
            if held
        ]
        self._moving = set(self._parameters)  # as far as this chip knows
        self._is_new = True
        self._before: dict[str, torch.Tensor] = {}
        self._marks: dict[str, _Mark] = {}
        self._lost = ""  # a weight that changed in this turn, and was not copied before

    @property
    def moving(self) -> list[str]:
        """The names of the weights that the loop changes, as far as this chip knows."""
        return sorted(self._moving)

    def know(self, moving: Sequence[str]) -> None:
        """Take over what another chip knows; before its first turn it knows nothing."""
        if len(moving) < len(self._parameters):
            self._moving = set(moving) if self._is_new else self._moving | set(moving)
            self._is_new = False

    def begin(self) -> None:
        """Begin a turn of the loop."""
        self._before = {name: _copy(self._parameters[name]) for name in sorted(self._moving)}
        self._marks = {name: _mark(each) for name, each in self._parameters.items()}
        self._lost = ""

    def forget(self) -> None:
        """Begin a step without a turn of the loop, or go on from another state."""
        self._before, self._lost = {}, ""

    @torch.no_grad()
    def note(self) -> None:
        """Note what the loop has changed in this turn, up to `job.step`.

        Raises:
            InputError: the model has other parameters than when the job was made.
        """
        for path, held, before in self._places:
            if [*map(id, held.values())] != before:
                raise InputError(
                    "Job needs a model that keeps its parameters, but since the job was made "
                    f"{path or 'the model'} got others: their gradients would not be summed; prune "
                    "or extend the model before you make the job"
                )
        changed = {
            name for name, each in self._parameters.items() if _mark(each) != self._marks[name]
        }
        changed |= {
            name
            for name, before in self._before.items()
            if not torch.equal(before, self._parameters[name].to(before.device))
        }
        self._lost = min(changed - self._before.keys(), default="")
        self._moving = changed if self._is_new else self._moving | changed
        self._is_new = False

    @torch.no_grad()
    def restore(self) -> None:
        """Make these weights what they were, because the step does not count.

        Raises:
            InputError: one has changed that the loop left alone in earlier turns.
        """
        if self._lost:
            raise InputError(
                f"the loop over a Job has changed {self._lost} before job.step, for the first time "
                "and in a step that did not count, which cannot be undone; change weights after "
                "job.step"
            )
        for name, before in self._before.items():
            self._parameters[name].copy_(before)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the memory of the host: that of a device may be full."""
    return tensor.detach().to("cpu", copy=True)


def _mark(tensor: torch.Tensor) -> _Mark:
    """Return what differs when a tensor got other memory, or was written to but through `data`."""
    return tensor.data_ptr(), tensor._version


class Schedulers:
    """The schedulers of a job's optimizers: all are in `also`, and step with a step or after it."""

    def __init__(
        self, optimizers: Mapping[str, torch.optim.Optimizer], also: Sequence[object]
    ) -> None:
        """Raise InputError if a scheduler of an optimizer is not part of the training state."""
        # Where an optimizer has none, there is none to look for.
        wrapped = [each for each in optimizers.values() if is_scheduled(each)]
        found = _schedulers() if wrapped else []
        mine = [each for each in found if any(each.optimizer is other for other in wrapped)]
        # A chain has no count of its own; those that it consists of are found too.
        self._found = [each for each in mine if not isinstance(each, lr_scheduler.ChainedScheduler)]
        known = {id(each) for each in _parts_of(also, depth=3)}
        for scheduler in mine:
            if id(scheduler) not in known:
                raise InputError(
                    f"Job needs the {type(scheduler).__name__} of its optimizer in also, or a chip "
                    "that joins, or a resumed job, has another learning rate: pass also=[scheduler]"
                )
        self.note()

    def note(self) -> None:
        """Remember how often each has stepped."""
        self._counts = [each.last_epoch for each in self._found]

    def check_after_step(self, batch: int, n_chips: int) -> None:
        """Raise InputError if the loop steps one, and some chips have no samples to loop over."""
        if batch >= n_chips:
            return
        for name in self._stepped():
            raise InputError(
                f"the loop over a Job must not step its {name}: a batch of {batch} gives some of "
                f"the {n_chips} chips no samples, and their loops do not run; use a batch of at "
                f"least {n_chips}, or {_STEP_IN_HOOK}"
            )

    def _stepped(self) -> Iterator[str]:
        for scheduler, count in zip(self._found, self._counts, strict=True):
            if scheduler.last_epoch != count:
                yield type(scheduler).__name__


def _schedulers() -> list[Any]:
    """Return all schedulers of this process that are in use."""
    gc.collect()  # or one that was replaced would count
    return [each for each in gc.get_objects() if _is_scheduler(each)]


def _is_scheduler(each: object) -> bool:
    # Not `isinstance`: it asks objects for their class, and some answer with an import.
    return issubclass(type(each), lr_scheduler.LRScheduler)


def _parts_of(objects: Sequence[object], depth: int) -> Iterator[object]:
    """Yield objects and what they hold, as a scheduler of several schedulers does."""
    for each in objects:
        yield each
        inner = list(vars(each).values()) if hasattr(each, "__dict__") else []
        inner += each if isinstance(each, list | tuple) else []
        if depth and not isinstance(each, torch.optim.Optimizer | torch.nn.Module):
            yield from _parts_of(inner, depth - 1)
