"""A workload trained on a mesh through faults: what `meshmend train` does, apart from showing it.

Everything about a run is in its folder: `events.jsonl`, the ledgers, checkpoints, TensorBoard's
files, and at the end `report.html`.
"""

import json
import logging
import os
import time
from collections.abc import Callable
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
from meshmend.membership.events import (
    EVENTS,
    RunEnded,
    RunStarted,
    SampleCounts,
    TimedEvent,
    event_line,
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
from meshmend.train.job import Job
from meshmend.train.ledger import Audit, audit
from meshmend.workloads.registry import preload
from meshmend.workloads.workload import Workload

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


def train(training: Training, show: Callable[[TimedEvent], None]) -> Trained:
    """Train through all faults; every event is shown as it happens, and written down.

    Raises:
        InputError: the run's folder cannot be used, or there is nothing to resume.
    """
    compute_in_one_thread()
    preload()
    model = training.workload.model()
    folder = training.run_dir
    try:
        (folder / "ledger").mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"a run needs a folder of its own, but {folder} cannot be made: {error.strerror}"
        ) from None
    with (
        (folder / _EVENTS).open("w", encoding="utf-8", buffering=1) as stream,
        TensorBoardLog(folder / "tensorboard") as board,
    ):

        def tell(event: TimedEvent) -> None:
            stream.write(event_line(event))
            board.add(event)
            show(event)

        tell(TimedEvent(0.0, _beginning(training, model)))
        outcome = _run(training, model, tell)
        found = audit(folder / "ledger")
        ended = _ended(outcome, found, folder)
        tell(ended)
    with (folder / _EVENTS).open(encoding="utf-8") as lines:
        run = training_run(lines)
    report = folder / "report.html"
    report.write_text(training_page(run), encoding="utf-8")
    answer = EVENTS.encode(ended.event)
    del answer["event"]
    answer |= {"run_dir": str(folder), "report": str(report)}
    return Trained(answer, run, "" if outcome.is_finished else outcome.why)


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
        path = training.run_dir / _ANSWER
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(workload.evaluate(model)), encoding="utf-8")
        draft.replace(path)
    return 0


def _ended(outcome: Outcome, found: Audit, folder: Path) -> TimedEvent:
    """Return the last event of a run: its figures, from its events and its ledgers."""
    with (folder / _EVENTS).open(encoding="utf-8") as lines:
        so_far = training_run(lines)
    chips = [
        count for at, count in enumerate(outcome.chips) if at == 0 or count != outcome.chips[at - 1]
    ]
    evaluation = folder / _ANSWER
    event = RunEnded(
        steps=so_far.n_done,
        first_loss=so_far.first_loss,
        final_loss=so_far.final_loss,
        replicas_equal=found.hashed > 0 and not found.split,
        samples=SampleCounts(found.used, found.lost, found.repeated),
        chips=tuple(chips),
        faults=tuple(recovery.event() for recovery in outcome.recoveries),
        evaluation=json.loads(evaluation.read_text()) if evaluation.exists() else {},
    )
    return TimedEvent(so_far.duration_s, event)


def new_run_dir(parent: Path) -> Path:
    """Return a folder for a new run that does not exist yet, named by the time."""
    name = time.strftime("train-%Y%m%d-%H%M%S")
    for attempt in range(1000):
        folder = parent / (name if attempt == 0 else f"{name}-{attempt}")
        if not folder.exists():
            return folder
    raise InputError(f"{parent} holds too many runs of this second; name one with --run-dir")
