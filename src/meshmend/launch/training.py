"""A workload trained on a mesh through faults: what `meshmend train` does, apart from showing it.

Everything about a run is in its folder: `events.jsonl`, the ledgers, checkpoints, TensorBoard's
files, and at the end `report.html`.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from meshmend.errors import InputError
from meshmend.faults.fault import Fault
from meshmend.launch.elastic import run_elastic
from meshmend.launch.elastic_job import ElasticJob, Outcome
from meshmend.launch.one_thread import compute_in_one_thread
from meshmend.launch.run_log import run_log
from meshmend.membership.events import (
    EVENTS,
    RunEnded,
    RunStarted,
    SampleCounts,
    StateRestored,
    TimedEvent,
)
from meshmend.membership.timing import Timing
from meshmend.planning.settings import Settings
from meshmend.report.tensorboard import TensorBoardLog
from meshmend.report.training_page import training_page
from meshmend.report.training_run import TrainingRun, training_run
from meshmend.testbed.bed import Testbed
from meshmend.topology.text import mesh_words
from meshmend.train.checkpoint import Saving
from meshmend.train.gradients import Gradients
from meshmend.train.history_check import Audit
from meshmend.train.job import Job
from meshmend.train.ledger import audit
from meshmend.train.resume import resumable
from meshmend.workloads.registry import preload
from meshmend.workloads.workload import Workload

_log = logging.getLogger(__name__)

_EVENTS = "events.jsonl"
_ANSWER = "evaluation.json"


@dataclass(frozen=True)
class Training:
    """What to train, how long, on what, and what is to happen meanwhile."""

    workload: Workload
    settings: Settings
    run_dir: Path
    size: str = "tiny"
    steps: int = 100
    batch: int = 64
    rate: float | None = None  # of learning; else the workload's own
    seed: int = 0
    policy: str = "constant"
    faults: tuple[Fault, ...] = ()
    save_every: int = 0
    resume: Path | None = None
    for_s: float | None = None
    testbed_bytes_per_s: float | None = None
    checks: bool = False
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True)
class Trained:
    """How it went, as a value for scripts and as a run for reports."""

    answer: dict[str, Any]
    run: TrainingRun
    failure: str
    is_finished: bool = True


def train(training: Training, show: Callable[[TimedEvent], None]) -> Trained:
    """Train through all faults; every event is shown as it happens, and written down.

    Raises:
        InputError: the run's folder cannot be used, or what is to be resumed cannot be.
    """
    compute_in_one_thread()
    preload()
    model = training.workload.model()
    if training.resume is not None:
        _check_resume(training, training.resume, model)
    folder = training.run_dir
    try:
        (folder / "ledger").mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"a run needs a folder of its own, but {folder} cannot be made: {error.strerror}"
        ) from None
    with run_log(folder / _EVENTS, TensorBoardLog(folder / "tensorboard")) as log:

        def tell(event: TimedEvent) -> None:
            log.add(event)
            show(event)

        tell(TimedEvent(0.0, _beginning(training, model)))
        outcome = _run(training, model, tell)
        found = audit(folder / "ledger")
        ended = _ended(outcome, found, training_run(log.lines()), folder)
        tell(ended)
    run = training_run(log.lines())
    answer = EVENTS.encode(ended.event)
    del answer["event"]
    answer |= {"run_dir": str(folder), "report": _report(run, folder / "report.html")}
    failure = "" if outcome.is_finished else f"the job did not finish: {outcome.why}"
    why = failure or _why_untrusted(found, is_asked=training.checks)
    return Trained(answer, run, why, outcome.is_finished)


def _check_resume(training: Training, folder: Path, model: torch.nn.Module) -> None:
    """Refuse a checkpoint that the workers cannot go on from, before there are any."""
    fresh = {
        "model": model.state_dict(),
        "optimizer": training.workload.optimizer(model).state_dict(),
        "also": [],
        "progress": {"seed": training.seed, "n_samples": len(training.workload.dataset)},
    }

    def tell(path: Path, why: str) -> None:
        _log.warning("checkpoint %s is not used: %s", path, why)

    resumable(folder, fresh, steps=training.steps, on_damage=tell)


def _report(run: TrainingRun, path: Path) -> str | None:
    """Write the report and return where; None, and a line on the log, where it has no room."""
    try:
        path.write_text(training_page(run), encoding="utf-8")
    except OSError as error:
        path.unlink(missing_ok=True)
        _log.error("the report cannot be written to %s: %s", path, error.strerror)
        return None
    return str(path)


def _why_untrusted(found: Audit, *, is_asked: bool) -> str:
    """Return why a finished run cannot be trusted: it is wrong, or not checked as asked."""
    if found.is_wrong:
        samples = f"{found.lost} samples lost, {found.repeated} repeated"
        split = f"replicas differ after step {found.split[0]}" if found.split else ""
        wrong = [samples if found.lost or found.repeated else "", split, *found.faults[:1]]
        return f"the history of this run is wrong: {'; '.join(words for words in wrong if words)}"
    if is_asked and found.unchecked:
        return f"this run could not be checked: {found.unchecked[0]}"
    return ""


def _beginning(training: Training, model: torch.nn.Module) -> RunStarted:
    words = mesh_words(training.settings.mesh)
    return RunStarted(
        mesh=words["shape"],
        wrap=words["wrap"],
        fail=tuple(words["fail"]),
        steps=training.steps,
        batch=training.batch,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model=training.workload.name,
        size=training.size,
        rate=training.rate or "the model's own",
        seed=training.seed,
        policy=training.policy,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _run(training: Training, model: torch.nn.Module, tell: Callable[[TimedEvent], None]) -> Outcome:
    job = ElasticJob(
        settings=training.settings,
        body=lambda: _work(training, model),
        run_dir=training.run_dir,
        on_event=tell,
        faults=training.faults,
        timing=training.timing,
        sums=Gradients(model).sizes(),
        for_s=training.for_s,
        checks=training.checks,
    )
    if training.testbed_bytes_per_s is None:
        return run_elastic(job)
    whole = training.settings.mesh
    with Testbed.up(whole, link_bandwidth=training.testbed_bytes_per_s) as bed:
        return run_elastic(job.in_network(bed.enter, bed.address, bed.fail, bed.repair))


def _work(training: Training, model: torch.nn.Module) -> int:
    """Be one chip: a plain training loop over a job."""
    logging.getLogger("meshmend").setLevel(logging.ERROR)  # the events tell the rest
    workload = training.workload
    optimizer = workload.optimizer(model)
    saving = None
    if training.save_every:
        saving = Saving(training.run_dir / "checkpoints", training.save_every)
    job = Job(
        model,
        optimizer,
        workload.dataset,
        batch=training.batch,
        steps=training.steps,
        seed=training.seed,
        policy=training.policy,
        saving=saving,
        resume=training.resume,
    )
    if training.rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = training.rate
    for batch in job:
        loss = workload.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stubs
        job.step(loss)
    if job.is_leader:
        _write_answer(training.run_dir / _ANSWER, workload.evaluate(model))
    return 0


def _write_answer(path: Path, evaluation: Mapping[str, float]) -> None:
    """Write what the model reached, whole or not at all; a full disk is no reason to fail."""
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        draft.write_text(json.dumps(evaluation), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        _log.error("the evaluation cannot be written to %s: %s", path, error.strerror)


def _ended(outcome: Outcome, found: Audit, so_far: TrainingRun, folder: Path) -> TimedEvent:
    """Return the last event of a run: its figures, from its events and its ledgers."""
    chips = [
        count for at, count in enumerate(outcome.chips) if at == 0 or count != outcome.chips[at - 1]
    ]
    evaluation = folder / _ANSWER
    event = RunEnded(
        steps=so_far.n_done,
        first_loss=so_far.first_loss,
        final_loss=so_far.final_loss,
        replicas_equal=found.replicas_equal,
        samples=_sample_counts(found),
        chips=tuple(chips),
        faults=tuple(recovery.event() for recovery in outcome.recoveries),
        evaluation=json.loads(evaluation.read_text()) if evaluation.exists() else {},
        redone=found.redone,
        restores=tuple(StateRestored(each.step, each.lost) for each in found.restores),
        history_faults=found.faults,
        unchecked=found.unchecked,
    )
    return TimedEvent(so_far.duration_s, event)


def _sample_counts(found: Audit) -> SampleCounts:
    """Return the counts of samples; what a ledger that was cut lacks may be lost: not known."""
    if found.unchecked and not found.lost and not found.repeated:
        return SampleCounts(found.used)
    return SampleCounts(found.used, found.lost, found.repeated)


def new_run_dir(parent: Path) -> Path:
    """Return a folder for a new run that does not exist yet, named by the time."""
    name = time.strftime("train-%Y%m%d-%H%M%S")
    for attempt in range(1000):
        folder = parent / (name if attempt == 0 else f"{name}-{attempt}")
        if not folder.exists():
            return folder
    raise InputError(f"{parent} holds too many runs of this second; name one with --run-dir")
