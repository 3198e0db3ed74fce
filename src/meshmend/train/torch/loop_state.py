"""What a loop changes beside the model: schedulers, averages of weights, learning rates by hand.

A loop does so after each turn, as in plain PyTorch. The job keeps it right: a turn that does not
count leaves no trace, and checkpoints are written after it. What cannot be kept right is refused.
"""

import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from meshmend.errors import InputError

_STEP_IN_HOOK: Final = (
    "step it in the optimizer: optimizer.register_step_post_hook(lambda *_: scheduler.step())"
)


class Stateful(Protocol):
    """Anything whose state is part of the training, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers and text."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Replace the state."""


def is_compared(part: Stateful) -> bool:
    """Whether an object's state is the same on all chips; a trainer's holds times and who leads."""
    return bool(getattr(part, "is_compared", True))


class LoopState:
    """The objects in `also` and the settings of the optimizers, which the loop may change."""

    def __init__(
        self, optimizers: Mapping[str, torch.optim.Optimizer], also: Sequence[Stateful]
    ) -> None:
        self._optimizers = list(optimizers.values())
        self._also = [part for part in also if is_compared(part)]
        self._kept: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None

    def keep(self) -> None:
        """Remember all of it: the step did not count, so what the loop does after it must not."""
        self._kept = copy.deepcopy(
            ([part.state_dict() for part in self._also], [dict(each) for each in self._settings()])
        )

    def put_back(self) -> None:
        """Undo what the loop has changed since `keep`, if that was called in this turn."""
        if self._kept is None:
            return
        states, settings = self._kept
        self._kept = None
        for part, state in zip(self._also, states, strict=True):
            part.load_state_dict(state)
        for group, values in zip(self._groups(), settings, strict=True):
            for name, value in values.items():
                if isinstance(group[name], torch.Tensor):
                    group[name].copy_(value)  # a compiled step holds this very tensor
                else:
                    group[name] = value

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def _settings(self) -> Iterator[dict[str, Any]]:
        for group in self._groups():
            yield {name: value for name, value in group.items() if name != "params"}


class Schedulers:
    """The schedulers of a job's optimizers: all are in `also`, and step with a step or after it."""

    def __init__(
        self, optimizers: Mapping[str, torch.optim.Optimizer], also: Sequence[object]
    ) -> None:
        """Raise InputError if a scheduler of an optimizer is not part of the training state."""
        # A scheduler wraps the `step` of its optimizer. Where none does, there is none to look for.
        wrapped = [
            each
            for each in optimizers.values()
            if getattr(each.step, "_wrapped_by_lr_sched", False)
        ]
        found = _schedulers() if wrapped else []
        self._found = [each for each in found if any(each.optimizer is other for other in wrapped)]
        known = {id(each) for each in _parts_of(also, depth=3)}
        for scheduler in self._found:
            if id(scheduler) not in known:
                raise InputError(
                    f"Job needs the {type(scheduler).__name__} of its optimizer in also, or a chip "
                    "that joins, or a resumed job, has another learning rate: pass also=[scheduler]"
                )
        self.note()

    def note(self) -> None:
        """Remember how often each has stepped."""
        self._counts = [each.last_epoch for each in self._found]

    def check_before_step(self) -> None:
        """Raise InputError if the loop has stepped one in this turn, before the job's step."""
        for name in self._stepped():
            raise InputError(
                f"the loop over a Job must not step its {name} before job.step: "
                "if the step does not count, that is not undone; step it after job.step, or "
                f"{_STEP_IN_HOOK}"
            )

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
    return issubclass(type(each), torch.optim.lr_scheduler.LRScheduler)


def _parts_of(objects: Sequence[object], depth: int) -> Iterator[object]:
    """Yield objects and what they hold, as a scheduler of several schedulers does."""
    for each in objects:
        yield each
        inner = list(vars(each).values()) if hasattr(each, "__dict__") else []
        inner += each if isinstance(each, list | tuple) else []
        if depth and not isinstance(each, torch.optim.Optimizer | torch.nn.Module):
            yield from _parts_of(inner, depth - 1)
