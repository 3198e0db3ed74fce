"""PyTorch models and their optimizers, as a job trains them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshmend.errors import InputError
from meshmend.train.data.samples import Share
from meshmend.train.sharding.sharded_optimizers import ShardedOptimizers
from meshmend.train.state.digest import BegunDigests
from meshmend.train.state.state_tree import Framework
from meshmend.train.state.torch_state import TORCH, tensors_of
from meshmend.train.torch.backward_watch import BackwardWatch
from meshmend.train.torch.gradients import Gradients
from meshmend.train.torch.loop_state import (
    LoopState,
    LoopWeights,
    Schedulers,
    Stateful,
    is_compared,
)
from meshmend.train.torch.optimizers import (
    Optimizers,
    SteppedOptimizers,
    check_of_model,
    optimizers_of,
    part_name,
)

Models = torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module]


class TorchLearner:
    """Models, their optimizers, and further objects with a state, as a `Learner`.

    With `scaler`, the sums are divided by its scale, and it decides whether the optimizers step.
    With `master_weights`, the optimizers step on float32 copies of parameters of 16 bits.
    If the optimizers are to be sharded, `prepare_update` comes between the sums and `update`.
    """

    framework: Final[Framework] = TORCH

    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        also: Sequence[Stateful] = (),
        *,
        scaler: torch.amp.GradScaler | None = None,
        bucket_bytes: int | None = None,
        shard_optimizer: bool = False,
        master_weights: bool = False,
        n_notes: int = 0,
    ) -> None:
        if any(isinstance(each, torch.amp.GradScaler) for each in also):
            raise InputError("a job needs its GradScaler as scaler=, but got it in also")
        self._model = one_module(model)
        check_memory(self._model, "Job")
        self.sharded: ShardedOptimizers | None = None
        named = self._named_optimizers = optimizers_of(optimizer)
        check_of_model(named.values(), self._model)
        self._guard: Any = None  # against steps of the optimizers outside the job
        self._schedulers: Schedulers | None = None  # None until the first step begins
        self._is_updating = False
        if shard_optimizer or master_weights:
            _refuse_scaler(scaler, "shard_optimizer" if shard_optimizer else "master_weights")
        if shard_optimizer:
            self.sharded = ShardedOptimizers(named, has_masters=master_weights)
        else:
            self._stepped = SteppedOptimizers(named, scaler, has_masters=master_weights)
        self._optimizers = self.sharded or self._stepped
        self._also = (*also, *([scaler] if scaler else []))
        self.loop_state = LoopState(self._model, named, self._also)
        self._loop_weights = LoopWeights(self._model)
        self._parameter_names: dict[torch.Tensor, str] = {
            each: name for name, each in self._model.named_parameters()
        }
        self.sums = Gradients(self._model, bucket_bytes, n_notes=n_notes)
        self._watch = BackwardWatch(self.sums)
        self._weight: float | None = None  # of this chip in this step, as the user said
        self._max_norm: float | None = None
        self._share = Share(0, 0, 1)
        self.norm: float | None = None  # of the last gradients that were to be clipped
        self._prepared: tuple[float, float | None] | None = None  # loss and norm of this step

    def begin(self, share: Share, start: Callable[[int], None]) -> None:
        """Begin a step; `start(number)` is called for each sum that can begin."""
        if self._guard is None:
            self._schedulers = Schedulers(self._named_optimizers, self._also)
            self._guard = register_optimizer_step_pre_hook(self._refuse_step)
        self._share, self._weight, self._max_norm = share, None, None
        self._forget_prepared()
        self._watch.begin(share.n_samples / share.batch, start)
        self._loop_weights.begin()
        self.loop_state.check_groups()
        self.loop_state.begin()

    def end(self) -> None:
        """Let the optimizers be stepped by anyone again: the job is over."""
        if self._guard is not None:
            self._guard.remove()

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """While this holds, the job steps its optimizers."""
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False
            if self._schedulers is not None:  # it is None on a chip that has never had samples
                self._schedulers.note()

    def end_turn(self, n_chips: int) -> None:
        """Look at what the loop did after the step, and undo it if the step did not count.

        Raises:
            InputError: it has stepped a scheduler, and chips without samples have no loop to do so.
        """
        assert self._schedulers is not None, "a step has begun"
        self._schedulers.check_after_step(self._share.batch, n_chips)
        self.loop_state.put_back()
        self._schedulers.note()

    def _refuse_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise InputError if the loop steps an optimizer of the job by itself."""
        is_mine = any(optimizer is each for each in self._named_optimizers.values())
        if is_mine and not self._is_updating:
            raise InputError(
                "the loop over a Job must not call optimizer.step(): job.step(loss) steps the "
                "optimizer, with the gradients of all chips; remove optimizer.step(), or "
                "scaler.step(optimizer), from the loop"
            )

    def weigh(self, weight: float) -> None:
        """Give this chip's gradients a weight other than its number of samples."""
        self._weight = weight
        self._watch.set_scale(weight / self._share.batch)

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes start no sum, because more passes follow."""
        return self._watch.accumulating()

    def flush(self) -> None:
        """Start all sums that may begin, so that something else can follow them."""
        self._watch.flush()

    def clip(self, max_norm: float) -> None:
        """Clip the sums of this step to a norm."""
        self._max_norm = max_norm

    def gather(self, loss: torch.Tensor, weight: float | None, *, is_last: bool) -> None:
        """Put this chip's gradients and loss, times its weight, into the payloads."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{loss!r:.60}"
            raise InputError(
                f"Job.step needs the loss as a tensor of one element, but got {got}; pass its mean "
                "over this chip's samples, the one that backward was called for"
            )
        assert self._schedulers is not None, "a step has begun"
        self.loop_state.check()
        self._loop_weights.note()
        self.loop_state.check_groups()
        if self._share.n_samples < self._share.batch:
            self._watch.check_unchanged()
        self._watch.end()
        chosen = self._weight if weight is None else weight
        scale = (self._share.n_samples if chosen is None else chosen) / self._share.batch
        value, normalise = float(loss.detach()), chosen is not None
        self.sums.gather(
            value, scale, normalise=normalise, is_last=is_last, max_norm=self._max_norm
        )

    def clear(self, *, is_last: bool) -> None:
        """Put zeros into the payloads, because this chip has no samples."""
        self._forget_turn()
        self._forget_prepared()
        self.sums.clear(is_last=is_last)

    def refill_stale(self) -> Sequence[int]:
        """Fill the payloads again that some chip changed after their sum began."""
        numbers = self.sums.refill_stale()
        self._watch.note_stale(numbers)
        return numbers

    def is_finite(self) -> bool:
        """Whether the sums are finite numbers, or a scaler looks after those that are not."""
        if self._optimizers.skips_non_finite:
            return self.sums.are_buffers_finite()
        return self.sums.is_finite()

    def undo(self) -> None:
        """Undo what the loop has changed before the job's step: that does not count."""
        self._watch.abandon()
        self.sums.restore()
        self._loop_weights.restore()
        self.loop_state.restore()

    def update(self) -> float:
        """Step the optimizers with the sums; return the mean loss over all samples."""
        if self.sharded is not None:
            return self._update_shares(self.sharded)
        self.sums.check_trained()
        max_norm = self.sums.max_norm()
        loss = self.sums.scatter()
        with self._updating():
            self.norm = self._stepped.step(max_norm)
        return loss

    def prepare_update(self) -> None:
        """Give the sums to the parameters and clip them, so that an update can be tried."""
        assert self.sharded is not None, "nothing is tried without shares"
        self.sums.check_trained()
        max_norm, loss = self.sums.max_norm(), self.sums.loss()
        self.sums.give_gradients()
        self._prepared = loss, self.sharded.clip(max_norm)

    def _update_shares(self, sharded: ShardedOptimizers) -> float:
        if self._prepared is None:  # this chip trains alone
            self.prepare_update()
        assert self._prepared is not None
        loss, self.norm = self._prepared
        self.sums.give_statistics()
        with self._updating():
            sharded.step()
        return loss

    def _forget_prepared(self) -> None:
        self._prepared = None
        if self.sharded is not None:
            self.sharded.begin()

    def skip(self) -> float:
        """Leave models and optimizers as they are; return the mean loss over all samples."""
        loss = self.sums.loss()
        self.sums.restore()
        return loss

    def state(self) -> dict[str, Any]:
        """Return the state of the models, of the optimizers and of the objects in `also`."""
        return {
            "model": self._model.state_dict(),
            "buffers": other_buffers(self._model),
            "frozen": [
                name for name, each in self._model.named_parameters() if not each.requires_grad
            ],
            "resting": [name for name, each in self._model.named_modules() if not each.training],
            "moving": self._loop_weights.moving,
            "optimizer": self._optimizers.state_dict(),
            "also": [part.state_dict() for part in self._also],
        }

    def saved_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: of a sharded optimizer, this chip's share."""
        saved = {} if self.sharded is None else {"optimizer": self.sharded.saved_state()}
        state = self.state() | saved
        del state["moving"]  # a job that resumes may have another loop
        return state

    def free(self) -> None:
        """Do nothing: what comes is written over the tensors."""

    def _forget_turn(self) -> None:
        self._loop_weights.forget()
        self.loop_state.forget()

    def load(self, state: dict[str, Any]) -> None:
        """Replace these parts by those of another chip or of a checkpoint."""
        like = [each.dtype for each in tensors_of(self._model.state_dict())]
        keeps_types = like == [each.dtype for each in tensors_of(state["model"])]
        self._model.load_state_dict(state["model"])
        load_other_buffers(self._model, state.get("buffers", {}))
        if "frozen" in state:  # by the loop: a chip that joins has not seen that
            self.sums.freeze(set(state["frozen"]))
        if "resting" in state:  # in evaluation mode, by the loop
            for name, each in self._model.named_modules():
                each.training = name not in state["resting"]
        self._loop_weights.know(state.get("moving", self._loop_weights.moving))
        self.sums.remember()
        if state.get("progress", {}).get("step") != 0:  # else the job begins with it
            self.sums.skip_check()
        if self.sharded is not None:
            self.sharded.load_state_dict(state["optimizer"])
        else:
            self._stepped.load_state_dict(state["optimizer"], keeps_types=keeps_types)
        for part, part_state in zip(self._also, state["also"], strict=True):
            part.load_state_dict(part_state)
        self._forget_turn()
        if self._schedulers is not None:
            self._schedulers.note()

    def n_state_bytes(self) -> int:
        """Return the bytes of the state that the optimizers keep on this chip."""
        return self._optimizers.n_state_bytes()

    def begun_digest(self) -> BegunDigests:
        """Begin to hash each tensor of the state by its name; plain values are in words."""
        also = [part.state_dict() if is_compared(part) else {} for part in self._also]
        state = self.state() | {"also": also}
        # A loop may change these in a turn that not all chips have begun.
        del state["frozen"], state["resting"], state["moving"]
        return TORCH.begun_digest(state)

    def part_name(self, name: str) -> str:
        """Return the name of a part of the state, with that of the parameter it belongs to."""
        return part_name(name, self._named_optimizers, self._parameter_names)

    def share_digests(self) -> dict[str, str]:
        """Return a digest of each share of a sharded optimizer that this chip keeps, by place."""
        return {} if self.sharded is None else self.sharded.share_digests()


def other_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that `state_dict` leaves out, by name: those that are not persistent."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    }


@torch.no_grad()
def load_other_buffers(model: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Replace the buffers that are not persistent by those of another chip or of a checkpoint.

    One that a changed script makes with another shape stays as the script has made it.
    """
    for name, buffer in other_buffers(model).items():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.copy_(buffers[name])


def check_memory(model: torch.nn.Module, who: str) -> None:
    """Raise InputError if a parameter or buffer has no memory in which a state can be put."""
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(each):
            continue
        if each.is_inference():
            raise InputError(
                f"{who} needs parameters and buffers that can be written to, but {name} was made "
                "in torch.inference_mode(); make the model outside of it, or with torch.no_grad()"
            )
        if each.is_meta:
            raise InputError(
                f"{who} needs a model that is in memory, but {name} is on the device meta; give it "
                "values first, as model.to_empty(device=...) and an initialisation do"
            )
        if any(step == 0 and n > 1 for n, step in zip(each.shape, each.stride(), strict=True)):
            raise InputError(
                f"{who} needs parameters and buffers whose elements have memory of their own, but "
                f"{name} was expanded; store {name}.clone()"
            )


def _refuse_scaler(scaler: torch.amp.GradScaler | None, option: str) -> None:
    if scaler is not None and scaler.is_enabled():
        raise InputError(
            f"{option} cannot step with a GradScaler; compute in bfloat16, which needs none, or "
            f"train with {option}=False"
        )


def one_module(model: Models) -> torch.nn.Module:
    """Return a module, or several modules as one.

    Raises:
        InputError: it is no module, or a name is not possible.
    """
    if isinstance(model, torch.nn.Module):
        return model
    try:
        if isinstance(model, Mapping):
            return torch.nn.ModuleDict(dict(model))
        return torch.nn.ModuleList(model)
    except (TypeError, KeyError) as error:
        raise InputError(
            f"Job needs a module, or several in a list or dict, but: {error}"
        ) from None
