"""`meshmend run`: runs a training script on every live chip of a mesh, on this machine."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import compile_for_workers, note
from meshmend.cli.options import (
    AllowFaultsOption,
    ExploreOption,
    ModuleOption,
    ScriptArgument,
    ScriptArguments,
    check_module,
    check_script,
    job_command,
    local_job,
    page_request,
)
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.config import JobConfig
    from meshmend.launch.elastic import RecordedRun
    from meshmend.launch.job_page import PageRequest
    from meshmend.launch.worker import Script
    from meshmend.membership.events import TimedEvent


ElasticOption = Annotated[
    bool,
    typer.Option(
        "--elastic",
        help="The script survives lost chips: it loops over a meshmend.train.Job or JaxJob, or "
        "over meshmend.torch.steps.",
    ),
]


@job_command("run", needs=("mesh.shape",))
def run_command(
    config: "JobConfig",
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    is_module: ModuleOption = False,
    elastic: ElasticOption = False,
    explore: ExploreOption = False,
    allow_faults: AllowFaultsOption = False,
) -> int:
    """Run a training script with one worker per live chip, like torchrun for one machine.

    The script calls init_process_group("meshmend") and is otherwise unchanged; its lines are
    printed with the chip they came from. The exit code is that of the first worker that failed.

    With --elastic the script loops over a meshmend.train.Job or JaxJob instead, or keeps its own
    loop over a process group that meshmend.torch.reconfigure mends; chips may die and come back,
    and the exit code is 0 if the others finish. It is 2 if the script is refused before its first
    step.

    **Examples**

    - meshmend run --mesh 4x4 --fail 2x2@0,2 train.py --epochs 3

    - meshmend run --mesh 4x4 --preload transformers train.py

    - meshmend run --mesh 2x2 --algorithm ring-1d -m mypackage.train

    - meshmend run --elastic --mesh 4x4 --inject "kill 2x2@0,2 at 30" examples/train/mended_loop.py

    - meshmend run --elastic --mesh 2x2 --inject "kill 0,1 at 20" examples/torch/elastic_ddp.py
    """
    local_job(config)
    if not elastic and (config.local.inject or config.job.run_dir):
        raise InputError(
            "--inject and --run-dir need --elastic: without it a lost chip ends the job"
        )
    if not elastic and (explore or allow_faults):
        raise InputError("--explore and --allow-faults need --elastic: the page follows such a job")
    if elastic and config.sums.slices:
        raise InputError("sums.slices cannot be set with --elastic, which chooses them by size")
    page = page_request(explore, allow_faults)
    check_script(script, "run", is_module=is_module)
    if is_module:
        check_module(script)
    if not elastic:
        from meshmend.launch.script import check_torch_installed

        check_torch_installed()
    compile_for_workers()
    from meshmend.launch.worker import compute_in_one_thread

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    n_threads = compute_in_one_thread()  # before torch is imported, below
    from meshmend.launch.worker import Script

    what = Script(script, tuple(arguments or ()), is_module)
    if elastic:
        return _run_elastic(config, what, n_threads, page)
    from meshmend.launch.script import run_job

    return run_job(config, what, n_threads=n_threads)


def _run_elastic(
    config: "JobConfig", script: "Script", n_threads: int, page: "PageRequest | None"
) -> int:
    """Run a script through all faults; return 0 if it finished, else print why not."""
    from meshmend.cli.job_lines import job_line
    from meshmend.errors import TerminatedError
    from meshmend.launch.script import run_script
    from meshmend.launch.termination import TERMINATED, terminable
    from meshmend.launch.worker import BAD_INPUT

    def show(timed: "TimedEvent") -> None:
        if line := job_line(timed):
            note(line)

    try:
        with terminable():
            result, report = run_script(config, script, show, n_threads=n_threads, page=page)
    except TerminatedError:
        return TERMINATED
    if not result.outcome.is_finished:
        what, _, trace = result.outcome.why.partition("\n")
        note(f"meshmend: the job did not finish: {what}")
        print(trace, end="", file=sys.stderr)
        return BAD_INPUT if result.outcome.is_refused else 1
    if report:
        note(f"meshmend: report {report}")
    note(f"meshmend: {_summary(result)}")
    for words in (*result.audit.faults, *result.audit.unchecked):
        note(f"meshmend: {words}")
    if result.run.missing_checkpoints:
        steps = ", ".join(map(str, result.run.missing_checkpoints))
        note(f"meshmend: checkpoints that could not be written: of steps {steps}")
    if result.audit.without_ledger:
        note("meshmend: the script finished, but what it did could not be checked")
    if words := result.outcome.fewer_chips:
        note(f"meshmend: {words}")
    found = result.audit
    return int(bool(found.is_wrong or found.without_ledger or result.outcome.fewer_chips))


def _summary(result: "RecordedRun") -> str:
    found = result.audit
    if found.steps == 0 and result.run.n_done:
        return f"{result.run.n_done} steps; samples not checked; replicas not compared"
    if found.steps == 0 and found.resumed:
        return (
            f"finished: {found.resumed} of {found.resumed} steps were done before this run, which "
            "had nothing left to do; set steps higher to go on"
        )
    if found.steps == 0:
        return (
            "the script ended without a step; --elastic is for a loop over meshmend.train.Job or "
            "meshmend.torch.steps"
        )
    equal = {
        True: "replicas equal bit for bit",
        False: "replicas DIFFER",
        None: "replicas not compared",
    }[found.replicas_equal]
    redone = f"; {found.redone} steps done again" if found.redone else ""
    samples = f"samples: {found.used} used, {found.lost} lost, {found.repeated} repeated"
    if not (found.used or found.lost):  # a loop over meshmend.torch.steps hands out none
        samples = "samples not counted"
    return f"{found.steps} steps; {samples}; {equal}{redone}"
