"""One cell of the matrix of loops: a job of real processes, some of which are killed.

    python cell.py FOLDER '{"style": "SAM", "front": "group", "moment": "backward"}'

prints one JSON object: how the job ended, what each chip found after each of its steps, and what a
plain loop in one process, without meshmend, finds after each step.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

MESH: Final = "2x2"
SUM_S: Final = 0.001  # a chip that is killed in a sum has begun it so long ago


class Chip:
    """What happens on one chip: it notes its steps, dies when it should, waits at the gates."""

    def __init__(self, folder: Path, cell: dict[str, Any]) -> None:
        self._folder = folder
        self._name = os.environ["MESHMEND_CHIP"]
        self._moment_at = {at: moment for at, moment, chip in cell["kills"] if chip == self._name}
        self._gates, self._passes = cell["gates"], cell["passes"]
        self._step = 0  # steps done
        self._n_passes = 0  # forward passes of this step
        self._notes = (folder / f"notes-{self._name}-{os.getpid()}").open("w")

    def begin(self, step: int) -> None:
        self._step, self._n_passes = step, 0
        while step in self._gates and not self._are_all_called():
            time.sleep(0.002)

    def _are_all_called(self) -> bool:
        """Whether the coordinator wants all chips to train, or they do."""
        from meshmend.train.core.worker_environment import coordinator_client

        generation = coordinator_client().news.generation
        return generation is not None and len(generation.chips) == 4

    def reach(self, moment: str) -> None:
        """Die if this is the moment."""
        self._n_passes += moment == "forward"
        is_now = self._moment_at.get(self._step) == moment and self._n_passes == self._passes
        killed = self._folder / f"killed-{self._step}"
        if not is_now or killed.exists():
            return
        killed.touch()
        if moment == "sum":
            threading.Timer(SUM_S, self._die).start()
        else:
            self._die()

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def note(self, **found: Any) -> None:
        print(json.dumps(found), file=self._notes, flush=True)


def watched(parts: Any) -> dict[str, list[float]]:
    return {name: value.detach().double().flatten().tolist() for name, value in parts.watched()}


def hook(parts: Any, chip: Chip) -> None:
    """Let a chip die in the forward pass or the backward pass."""
    import torch

    def forward(*_: Any) -> None:
        chip.reach("forward")

    def backward(gradient: Any) -> Any:
        chip.reach("backward")
        return gradient

    disable: Any = torch.compiler.disable  # untyped; the compiler shall not look into the hook
    parts.model.register_forward_hook(disable(forward))
    next(parts.model.parameters()).register_hook(backward)


def die_in_sums(chip: Chip) -> None:
    """Let a chip die when a job waits for the sums of a step."""
    from meshmend.train.core.job_core import JobCore

    complete_step = JobCore.complete_step

    def complete(core: JobCore) -> bool:
        chip.reach("sum")
        return complete_step(core)

    JobCore.complete_step = complete  # type: ignore[method-assign,assignment]


def style_of(cell: dict[str, Any]) -> Any:
    from styles import STYLES

    return next(each for each in STYLES if each.name == cell["style"])


def job_loop(folder: Path, cell: dict[str, Any]) -> int:
    import torch

    from meshmend.train import Job
    from styles import BATCH, samples

    chip, style = Chip(folder, cell), style_of(cell)
    parts = style.make()
    hook(parts, chip)
    die_in_sums(chip)
    job = Job(
        parts.model,
        parts.optimizers if len(parts.optimizers) > 1 else parts.optimizer,
        torch.utils.data.TensorDataset(*samples()),
        batch=BATCH,
        steps=cell["steps"],
        also=parts.also,
        scaler=parts.scaler,
        bucket_bytes=64,
        **parts.job,
    )
    parts.net = torch.compile(parts.model, backend="aot_eager") if parts.compiled else parts.model
    done: list[tuple[int, float | None, int]] = []
    job.after_step(lambda job: done.append((job.step_number, job.loss, job.world_size)))
    for inputs, labels in job:
        parts.step = job.step_number
        chip.begin(job.step_number)
        style.job(job, parts, inputs, labels)
        for step, loss, n_chips in done:
            chip.note(step=step, loss=loss, n_chips=n_chips, rank=job.rank, state=watched(parts))
        done.clear()
    chip.note(final=True, rank=job.rank, state=watched(parts))
    return 0


def group_loop(folder: Path, cell: dict[str, Any]) -> int:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import meshmend.torch
    from meshmend.torch.group import MeshmendGroup

    chip, style = Chip(folder, cell), style_of(cell)
    allreduce = MeshmendGroup.allreduce

    def summing(*arguments: Any, **named: Any) -> Any:
        chip.reach("sum")
        return allreduce(*arguments, **named)

    MeshmendGroup.allreduce = summing  # type: ignore[method-assign]
    dist.init_process_group("meshmend")
    parts = style.make()
    hook(parts, chip)
    ddp = DistributedDataParallel(parts.model, **{"bucket_cap_mb": 1e-4, **parts.ddp})
    if parts.after_ddp is not None:
        parts.after_ddp(ddp)
    parts.net = torch.compile(ddp, backend="aot_eager") if parts.compiled else ddp

    def mean(loss: Any) -> Any:
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    parts.mean = mean
    scaler = [parts.scaler] if parts.scaler else []
    meshmend.torch.reconfigure(ddp, *parts.optimizers, *parts.also, *scaler)
    for step in meshmend.torch.steps(cell["steps"]):
        with meshmend.torch.retrying():
            parts.step = step
            chip.begin(step)
            rank, n_chips = dist.get_rank(), dist.get_world_size()
            inputs, labels = (part.chunk(n_chips)[rank] for part in batch(step))
            loss = style.plain(parts, inputs, labels).item()
            chip.note(step=step + 1, loss=loss, n_chips=n_chips, rank=rank, state=watched(parts))
        parts.after_block()
    chip.note(final=True, rank=dist.get_rank(), state=watched(parts))
    return 0


def hf_loop(folder: Path, cell: dict[str, Any]) -> int:
    import torch
    from torch.nn.functional import mse_loss
    from transformers import TrainerCallback, TrainingArguments

    from meshmend.train.hf import Trainer
    from styles import BATCH, samples

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # as `meshmend run` does for scripts with a trainer
    chip, style = Chip(folder, cell), style_of(cell)
    parts = style.make()
    hook(parts, chip)
    die_in_sums(chip)

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = parts.model

        def forward(self, inputs: Any, labels: Any) -> Any:
            return {"loss": mse_loss(self.net(inputs), labels)}

    class Notes(TrainerCallback):  # type: ignore[misc]  # untyped
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            chip.begin(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            job = trainer._job
            assert job is not None
            found = {"step": job.step_number, "loss": job.loss, "n_chips": job.world_size}
            chip.note(**found, rank=job.rank, state=watched(parts))

    rows = [{"inputs": one, "labels": other} for one, other in zip(*samples(), strict=True)]
    named = {"per_device_train_batch_size": BATCH // 4, "max_grad_norm": 0.0, **style.hf}
    schedulers = parts.also or [torch.optim.lr_scheduler.ConstantLR(parts.optimizer, 1.0)]
    trainer = Trainer(
        model=WithLoss(),
        args=TrainingArguments(
            output_dir=str(folder / "output"),
            max_steps=cell["steps"],
            seed=0,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **named,
        ),
        train_dataset=rows,
        eval_dataset=rows[:8],
        optimizers=(parts.optimizer, schedulers[0]),
        callbacks=[Notes()],
    )
    trainer.train()
    chip.note(final=True, rank=0, state=watched(parts))
    return 0


def prepared_jax() -> Any:
    """Return JAX, which keeps its programs on disk: chips and the plain loop share them.

    Not with other rows: a folder that a job has filled is taken for complete, so all chips of the
    next one would compile what is new in it.
    """
    import jax

    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # each program runs ten times
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_compilation_cache_dir", str(Path(sys.argv[1]) / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    return jax


def jax_loop(folder: Path, cell: dict[str, Any]) -> int:
    prepared_jax()
    from jax_styles import JAX_STYLES
    from meshmend.train import JaxJob
    from styles import BATCH, samples

    chip = Chip(folder, cell)
    style = next(each for each in JAX_STYLES if each.name == cell["style"])
    die_in_sums(chip)
    dataset = tuple(part.numpy() for part in samples())
    job = JaxJob(
        style.params(), style.optimizer(), style.losses, dataset, batch=BATCH, steps=cell["steps"]
    )
    for batch in job:
        chip.begin(job.step_number)
        chip.reach("forward")
        style.change(job.params, job.opt_state)
        counts = job.step(batch)
        style.change(job.params, job.opt_state)
        if counts:
            found = {"step": job.step_number, "loss": job.loss, "n_chips": job.world_size}
            chip.note(**found, rank=job.rank, state=jax_state(job.params))
    chip.note(final=True, rank=job.rank, state=jax_state(job.params))
    return 0


def jax_state(params: Any) -> dict[str, list[float]]:
    import jax
    import numpy as np

    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path): np.ravel(leaf).tolist() for path, leaf in leaves}


def batch(step: int) -> tuple[Any, Any]:
    """Return the samples of a step, as a `Job` orders them."""
    from meshmend.train.data.samples import Order
    from styles import BATCH, N_SAMPLES, samples

    indices = Order(N_SAMPLES, 0).samples(step * BATCH, (step + 1) * BATCH)
    inputs, labels = samples()
    return inputs[indices], labels[indices]


LOOPS: Final[dict[str, Callable[[Path, dict[str, Any]], int]]] = {
    "job": job_loop,
    "group": group_loop,
    "trainer": hf_loop,
    "jax": jax_loop,
}

Found = tuple[float, dict[str, list[float]]]


def jax_reference(cell: dict[str, Any]) -> list[Found]:
    """Return the loss and the state after each step of a plain loop in JAX."""
    prepared_jax()
    from jax_styles import JAX_STYLES, plain_run

    style = next(each for each in JAX_STYLES if each.name == cell["style"])
    batches = [tuple(part.numpy() for part in batch(step)) for step in range(cell["steps"])]
    return [(loss, jax_state(params)) for loss, params in plain_run(style, batches)]


def torch_reference(cell: dict[str, Any], n_chips: dict[int, int]) -> list[Found]:
    """Return the loss and the state after each step of a plain loop in PyTorch, and at its end."""
    style = style_of(cell)
    parts = style.make()
    parts.net = parts.model
    found = []
    for step in range(cell["steps"]):
        parts.step = step
        inputs, labels = batch(step)
        if style.by_share:
            n_shares = n_chips.get(step + 1, 4)
            loss = step_by_share(parts, inputs, labels, n_shares, is_mean=cell["front"] != "group")
        else:
            loss = style.plain(parts, inputs, labels).item()
        found.append((loss, watched(parts)))
        parts.after_block()
    return [*found, (0.0, watched(parts))]


def step_by_share(parts: Any, inputs: Any, labels: Any, n_shares: int, *, is_mean: bool) -> float:
    """Step on the mean gradient of equal shares.

    Running statistics become their mean over the shares, as in a `Job`, or those of the first
    share, as in a `DistributedDataParallel`.
    """
    import torch

    model, before = parts.model, [each.clone() for each in parts.model.buffers()]
    losses, after = [], []
    parts.optimizer.zero_grad()
    for some, answers in zip(inputs.chunk(n_shares), labels.chunk(n_shares), strict=True):
        for buffer, old in zip(model.buffers(), before, strict=True):
            buffer.copy_(old)
        loss = torch.nn.functional.mse_loss(model(some), answers)
        (loss / n_shares).backward()  # type: ignore[no-untyped-call]  # torch's stubs
        losses.append(loss.item())
        after.append([each.clone() for each in model.buffers()])
    for buffer, *values in zip(model.buffers(), *after, strict=True):
        is_number = buffer.is_floating_point()
        buffer.copy_(torch.stack(values).mean(0) if is_mean and is_number else values[0])
    parts.optimizer.step()
    return sum(losses) / n_shares


def main() -> None:
    from meshmend.config import JobConfig, LocalConfig, MeshConfig, RunConfig, Timing
    from meshmend.launch.elastic import run_elastic
    from meshmend.launch.job_processes import ElasticJob, JobProcesses
    from meshmend.train.data.audit import audit

    folder, cell = Path(sys.argv[1]), json.loads(sys.argv[2])
    # Plans are made by the workers: a process that plans ahead would cost more than the job.
    JobProcesses.plan_ahead = lambda *_: None  # type: ignore[method-assign]
    outcome = run_elastic(
        ElasticJob(
            JobConfig(
                mesh=MeshConfig(shape=MESH),
                job=RunConfig(run_dir=str(folder), check_every_step=True),
                timing=Timing(heartbeat_timeout_s=60.0, holder_timeout_s=5.0),
                local=LocalConfig(inject=tuple(cell["inject"])),
            ),
            body=lambda: LOOPS[cell["front"]](folder, cell),
            on_event=lambda _: None,
        )
    )
    notes = [
        {"chip": path.name.split("-")[1], **json.loads(line)}
        for path in sorted(folder.glob("notes-*"))
        for line in path.read_text().splitlines()
    ]
    expected: list[Found] = []
    if outcome.is_finished:
        n_chips = {each["step"]: each["n_chips"] for each in notes if "step" in each}
        is_jax = cell["front"] == "jax"
        expected = jax_reference(cell) if is_jax else torch_reference(cell, n_chips)
    result = {
        "finished": outcome.is_finished,
        "why": outcome.why,
        "chips": outcome.chips,
        "audit": asdict(audit(folder / "ledger")),
        "notes": notes,
        "expected": expected,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
