"""Trains a workload on a mesh through faults: `meshmend train` without its display.

The run's folder holds all its files: `events.jsonl`, the ledgers, checkpoints, TensorBoard's files,
and at the end `report.html`.
"""

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from meshmend.config import JobConfig
from meshmend.errors import InputError
from meshmend.files import why_unwritten, write_whole
from meshmend.lab.workloads.trainable import Trainable, resume_of, saving_of
from meshmend.launch.elastic import run_recorded
from meshmend.launch.hosts import board_from
from meshmend.launch.job_page import PageRequest
from meshmend.launch.job_processes import ElasticJob, MoreFaults
from meshmend.launch.journal import start_event, write_report
from meshmend.launch.worker import compute_in_one_thread
from meshmend.locks import held_lock
from meshmend.membership.events import RunStarted, TimedEvent
from meshmend.pages.report.tensorboard import TensorBoardLog
from meshmend.pages.report.training_run import TrainingRun
from meshmend.planning.plan_cache import board_losses
from meshmend.topology.text import configured_mesh
from meshmend.train.data.audit import Audit
from meshmend.train.state.checkpoint import newest_complete
from meshmend.train.state.resume import (
    AUTO,
    folder_to_resume,
    resumable,
    tell_of_new_beginning,
)
from meshmend.transport.codec import plain

_log = logging.getLogger(__name__)

_EVALUATION = "evaluation.json"
_MASTER = "master"  # in the state of a parameter; a module that knows it would import torch


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training run.

    `summary` is the JSON value that `--json` prints, `run` the value that reports are made from.
    `failure` says why the run did not finish or cannot be trusted; it is empty if all is right.
    """

    summary: dict[str, Any]
    run: TrainingRun
    failure: str
    is_finished: bool = True
    is_refused: bool = False  # no step was done, because of bad input


def train(
    workload: Trainable,
    config: JobConfig,
    show: Callable[[TimedEvent], None],
    *,
    for_s: float | None = None,
    more_faults: MoreFaults | None = None,
    page: PageRequest | None = None,
) -> TrainingResult:
    """Train through all faults; write each event to the log and pass it to `show`.

    After `for_s` seconds the job is ended, whatever step it is at. `more_faults` is asked for
    faults that depend on what the job does. `page` asks for a live page.

    Raises:
        InputError: the run's folder cannot be made, or the checkpoint cannot be resumed.
    """
    compute_in_one_thread()
    mesh = configured_mesh(config.mesh)
    losses = board_losses(mesh, board_from(config.mesh.board, mesh))
    workload.preload(config, (mesh.n_live, *{left.n_live for left in losses}))
    resume = folder_to_resume(resume_of(config), saving_of(config))
    if resume is not None:
        _check_resume(workload, config, resume)
    else:
        tell_of_new_beginning(resume_of(config), saving_of(config))
    folder = Path(config.job.run_dir)
    job = ElasticJob(
        config,
        body=lambda: _work(workload, config),
        on_event=show,
        sums=workload.sum_sizes(config, mesh.n_live),
        for_s=for_s,
        more_faults=more_faults,
        page=page,
    )
    with _in_use(folder, is_new=config.saving.resume != AUTO):
        done = run_recorded(
            job,
            _start_event(workload, config),
            sink=TensorBoardLog(folder / "tensorboard"),
            evaluation=lambda: _read_evaluation(folder / _EVALUATION),
        )
    summary = plain(done.end)
    del summary["event"]
    summary |= {"run_dir": str(folder), "report": write_report(done.run, folder)}
    outcome = done.outcome
    failure = "" if outcome.is_finished else f"the job did not finish: {outcome.why}"
    why = (
        failure
        or _why_untrusted(done.audit, is_asked=config.job.check_every_step)
        or outcome.fewer_chips
    )
    return TrainingResult(summary, done.run, why, outcome.is_finished, outcome.is_refused)


def finished_step(workload: Trainable, config: JobConfig) -> int | None:
    """Return the last step if the checkpoint to resume from is that of it, else None.

    Raises:
        InputError: the checkpoint cannot be resumed.
    """
    resume = folder_to_resume(resume_of(config), saving_of(config))
    if resume is None or newest_complete(resume) != config.training.steps:
        return None
    step = _check_resume(workload, config, resume)
    return step if step == config.training.steps else None


@contextmanager
def _in_use(folder: Path, *, is_new: bool) -> Iterator[None]:
    """Make the folder of a run, or take it up again if it need not be new, while no other does.

    The ledgers of an earlier run in it are kept beside those of this one.

    Raises:
        InputError: it cannot be made, or another run uses it.
    """
    ledger = folder / "ledger"
    if is_new and ledger.exists():
        raise InputError(
            f"a run needs a new folder, but {folder} has an earlier run; go on with it by --resume "
            "auto, or name another with --run-dir"
        )
    with ExitStack() as stack:
        try:
            if is_new:
                ledger.mkdir(parents=True)
            folder.mkdir(parents=True, exist_ok=True)
            lock = held_lock(folder / ".lock")
            if lock is None:
                raise InputError(
                    f"a run needs a folder of its own, but another run uses {folder} now; wait for "
                    "its end, or name another with --run-dir"
                )
            stack.enter_context(lock)
            if not is_new and ledger.exists():
                earlier = (folder / f"ledger-{number}" for number in itertools.count(1))
                ledger.rename(next(each for each in earlier if not each.exists()))
            ledger.mkdir(exist_ok=is_new)
        except OSError as error:
            raise InputError(
                f"a run needs a new folder, but {folder} cannot be made: {error.strerror}; name "
                "another with --run-dir"
            ) from None
        yield


def _check_resume(workload: Trainable, config: JobConfig, folder: Path) -> int:
    """Refuse a checkpoint that the workers could not resume, before they start; return its step."""
    what = config.training
    progress = {"seed": what.seed, "n_samples": workload.n_samples}
    fresh = {**workload.fresh_state(), "progress": progress}
    found = resumable(folder, fresh, workload.framework, steps=what.steps)
    states = found.state["optimizer"].get("state", {}).values()  # by parameter, in PyTorch
    has_masters = any(_MASTER in each for each in states)
    if has_masters != what.master_weights:
        has, do = ("has", "add") if has_masters else ("has no", "leave out")
        raise InputError(f"the checkpoint {has} master weights; {do} --master-weights")
    return found.step


def _why_untrusted(found: Audit, *, is_asked: bool) -> str:
    """Return why a finished run cannot be trusted, or an empty text.

    Its history is wrong, a member left no ledger, or the user asked for checks that were not
    possible.
    """
    if found.is_wrong:
        samples = f"{found.lost} samples lost, {found.repeated} repeated"
        split = f"replicas differ after step {found.split[0]}" if found.split else ""
        wrong = [samples if found.lost or found.repeated else "", split, *found.faults[:1]]
        return f"the history of this run is wrong: {'; '.join(words for words in wrong if words)}"
    if found.unchecked and (is_asked or found.without_ledger):
        return f"this run could not be checked: {found.unchecked[0]}"
    return ""


def _start_event(workload: Trainable, config: JobConfig) -> RunStarted:
    what = config.training
    return structs.replace(
        start_event(configured_mesh(config.mesh), workload.name),
        steps=what.steps,
        batch=what.batch,
        size=what.size,
        rate=what.lr or "the model's own",
        seed=what.seed,
        policy=what.batch_policy,
        parameters=workload.n_parameters,
        tile=what.tile or "",
    )


def _work(workload: Trainable, config: JobConfig) -> int:
    """Run the training loop of one worker, and return its exit code."""
    logging.getLogger("meshmend").setLevel(logging.ERROR)  # events report the rest
    if evaluation := workload.train(config):
        _write_evaluation(Path(config.job.run_dir) / _EVALUATION, evaluation)
    return 0


def _write_evaluation(path: Path, evaluation: Mapping[str, float]) -> None:
    """Write the evaluation of the model in one piece; if the disk is full, log that and go on."""
    try:
        write_whole(path, json.dumps(evaluation), is_durable=False)
    except OSError as error:
        _log.error("the evaluation cannot be written to %s: %s", path, why_unwritten(error))


def _read_evaluation(path: Path) -> dict[str, float]:
    """Return the evaluation of the model; nothing if it could not be written or read."""
    try:
        found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def new_run_dir(parent: Path) -> Path:
    """Return the path of a folder that does not exist yet, named by the time."""
    name = time.strftime("train-%Y%m%d-%H%M%S")
    for attempt in range(1000):
        folder = parent / (name if attempt == 0 else f"{name}-{attempt}")
        if not folder.exists():
            return folder
    raise InputError(
        f"a run needs a new folder, but {parent} has 1000 of this second; name one with --run-dir"
    )
