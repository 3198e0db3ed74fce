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
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshmend.config import Timing
from meshmend.errors import InputError
from meshmend.files import why_unwritten, write_whole
from meshmend.lab.testbed.bed import Testbed
from meshmend.lab.workloads.trainable import Trainable, TrainingArguments
from meshmend.launch.elastic import ElasticJob, Outcome, run_elastic
from meshmend.launch.job_page import PageRequest
from meshmend.launch.run_log import run_log
from meshmend.launch.worker import compute_in_one_thread
from meshmend.locks import held_lock
from meshmend.membership.events import (
    Event,
    GenerationBegan,
    RunEnded,
    RunStarted,
    SampleCounts,
    StateRestored,
    StepFinished,
    TimedEvent,
)
from meshmend.membership.faults.fault import Fault
from meshmend.pages.report.tensorboard import TensorBoardLog
from meshmend.pages.report.training_page import training_page
from meshmend.pages.report.training_run import TrainingRun, training_run
from meshmend.planning.settings import Settings
from meshmend.topology.text import mesh_words
from meshmend.train.data.audit import Audit, audit
from meshmend.train.sharding.update_shares import DEFAULT_DOMAINS
from meshmend.train.state.checkpoint import Saving, newest_complete
from meshmend.train.state.resume import AUTO, Resume, folder_to_resume, resumable
from meshmend.transport.codec import plain

_log = logging.getLogger(__name__)

_EVENTS = "events.jsonl"
_EVALUATION = "evaluation.json"
_MASTER = "master"  # in the state of a parameter; a module that knows it would import torch


@dataclass(frozen=True)
class Training:
    """What to train, on which mesh, for how long, and the faults to inject."""

    workload: Trainable
    settings: Settings
    run_dir: Path
    size: str = "tiny"
    steps: int = 100
    batch: int = 64
    rate: float | None = None  # learning rate; None: the workload's own
    seed: int = 0
    policy: str = "constant"
    faults: tuple[Fault, ...] = ()
    save_every: int = 0
    resume: Resume = None
    for_s: float | None = None
    testbed_bytes_per_s: float | None = None
    checks: bool = False
    page: PageRequest | None = None
    shard_optimizer: bool = False
    mirror_domains: tuple[str, ...] = DEFAULT_DOMAINS
    master_weights: bool = False
    timing: Timing = field(default_factory=Timing)
    board: tuple[int, ...] = ()

    def arguments(self) -> TrainingArguments:
        """Return what the loop of a worker needs."""
        folder = self.run_dir / "checkpoints"
        return TrainingArguments(
            batch=self.batch,
            steps=self.steps,
            seed=self.seed,
            policy=self.policy,
            rate=self.rate,
            saving=Saving(folder, self.save_every) if self.save_every else None,
            resume=self.resume,
            shard_optimizer=self.shard_optimizer,
            mirror_domains=self.mirror_domains,
            master_weights=self.master_weights,
        )


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


def train(training: Training, show: Callable[[TimedEvent], None]) -> TrainingResult:
    """Train through all faults; write each event to the log and pass it to `show`.

    Raises:
        InputError: the run's folder cannot be made, or the checkpoint cannot be resumed.
    """
    compute_in_one_thread()
    training.workload.preload(training.arguments(), training.settings.mesh.n_live)
    resume = folder_to_resume(training.resume, training.arguments().saving)
    if resume is not None:
        _check_resume(training, resume)
    folder = training.run_dir
    with (
        _in_use(folder, is_new=training.resume != AUTO),
        run_log(folder / _EVENTS, TensorBoardLog(folder / "tensorboard")) as log,
    ):
        members: list[Event] = []  # of this run; an earlier one in this file has other ledgers

        def on_event(event: TimedEvent) -> None:
            log.add(event)
            show(event)
            if isinstance(event.event, GenerationBegan | StepFinished):
                members.append(event.event)

        on_event(TimedEvent(0.0, _start_event(training)))
        outcome = _run(training, on_event)
        so_far = training_run(log.lines())
        found = audit(folder / "ledger", members)
        ended = _end_event(outcome, found, so_far, folder)
        on_event(ended)
    run = training_run(log.lines())
    summary = plain(ended.event)
    del summary["event"]
    summary |= {"run_dir": str(folder), "report": _report(run, folder / "report.html")}
    failure = "" if outcome.is_finished else f"the job did not finish: {outcome.why}"
    why = failure or _why_untrusted(found, is_asked=training.checks) or outcome.fewer_chips
    return TrainingResult(summary, run, why, outcome.is_finished, outcome.is_refused)


def finished_step(training: Training) -> int | None:
    """Return the last step if the checkpoint to resume from is that of it, else None.

    Raises:
        InputError: the checkpoint cannot be resumed.
    """
    resume = folder_to_resume(training.resume, training.arguments().saving)
    if resume is None or newest_complete(resume) != training.steps:
        return None
    step = _check_resume(training, resume)
    return step if step == training.steps else None


@contextmanager
def _in_use(folder: Path, *, is_new: bool) -> Iterator[None]:
    """Make the folder of a run, or take it up again if it need not be new, while no other does.

    The ledgers of an earlier run in it are kept beside those of this one.

    Raises:
        InputError: it cannot be made, or another run uses it.
    """
    ledger = folder / "ledger"
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


def _check_resume(training: Training, folder: Path) -> int:
    """Refuse a checkpoint that the workers could not resume, before they start; return its step."""
    workload = training.workload
    progress = {"seed": training.seed, "n_samples": workload.n_samples}
    fresh = {**workload.fresh_state(), "progress": progress}

    def warn(path: Path, why: str) -> None:
        _log.warning("checkpoint %s is not used: %s", path, why)

    found = resumable(folder, fresh, workload.framework, steps=training.steps, on_damage=warn)
    states = found.state["optimizer"].get("state", {}).values()  # by parameter, in PyTorch
    has_masters = any(_MASTER in each for each in states)
    if has_masters != training.master_weights:
        has, do = ("has", "add") if has_masters else ("has no", "leave out")
        raise InputError(f"the checkpoint {has} master weights; {do} --master-weights")
    return found.step


def _report(run: TrainingRun, path: Path) -> str | None:
    """Write the report and return its path; if it cannot be written, log why and return None."""
    try:
        write_whole(path, training_page(run), is_durable=False)
    except OSError as error:
        _log.error("the report cannot be written to %s: %s", path, error.strerror)
        return None
    return str(path)


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


def _start_event(training: Training) -> RunStarted:
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
        parameters=training.workload.n_parameters,
    )


def _run(training: Training, on_event: Callable[[TimedEvent], None]) -> Outcome:
    job = ElasticJob(
        settings=training.settings,
        body=lambda: _work(training),
        run_dir=training.run_dir,
        on_event=on_event,
        faults=training.faults,
        timing=training.timing,
        board=training.board,
        sums=training.workload.sum_sizes(training.arguments(), training.settings.mesh.n_live),
        for_s=training.for_s,
        checks=training.checks,
        page=training.page,
    )
    if training.testbed_bytes_per_s is None:
        return run_elastic(job)
    whole = training.settings.mesh
    with Testbed.up(whole, link_bandwidth=training.testbed_bytes_per_s) as bed:
        return run_elastic(job.in_network(bed.enter, bed.address, bed.fail, bed.repair))


def _work(training: Training) -> int:
    """Run the training loop of one worker, and return its exit code."""
    logging.getLogger("meshmend").setLevel(logging.ERROR)  # events report the rest
    if evaluation := training.workload.train(training.arguments()):
        _write_evaluation(training.run_dir / _EVALUATION, evaluation)
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


def _end_event(outcome: Outcome, found: Audit, so_far: TrainingRun, folder: Path) -> TimedEvent:
    """Return the last event of a run, with its figures from its events and its ledgers."""
    chips = [
        count for at, count in enumerate(outcome.chips) if at == 0 or count != outcome.chips[at - 1]
    ]
    event = RunEnded(
        steps=so_far.n_done,
        first_loss=so_far.first_loss,
        final_loss=so_far.final_loss,
        replicas_equal=found.replicas_equal,
        samples=_sample_counts(found),
        chips=tuple(chips),
        faults=tuple(recovery.event() for recovery in outcome.recoveries),
        evaluation=_read_evaluation(folder / _EVALUATION),
        redone=found.redone,
        restores=tuple(StateRestored(each.step, each.lost) for each in found.restores),
        history_faults=found.faults,
        unchecked=found.unchecked,
        missing_checkpoints=so_far.missing_checkpoints,
    )
    return TimedEvent(so_far.duration_s, event)


def _sample_counts(found: Audit) -> SampleCounts:
    """Return the counts of samples.

    If a ledger is incomplete and nothing else is wrong, only the used samples are known: the result
    has no counts of lost and repeated samples.
    """
    if found.unchecked and not found.lost and not found.repeated:
        return SampleCounts(found.used)
    return SampleCounts(found.used, found.lost, found.repeated)


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
