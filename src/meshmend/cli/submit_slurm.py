"""`meshmend submit slurm` prints a job file; `meshmend slurm-job` is what the job file runs."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import note, write_text
from meshmend.cli.options import SCRIPT_LAST, ModuleOption, ScriptArgument, ScriptArguments
from meshmend.cli.settings import job_command
from meshmend.config import command_words
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.config import JobConfig
    from meshmend.launch.slurm_file import SlurmFile

CONTEXT = SCRIPT_LAST


@job_command("submit slurm", needs=("mesh.shape",))
def slurm_command(
    config: "JobConfig",
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    is_module: ModuleOption = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the job file here.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Submit the job with sbatch, and print its number.")
    ] = False,
) -> int:
    """Print a Slurm job file for a script that loops over a meshmend.train.Job.

    The job starts a coordinator on its first node, and on each node the workers of one block of
    the mesh. Workers, nodes and the coordinator may die: the others go on, and what died is
    started again as soon as its node is back. A job that loses its first node, or that Slurm
    preempts, is requeued and goes on from its newest checkpoint. The exit code of the job is 0 if
    all steps were done.

    **Examples**

    - meshmend submit slurm --mesh 8x8 --hosts 4x2 train.py --lr 0.1 > job.sh

    - meshmend submit slurm --mesh 4x4 --hosts 2x2 --time 8:00:00 --sbatch "--partition=long" --run
      train.py
    """
    from meshmend.launch.host_blocks import live_chips_of
    from meshmend.launch.slurm_file import SlurmFile
    from meshmend.launch.slurm_job import SlurmJob
    from meshmend.topology.failures import format_shape

    job = SlurmJob(config, (script, *(arguments or ())), is_module)
    blocks = job.blocks()
    if not is_module and not Path(script).is_file():
        raise InputError(f"meshmend submit slurm needs a script, but there is no file {script}")
    _ = job.of_processes  # refuses a board that does not fit
    told = config.with_({"hosts.block": format_shape(job.hosts), "job.run_dir": ""})
    file = SlurmFile(
        name=script.rpartition(".")[2] if is_module else Path(script).stem,
        n_nodes=len(blocks),
        n_chips_per_node=max(len(live_chips_of(block, job.mesh)) for block in blocks),
        program=(sys.executable, "-m", "meshmend"),
        options=(*command_words("slurm-job", told), *(["--module"] if is_module else [])),
        script=job.script,
        per_chip=config.slurm.per_chip,
        time=config.slurm.time or None,
        run_dir=config.job.run_dir or None,
        extras=config.slurm.sbatch,
        made_by=f"Made by: {shlex.join(['meshmend', *sys.argv[1:]])}",
    )
    return _deliver(file, output, is_submitted=run)


def _deliver(file: "SlurmFile", output: Path | None, *, is_submitted: bool) -> int:
    """Print the job file, write it, or submit it; return the exit code."""
    text = file.text()
    if output is not None:
        write_text(output, text)
    if is_submitted:
        from meshmend.launch.slurm_file import submit

        print(submit(text))
    elif output is None:
        print(text, end="")
    return 0


@job_command("slurm-job", needs=("mesh.shape", "job.run_dir", "job.secret_file"))
def slurm_job_command(
    config: "JobConfig",
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    is_module: ModuleOption = False,
) -> int:
    """Run a job inside a Slurm allocation; the job file of `meshmend submit slurm` calls this.

    It starts the coordinator, and one step per host or chip, and starts again what dies. It ends
    with the exit code of the coordinator. SIGTERM, as scancel sends it, ends everything.
    """
    from meshmend.errors import TerminatedError
    from meshmend.launch.slurm_job import Allocation, SlurmJob, supervised
    from meshmend.launch.supervisor import supervise
    from meshmend.launch.termination import TERMINATED, terminable

    job = SlurmJob(config, (script, *(arguments or ())), is_module)
    try:
        with terminable():
            commands = supervised(job, Allocation.from_environment(os.environ))
            first, *_, last = [*commands.steps, *commands.steps]
            note(f"meshmend: {len(commands.steps)} steps, from {first} to {last}")
            return supervise(commands)
    except TerminatedError:
        note("meshmend: SIGTERM ends the job")
        return TERMINATED
