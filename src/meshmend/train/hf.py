"""The Trainer of Hugging Face transformers, made to survive: change one import.

    from meshmend.train.hf import Trainer  # instead of: from transformers import Trainer

Everything but the training loop is that of `transformers.Trainer`. The loop runs over a `Job`: the
job hands out the samples, sums the gradients over all chips, and does a step again if the mesh
changed meanwhile. Evaluation runs on every chip, over the whole evaluation set, so all of them
know the same metrics. The chip that leads writes checkpoints and prints logs.

Alone, without `meshmend run --elastic`, it trains on one chip.
"""

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from meshmend.errors import InputError
from meshmend.packages import need

need("meshmend.train.hf", "transformers", "accelerate", "torch", extra="hf")

import torch
import transformers
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from meshmend.train.core.worker_environment import worker_environment
from meshmend.train.torch.job import Job

_STATE_FILE: Final = "trainer_state.json"  # the last file of a checkpoint that the trainer writes
_OF_THIS_CHIP: Final = ("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search")

MicroBatches = list[tuple[int, Any]]  # the number of samples, and the samples after the collator


class Trainer(transformers.Trainer):  # type: ignore[misc]  # untyped
    """`transformers.Trainer` on all chips of a job.

    A step uses `per_device_train_batch_size * gradient_accumulation_steps` samples for each chip
    that the job begins with, and as many when chips are missing.
    """

    control: Any  # what callbacks want: the handler returns it changed

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._job: Job | None = None
        self._grad_norm: Any = None
        self._learning_rate: float | None = None
        self._begun_save: int | None = None  # the last step of which a checkpoint was asked for
        if worker_environment().identity is not None and not self.args.disable_tqdm:
            # A bar belongs to the chip that began to draw it, and the chip that leads may change.
            self.remove_callback(ProgressCallback)
            self.add_callback(PrinterCallback)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **named: Any
    ) -> Any:
        """Train to the end of the job; see `transformers.Trainer.train`.

        Raises:
            InputError: an argument cannot be honoured, or there is no whole checkpoint to resume.
        """
        refuse_unsupported(self.args, self.train_dataset, named.get("trial"))
        _refuse_own_samples(type(self))
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_checkpoint(Path(self.args.output_dir)))
        return super().train(resume_from_checkpoint, *arguments, **named)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler of the optimizer that the job steps, not of its wrapper."""
        return super().create_scheduler(num_training_steps, optimizer or _unwrapped(self.optimizer))

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        per_chip = args.per_device_train_batch_size * args.gradient_accumulation_steps
        batch = per_chip * worker_environment().n_live_at_start
        self._batch, self._epoch_steps = batch, len(self.train_dataset) / batch
        max_steps = self._n_steps()
        self._init_training_state(
            max_steps,
            max(1, math.ceil(self._epoch_steps)),
            math.ceil(max_steps / self._epoch_steps),
            resume_from_checkpoint,
            trial,
        )
        model, _ = self._prepare_for_training(max_steps, None, resume_from_checkpoint)
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self._tr_loss = torch.tensor(0.0, device=args.device)
        self._total_loss_scalar = 0.0
        self._job = job = self._make_job(model, batch, max_steps)
        if self.state.global_step:
            job.begin_at(self.state.global_step)
        start_time = time.time()
        self._run(job, model, start_time, ignore_keys_for_eval)
        self._follow_leader(job)
        self._save_again(model)
        return self._finalize_training(trial, max_steps * batch, start_time)

    def _n_steps(self) -> int:
        """Return how many steps there are: batches cross the ends of epochs."""
        if self.args.max_steps > 0:
            return int(self.args.max_steps)
        rounded = math.floor if self.args.dataloader_drop_last else math.ceil
        return max(1, int(rounded(self.args.num_train_epochs * self._epoch_steps)))

    def _make_job(self, model: torch.nn.Module, batch: int, max_steps: int) -> Job:
        optimizer = _unwrapped(self.optimizer)
        optimizer.register_step_pre_hook(lambda *_: self._before_update(model))
        optimizer.register_step_post_hook(lambda *_: self._after_update())
        dataset, collate = self._samples()
        size = self.args.per_device_train_batch_size
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed

        def micro_batches(samples: list[Any]) -> MicroBatches:
            parts = [samples[at : at + size] for at in range(0, len(samples), size)]
            return [(len(part), collate(part)) for part in parts]

        return Job(
            self.model,
            optimizer,
            dataset,
            batch=batch,
            steps=max_steps,
            seed=seed,
            collate=micro_batches,
            also=[self.lr_scheduler, _TrainerProgress(self, self._stop_after)],
        )

    def _samples(self) -> tuple[Any, Callable[[list[Any]], Any]]:
        """Return the data set and the collator, without columns that the model does not take."""
        if hasattr(self.train_dataset, "remove_columns"):  # of the library datasets
            return self._remove_unused_columns(self.train_dataset, "training"), self.data_collator
        collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        return self.train_dataset, collate

    def _run(
        self, job: Job, model: torch.nn.Module, start_time: float, ignored: list[str] | None
    ) -> None:
        """Do all steps, with the callbacks of each."""
        has_begun = False
        for micro_batches in job:
            self._follow_leader(job)
            self._save_again(model)
            if not has_begun:
                has_begun = True
                self._begin(ignored)
            epoch = int(job.step_number // self._epoch_steps)
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            model.zero_grad()
            loss = self._compute_gradients(job, model, micro_batches)
            if not job.step(loss):
                continue
            self._follow_leader(job)
            self._add_loss(job.loss)
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._log_save_evaluate(model, epoch, ignored, start_time)
            if int(job.step_number // self._epoch_steps) > epoch or job.step_number >= job.steps:
                self._end_epoch(model, epoch, ignored, start_time)
            if self.control.should_epoch_stop:
                raise InputError(
                    "meshmend.train.hf.Trainer cannot end an epoch early; end the training with "
                    "should_training_stop"
                )
            if self._is_stopping(job):
                self.control.should_training_stop = True
                self._stop_after(job.step_number)

    def _is_stopping(self, job: Job) -> bool:
        """Whether a callback ends the training on any chip: one of a script may look at a clock.

        Those of transformers look at what all chips know alike, so they need not be asked. Where
        chips have no samples, because more have come than there were at first, none can be asked.
        """
        callbacks = self.callback_handler.callbacks
        is_alike = all(type(each).__module__.startswith("transformers.") for each in callbacks)
        if is_alike or self._batch < job.world_size:
            return bool(self.control.should_training_stop)
        return bool(job.all_reduce(int(self.control.should_training_stop)))

    def _begin(self, ignored: list[str] | None) -> None:
        handler = self.callback_handler
        self.control = handler.on_train_begin(self.args, self.state, self.control)
        if self.args.eval_on_start and self.state.global_step == 0:
            self._evaluate(None, ignored, skip_scheduler=True)
        self.control = handler.on_epoch_begin(self.args, self.state, self.control)

    def _end_epoch(
        self, model: torch.nn.Module, epoch: int, ignored: list[str] | None, start_time: float
    ) -> None:
        handler = self.callback_handler
        self.control = handler.on_epoch_end(self.args, self.state, self.control)
        self._log_save_evaluate(model, epoch, ignored, start_time)
        if not self.control.should_training_stop and self.state.global_step < self.state.max_steps:
            self.control = handler.on_epoch_begin(self.args, self.state, self.control)

    def _compute_gradients(
        self, job: Job, model: torch.nn.Module, micro_batches: MicroBatches
    ) -> torch.Tensor:
        """Run forward and backward over this chip's samples; return their loss.

        If the loss is a mean over labels, their number is its weight. Sums over the chips begin
        during the last backward pass.
        """
        n_samples = sum(size for size, _ in micro_batches)
        n_items = self._get_num_items_in_batch(
            [inputs for _, inputs in micro_batches], self.args.device
        )
        divisor = None if n_items is None else max(n_items, torch.ones_like(n_items))
        if n_items is not None and self.args.average_tokens_across_devices:
            job.weigh(float(n_items))
        loss = torch.zeros((), device=self.args.device)
        for number, (size, inputs) in enumerate(micro_batches, 1):
            # `training_step` divides by this a loss that is a mean over the samples.
            self.current_gradient_accumulation_steps = n_samples / size
            is_last = number == len(micro_batches)
            with nullcontext() if is_last else job.accumulate():
                loss = loss + self.training_step(model, inputs, divisor)
            if not is_last:
                self.control = self.callback_handler.on_substep_end(
                    self.args, self.state, self.control
                )
        return loss

    def _before_update(self, model: torch.nn.Module) -> None:
        """Clip the summed gradients; the job's optimizer calls this before it steps."""
        norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        self._grad_norm = self._get_grad_norm(model, grad_norm=norm)
        handler = self.callback_handler
        self.control = handler.on_pre_optimizer_step(self.args, self.state, self.control)

    def _after_update(self) -> None:
        """Step the scheduler and count the step, before the job writes its state anywhere."""
        handler = self.callback_handler
        self.control = handler.on_optimizer_step(self.args, self.state, self.control)
        self._learning_rate = self._get_learning_rate()
        self.lr_scheduler.step()
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self._epoch_steps

    def _add_loss(self, loss: float | None) -> None:
        if loss is None or (self.args.logging_nan_inf_filter and not math.isfinite(loss)):
            n_steps = 1 + self.state.global_step - self._globalstep_last_logged
            loss = float(self._tr_loss) / n_steps
        self._tr_loss += loss

    def _log_save_evaluate(
        self, model: torch.nn.Module, epoch: int, ignored: list[str] | None, start_time: float
    ) -> None:
        self._maybe_log_save_evaluate(
            self._tr_loss,
            self._grad_norm,
            model,
            None,
            epoch,
            ignored,
            start_time,
            learning_rate=self._learning_rate,
        )

    def _stop_after(self, step: int) -> None:
        """Make a step the last one; all chips do so, because all know the same metrics."""
        if self._job is not None:
            self._job.end_after(step)

    def _follow_leader(self, job: Job) -> None:
        """Make this process the one that saves and prints if its chip leads, and else not."""
        process = self.args.distributed_state
        process.process_index = process.local_process_index = 0 if job.is_leader else 1
        self.state.is_world_process_zero = self.state.is_local_process_zero = job.is_leader

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save a checkpoint in the folder of the run, if this chip leads."""
        self._begun_save = self.state.global_step
        if self.is_world_process_zero():
            super()._save_checkpoint(model, trial)
        elif best := self.state.best_global_step:
            folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{best}"
            self.state.best_model_checkpoint = str(folder)

    def _save_again(self, model: torch.nn.Module) -> None:
        """Save the checkpoint of the last step if this chip leads now, and its writer has died."""
        if self._begun_save == self.state.global_step and self.is_world_process_zero():
            folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self._begun_save}"
            if not (folder / _STATE_FILE).exists():
                super()._save_checkpoint(model, None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, if this chip leads."""
        if self.is_world_process_zero():
            super().save_model(output_dir, _internal_call)


class _TrainerProgress:
    """The state of a trainer as part of a job's state: step, logs, best metric, callbacks.

    `stop_after(step)` is called if the state of another chip says that this step is the last.
    """

    is_compared: Final = False  # logs hold how long something took, and who leads differs

    def __init__(self, trainer: Any, stop_after: Callable[[int], None]) -> None:
        self._trainer = trainer
        self._stop_after = stop_after

    def state_dict(self) -> dict[str, Any]:
        """Return the state as one text."""
        trainer = self._trainer
        state = {
            "state": asdict(trainer.state),
            "control": asdict(trainer.control),
            "callbacks": [callback.state() for callback in self._stateful()],
            "loss": float(trainer._tr_loss),
            "total_loss": trainer._total_loss_scalar,
            "logged": trainer._globalstep_last_logged,
            "begun_save": trainer._begun_save,
        }
        # A script may log numbers of NumPy, and tensors.
        return {"text": json.dumps(state, default=lambda value: value.tolist())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state; who leads is left as it is."""
        trainer, saved = self._trainer, json.loads(state["text"])
        for each in fields(trainer.state):
            if each.name not in _OF_THIS_CHIP:
                setattr(trainer.state, each.name, saved["state"][each.name])
        for name, value in saved["control"].items():
            setattr(trainer.control, name, value)
        for callback, its_state in zip(self._stateful(), saved["callbacks"], strict=True):
            for name, value in its_state["attributes"].items():
                setattr(callback, name, value)
        trainer._tr_loss.fill_(saved["loss"])
        trainer._total_loss_scalar = saved["total_loss"]
        trainer._globalstep_last_logged = saved["logged"]
        trainer._begun_save = saved["begun_save"]
        if trainer.control.should_training_stop:
            self._stop_after(trainer.state.global_step)

    def _stateful(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [callback for callback in callbacks if isinstance(callback, ExportableState)]


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint of a folder that was written to its end.

    Raises:
        InputError: there is none.
    """
    whole = [path.parent for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{_STATE_FILE}")]
    numbered = {int(path.name.rpartition("-")[2]): path for path in whole}
    if not numbered:
        raise InputError(
            f"resume_from_checkpoint needs a whole checkpoint in {folder}, but there is none"
        )
    return numbered[max(numbered)]


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside the wrapper of accelerate, or itself if there is no wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


# A name, whether the arguments ask for it, and what to do instead.
_REFUSED: Final[tuple[tuple[str, Callable[[Any], Any], str], ...]] = (
    ("fsdp", lambda args: args.fsdp, "each chip holds the whole model"),
    ("deepspeed", lambda args: args.deepspeed, "each chip holds the whole model"),
    ("parallelism_config", lambda args: args.parallelism_config, "each chip holds the whole model"),
    ("fp16", lambda args: args.fp16, "use bf16=True, which needs no loss scale"),
    (
        "auto_find_batch_size",
        lambda args: args.auto_find_batch_size,
        "set per_device_train_batch_size",
    ),
    (
        "lr_scheduler_type",
        lambda args: (
            str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
            in ("reduce_lr_on_plateau", "greedy")
        ),
        "use one that depends on the step alone, such as linear or cosine",
    ),
    (
        "train_sampling_strategy",
        lambda args: args.train_sampling_strategy != "random",
        "the job shuffles each epoch by data_seed, or by seed",
    ),
    ("push_to_hub", lambda args: args.push_to_hub, "push the saved folder after the training"),
    (
        "include_num_input_tokens_seen",
        lambda args: args.include_num_input_tokens_seen not in ("no", False),
        "tokens are counted on each chip, and not summed",
    ),
    ("save_on_each_node", lambda args: args.save_on_each_node, "one chip saves, for all"),
    (
        "several GPUs in a process",
        lambda args: args.n_gpu > 1,
        "give each worker one of them with CUDA_VISIBLE_DEVICES",
    ),
)


def _refuse_own_samples(kind: type) -> None:
    """Raise InputError if a trainer chooses samples by a method that the job does not call."""
    for name in ("get_train_dataloader", "_get_train_sampler", "get_batch_samples"):
        if getattr(kind, name) is not getattr(transformers.Trainer, name):
            raise InputError(
                f"meshmend.train.hf.Trainer hands out the samples of train_dataset, but "
                f"{kind.__name__} has {name} of its own; put what that does into train_dataset or "
                "data_collator"
            )


def refuse_unsupported(args: Any, dataset: Any, trial: Any) -> None:
    """Raise InputError for the first argument of a trainer that the job cannot honour."""
    for name, is_asked_for, advice in _REFUSED:
        if is_asked_for(args):
            raise InputError(f"meshmend.train.hf.Trainer does not support {name}: {advice}")
    if trial is not None:
        raise InputError(
            "meshmend.train.hf.Trainer does not support a search of hyperparameters: run one job "
            "for each trial"
        )
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InputError(
            "meshmend.train.hf.Trainer needs a train_dataset with len() and [], but got "
            f"{type(dataset).__name__}; exactly-once needs to know which samples there are"
        )
