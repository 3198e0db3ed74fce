"""Runs a user's script on every live chip and survives lost chips: `meshmend run --elastic`.

The script builds a `meshmend.train.Job` or `JaxJob` and loops over it, or loops over
`meshmend.torch.steps`. The run's folder holds its ledgers and events; without `run_dir` it is a
temporary folder, which is removed at the end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshmend.config import Timing
from meshmend.errors import InputError
from meshmend.lab.testbed.bed import Testbed
from meshmend.launch.elastic import run_elastic
from meshmend.launch.elastic_job import ElasticJob, Outcome
from meshmend.launch.forked_worker import Script, script_body
from meshmend.launch.job_page import PageRequest
from meshmend.launch.one_thread import compute_in_one_thread
from meshmend.launch.preloading import keep_jax_programs, preload_training
from meshmend.launch.run_log import run_log
from meshmend.membership.events import (
    Event,
    GenerationBegan,
    StepFinished,
    TimedEvent,
    WriteFailed,
    missing_checkpoints,
)
from meshmend.membership.faults.fault import Fault
from meshmend.planning.catalogue import prepare
from meshmend.planning.settings import Settings
from meshmend.scratch import scratch_folder
from meshmend.train.data.audit import Audit, audit


@dataclass(frozen=True)
class ElasticScript:
    """A script to run on every live chip of the settings' mesh, and the faults to inject.

    Modules of `preload` are imported once, before the workers are forked. Each worker computes in
    `n_threads` threads.
    """

    settings: Settings
    script: Script
    run_dir: Path | None = None
    faults: tuple[Fault, ...] = ()
    timing: Timing = field(default_factory=Timing)
    board: tuple[int, ...] = ()
    checks: bool = False
    preload: tuple[str, ...] = ()
    testbed_bytes_per_s: float | None = None
    n_threads: int = 1
    page: PageRequest | None = None


@dataclass(frozen=True)
class ScriptResult:
    """The result of a run: how the job ended, and what the check of its ledgers found.

    `n_done` is the last step by the events; `missing` are the steps whose checkpoints could not be
    written.
    """

    outcome: Outcome
    audit: Audit
    n_done: int = 0
    missing: tuple[int, ...] = ()


def run_script(run: ElasticScript, show: Callable[[TimedEvent], None]) -> ScriptResult:
    """Run a script through all faults; write each event to the log and pass it to `show`.

    Raises:
        InputError: the script does not exist, a module cannot be imported, or the run's folder
            cannot be made.
    """
    compute_in_one_thread()
    script = run.script
    if not script.is_module and not Path(script.name).is_file():
        raise InputError(f"meshmend run needs a script, but there is no file {script.name}")
    with _folder(run.run_dir) as folder:
        keep_jax_programs(folder / "compiled")
        preload_training(run.preload)
        settings, is_testbed = run.settings, run.testbed_bytes_per_s is not None
        prepare(settings.mesh, settings.algorithm if is_testbed else settings.planned_algorithm)
        with run_log(folder / "events.jsonl") as log:
            kept: list[Event] = []

            def on_event(event: TimedEvent) -> None:
                log.add(event)
                show(event)
                if isinstance(event.event, GenerationBegan | StepFinished | WriteFailed):
                    kept.append(event.event)

            outcome = _run(run, folder, on_event)
        return ScriptResult(
            outcome,
            audit(folder / "ledger", kept),
            max((each.step for each in kept if isinstance(each, StepFinished)), default=0),
            missing_checkpoints(kept),
        )


def _run(run: ElasticScript, folder: Path, on_event: Callable[[TimedEvent], None]) -> Outcome:
    job = ElasticJob(
        settings=run.settings,
        body=script_body(run.script),
        run_dir=folder,
        on_event=on_event,
        faults=run.faults,
        timing=run.timing,
        board=run.board,
        checks=run.checks,
        n_threads=run.n_threads,
        page=run.page,
    )
    if run.testbed_bytes_per_s is None:
        return run_elastic(job)
    job = replace(job, environment={"GLOO_SOCKET_IFNAME": "chip"})
    with Testbed.up(run.settings.mesh, link_bandwidth=run.testbed_bytes_per_s) as bed:
        return run_elastic(job.in_network(bed.enter, bed.address, bed.fail, bed.repair))


@contextmanager
def _folder(named: Path | None) -> Iterator[Path]:
    """Yield a new folder for a run: the named one, or a temporary one."""
    if named is None:
        with scratch_folder() as folder:
            yield Path(folder)
        return
    try:
        (named / "ledger").mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"a run needs a new folder, but {named} cannot be made: {error.strerror}; name "
            "another with --run-dir"
        ) from None
    yield named.absolute()
