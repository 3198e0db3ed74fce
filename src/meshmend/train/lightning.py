"""A strategy for Lightning's Trainer with which training survives lost chips.

    from meshmend.train.lightning import MeshmendStrategy

    trainer = lightning.Trainer(strategy=MeshmendStrategy(), accelerator="cpu", devices=1)

Lightning runs its own loops on every chip. The training loader becomes one of a `Job`, which hands
out this chip's samples, and a step of the optimizer becomes one of the job: it sums the gradients
over all chips, and if the mesh changed meanwhile it is done again, before Lightning hears of it.
Validation runs on every chip, over all samples. The chip that leads logs and saves.

A callback may end the training on one chip alone, as by a clock. Lightning's loops would leave at
once, and the others would wait for that chip. So they are told of a minimum of steps that is never
reached until all chips know of the end: after validation and epochs they ask each other, and
between them the wish travels with the sums of the next step.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from meshmend.errors import InputError
from meshmend.packages import need

need("meshmend.train.lightning", "lightning", "torch", extra="lightning")

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Checkpoint,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.call import (
    _call_callbacks_load_state_dict,
    _call_callbacks_state_dict,
)
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, IterableDataset

from meshmend.train.core.worker_environment import worker_environment
from meshmend.train.data.sample_source import check_loader
from meshmend.train.torch.job import Job

_NEVER: Final = 2**62

# Callbacks of Lightning with which chips would train something else, and why.
_REFUSED: Final = {
    StochasticWeightAveraging: "a chip that comes back would not have the average",
    WeightAveraging: "a chip that comes back would not have the average",
    GradientAccumulationScheduler: "a step sums over all chips; use a larger batch_size",
    BaseFinetuning: "parameters cannot join the optimizer later; freeze them for the whole job",
    ModelPruning: "a chip that comes back would have the layers as they were",
    BatchSizeFinder: "it trains before the job does; run it without the strategy",
    LearningRateFinder: "it trains before the job does; run it without the strategy",
}


class MeshmendStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # untyped
    """One chip of a job, as Lightning sees it: a single device.

    A step uses the batch size of the training loader for each chip that the job begins with, and
    as many samples when chips are missing. `seed` shuffles them.
    """

    strategy_name = "meshmend"

    def __init__(self, device: Any = "cpu", *, seed: int = 0, **named: Any) -> None:
        super().__init__(device, **named)
        self._seed = seed
        self._loader: _JobLoader | None = None
        self._job: Job | None = None
        self._batches: Iterator[Any] = iter(())
        self._ahead: deque[Any] = deque()  # batches of the job that Lightning has not asked for
        self._schedulers: list[tuple[Any, str, int]] = []  # with interval and frequency
        self._is_training = False
        self._least_steps: int | None = None  # what the trainer was given as its minimum
        environment = worker_environment()
        self._n_chips = environment.n_live_at_start
        self._lead(environment.identity is None or environment.chip == environment.whole.live[0])

    @property
    def job(self) -> Job:
        """The job that trains.

        Raises:
            InputError: the training has not begun.
        """
        if self._job is None:
            raise InputError("strategy.job needs a training that has begun; call trainer.fit first")
        return self._job

    @property
    def is_global_zero(self) -> bool:
        """Whether this chip logs and saves."""
        return bool(self.global_rank == 0)

    def process_dataloader(self, dataloader: object) -> object:
        """Replace the training loader by one that hands out the samples of the job."""
        if not self.lightning_module.trainer.training:
            return dataloader
        _check_loader(dataloader)
        if self._loader is not None:
            raise InputError(
                "MeshmendStrategy needs one training DataLoader for the whole training, but got a "
                "second one; give it one data set, and no reload_dataloaders_every_n_epochs"
            )
        self._loader = _JobLoader(dataloader, self._n_chips, self._next_batch, self._steps_done)
        return self._loader

    def on_train_start(self) -> None:
        """Join the job; a chip that comes late takes over the state of the others."""
        trainer = self.lightning_module.trainer
        _check_trainer(trainer)
        (optimizer,) = self.optimizers
        optimizer.register_step_pre_hook(lambda *_: self._before_update(optimizer))
        optimizer.register_step_post_hook(lambda *_: self._after_update())
        progress = _LightningProgress(trainer)
        loader = self._loader
        assert loader is not None
        self._job = Job(
            self.lightning_module,
            optimizer,
            loader.dataset,
            batch=loader.batch,
            steps=_n_steps(trainer),
            seed=self._seed,
            collate=loader.collate,
            also=[*self._take_schedulers(), progress],
        )
        if trainer.global_step:
            self._job.begin_at(trainer.global_step)
        self._is_training, self._least_steps = True, trainer.fit_loop.min_steps
        trainer.callbacks.append(_AfterEpoch(self._agree_on_end))
        self._batches = iter(self._job)
        self._fetch()
        progress.begin()
        self._end_or_go_on()
        self._lead(self._job.is_leader)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **_: Any
    ) -> Any:
        """Do a step of the job; if the mesh changes, with the new share of samples again."""
        loss, step = closure(), self.job.step_number
        if self._wants_end():
            self.job.stop()
        while True:
            if loss is None:
                raise InputError(
                    "MeshmendStrategy needs a loss in each step, but training_step returned None"
                )
            if self.job.step(loss):
                break
            self._fetch()
            if self.job.step_number != step or not self._ahead:
                break  # another chip did the step, and this one has taken over its state
            loss = self._compute_again(optimizer, self._ahead.popleft())
        self._end_or_go_on()
        self._lead(self.job.is_leader)
        return loss

    def on_validation_end(self) -> None:
        """Agree with all chips whether a metric ends the training."""
        if self._is_training:
            self._agree_on_end()

    def on_train_end(self) -> None:
        """End the job with the step that Lightning did last, and wait for all chips."""
        self._is_training = False
        self.job.end_after(self.job.step_number)
        for _ in self._batches:
            raise AssertionError("a job that has ended handed out samples")
        self._lead(self.job.is_leader)

    def _wants_end(self) -> bool:
        """Whether the training is to end on this chip, and has done as many steps as it must."""
        trainer = self.lightning_module.trainer
        return bool(trainer.should_stop) and trainer.global_step >= (self._least_steps or 0)

    def _agree_on_end(self) -> None:
        """End the training on all chips if it is to end on one; all ask at the same places.

        Where some chips have no samples, because more have come than there were at first, none can
        be asked: what ends it there are metrics, which all know alike.
        """
        assert self._loader is not None
        if self.job.is_finished:  # whatever a hook has said since then
            self._end()
            return
        wants = self._wants_end()
        can_ask = self._loader.batch >= self.job.world_size
        if self.job.all_reduce(int(wants)) if can_ask else wants:
            self._end()

    def _end_or_go_on(self) -> None:
        """End the training if all chips know that the last step was the last; else let none end."""
        if self.job.is_finished:
            self._end()
        else:
            self._set_least_steps(self.job.step_number + 1)

    def _end(self) -> None:
        self._set_least_steps(self._least_steps)
        self.lightning_module.trainer.should_stop = True

    def _set_least_steps(self, least: int | None) -> None:
        self.lightning_module.trainer.fit_loop.epoch_loop.min_steps = least

    def _lead(self, is_leader: bool) -> None:
        """Make this process the one that logs and saves, or not."""
        self.global_rank = rank_zero_only.rank = 0 if is_leader else 1

    def _steps_done(self) -> int:
        return self.job.step_number

    def _next_batch(self) -> Any:
        """Return the next batch; None if the last step is done, which a hook may have denied."""
        if not self._ahead:
            self._fetch()
        if not self._ahead:
            self._end()
            return None
        return self._ahead.popleft()

    def _fetch(self) -> None:
        """Take the next samples of the job, if there are any."""
        for batch in self._batches:
            self._ahead.append(batch)
            return

    def _compute_again(self, optimizer: Any, batch: Any) -> Any:
        """Run forward and backward on another share of the step, as Lightning does."""
        module = self.lightning_module
        trainer = module.trainer
        loop = trainer.fit_loop.epoch_loop
        batch = self.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = self.batch_to_device(batch, dataloader_idx=0)
        output = self.training_step(
            *loop._build_kwargs(OrderedDict(), batch, loop.batch_idx).values()
        )
        loss = output["loss"] if isinstance(output, dict) else output
        optimizer.zero_grad()
        if loss is not None:
            self.backward(loss, optimizer)
        return loss

    def _before_update(self, optimizer: Any) -> None:
        """Clip the summed gradients, and call the hooks of this moment."""
        self.precision_plugin._after_closure(self.lightning_module, optimizer)

    def _take_schedulers(self) -> list[Any]:
        """Return the schedulers, which the job steps from now on: they are part of its state."""
        self._schedulers = [
            (config.scheduler, config.interval, config.frequency)
            for config in self.lr_scheduler_configs
        ]
        for config in self.lr_scheduler_configs:
            config.frequency = _NEVER
        return [scheduler for scheduler, _, _ in self._schedulers]

    def _after_update(self) -> None:
        """Step the schedulers that are due after this step."""
        assert self._loader is not None
        done = self.job.step_number + 1
        for scheduler, interval, frequency in self._schedulers:
            epochs, rest = divmod(done, len(self._loader))
            count = done if interval == "step" else 0 if rest else epochs
            if count and count % frequency == 0:
                scheduler.step()


def _n_steps(trainer: Any) -> int:
    """Return how many steps the limits of a trainer allow."""
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits.append(trainer.max_epochs * trainer.fit_loop.max_batches)
    return int(min(limits))


class _JobLoader:
    """The training loader of Lightning: an epoch of batches that the job hands out.

    `batch` counts the samples of a step over all chips. Batches cross the ends of epochs.
    """

    def __init__(
        self,
        loader: Any,
        n_chips: int,
        next_batch: Callable[[], Any],
        steps_done: Callable[[], int],
    ) -> None:
        self.dataset, self.collate = loader.dataset, loader.collate_fn
        self.batch: int = loader.batch_size * n_chips
        rounded = math.floor if loader.drop_last else math.ceil
        self._n_batches = max(1, int(rounded(len(loader.dataset) / self.batch)))
        self._next_batch, self._steps_done = next_batch, steps_done

    def __len__(self) -> int:
        return self._n_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left of the epoch."""
        for _ in range(self._n_batches - self._steps_done() % self._n_batches):
            batch = self._next_batch()
            if batch is None:
                return
            yield batch


class _AfterEpoch(Checkpoint):  # type: ignore[misc]  # untyped; those come after all others
    """Does something after an epoch and all that callbacks do then."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Do it."""
        self._run()


class _LightningProgress:
    """The states of Lightning's loops and callbacks, as part of a job's state.

    A chip that comes late takes them over before its own loops begin. Later the loops of all chips
    count for themselves.
    """

    is_compared: Final = False  # callbacks hold how long something took, and who saves

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._has_begun = False
        self._taken: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the loops and of the callbacks."""
        return {
            "fit_loop": self._trainer.fit_loop.state_dict(),
            "callbacks": _call_callbacks_state_dict(self._trainer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the states, unless the loops have begun."""
        if not self._has_begun:
            self._taken = state

    def begin(self) -> None:
        """Give the loops and callbacks the states that were taken over, before they begin."""
        self._has_begun = True
        if self._taken is None:
            return
        loop = self._trainer.fit_loop
        loop.load_state_dict(self._taken["fit_loop"])
        loop.reset()  # as if the trainer had resumed from a checkpoint
        _call_callbacks_load_state_dict(self._trainer, self._taken)
        self._taken = None


def _check_loader(loader: object) -> None:
    """Raise InputError unless the job can hand out the samples of a training loader."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise InputError(
            "MeshmendStrategy needs a training DataLoader of a data set with len() and [], but got "
            f"{type(getattr(loader, 'dataset', loader)).__name__}"
        )
    check_loader(loader)


def _check_trainer(trainer: Any) -> None:
    """Raise InputError for the first thing that the job cannot do."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise InputError(
            "MeshmendStrategy needs automatic optimization, but the module sets "
            "automatic_optimization to False; use meshmend.train.Job in a loop of your own"
        )
    if len(trainer.optimizers) != 1:
        raise InputError(
            f"MeshmendStrategy needs one optimizer, but the module has {len(trainer.optimizers)}; "
            "use meshmend.train.Job in a loop of your own"
        )
    for callback in trainer.callbacks:
        for kind, why in _REFUSED.items():
            if isinstance(callback, kind):
                name = type(callback).__name__
                raise InputError(f"MeshmendStrategy does not support {name}: {why}")
    if trainer.overfit_batches:
        raise InputError(
            "MeshmendStrategy does not support overfit_batches: give the DataLoader a data set of "
            "these samples"
        )
    if trainer.accumulate_grad_batches != 1:
        raise InputError(
            "MeshmendStrategy does not accumulate gradients: a step sums over all chips; set "
            "accumulate_grad_batches=1 and a larger batch_size"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise InputError("MeshmendStrategy does not support fp16: use precision='bf16-mixed'")
    if trainer.max_steps < 0 and (trainer.max_epochs is None or trainer.max_epochs < 0):
        raise InputError("MeshmendStrategy needs max_steps or max_epochs, but got neither")
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        raise InputError(
            "MeshmendStrategy does not support ReduceLROnPlateau: use a scheduler that depends on "
            "the step alone"
        )
