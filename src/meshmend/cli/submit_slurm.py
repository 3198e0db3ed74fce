"""`meshmend submit slurm` prints a job file; `meshmend slurm-job` is what the job file runs."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import note, write_text
from meshmend.cli.options import SCRIPT_LAST, FailOption, MeshOption, WrapOption, mesh_of
from meshmend.cli.worker import ModuleOption, ScriptArgument, ScriptArguments

if TYPE_CHECKING:
    from meshmend.launch.slurm_file import SlurmFile

CONTEXT = SCRIPT_LAST

HostsOption = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="RxC",
        help="The block of chips that one host has; 4x2 unless given. Blocks tile the mesh.",
    ),
]
HostBoardOption = Annotated[
    str | None,
    typer.Option(
        "--board",
        metavar="RxC",
        help="The chips that fail and come back together; those of a host unless given.",
    ),
]
PerChipOption = Annotated[
    bool, typer.Option("--per-chip", help="Run a step for each chip instead of each host.")
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=1,
        max=65535,
        help="The coordinator's port on the first node, which all nodes must reach; else a free "
        "one from 10000 to 32767.",
    ),
]
SbatchOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sbatch",
        metavar="OPTION",
        help="A further option of sbatch, such as '--partition=long'; repeat for more.",
    ),
]


def slurm_command(
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    mesh: MeshOption,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    hosts: HostsOption = None,
    per_chip: PerChipOption = False,
    board: HostBoardOption = None,
    run_dir: Annotated[
        str | None,
        typer.Option(
            "--run-dir",
            metavar="FOLDER",
            help="The folder of secret, record, ledgers and plans, which all nodes see; "
            "runs/slurm-JOB unless given.",
        ),
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="The time limit, as for sbatch.")
    ] = None,
    port: PortOption = None,
    sbatch: SbatchOption = None,
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
    from meshmend.errors import InputError
    from meshmend.launch.host_blocks import host_blocks, host_shape_from, live_chips_of
    from meshmend.launch.slurm_file import SlurmFile
    from meshmend.topology.failures import format_shape
    from meshmend.topology.text import mesh_words

    begin = mesh_of(mesh, wrap, fail)
    shape = host_shape_from(hosts, begin)
    blocks = [block for block in host_blocks(begin, shape) if live_chips_of(block, begin)]
    if not is_module and not Path(script).is_file():
        raise InputError(f"meshmend submit slurm needs a script, but there is no file {script}")
    from meshmend.launch.hosts import board_from

    board_from(board, begin)  # refuses a board that does not fit
    words = mesh_words(begin)
    options = ["--mesh", words["shape"], "--hosts", format_shape(shape)]
    options += ["--wrap", wrap] if any(begin.wrap) else []
    options += [word for failure in words["fail"] for word in ("--fail", failure)]
    options += ["--board", board] if board else []
    options += ["--per-chip"] if per_chip else []
    options += ["--port", str(port)] if port else []
    options += [word for extra in sbatch or () for word in ("--sbatch", extra)]
    options += ["--module"] if is_module else []
    file = SlurmFile(
        name=script.rpartition(".")[2] if is_module else Path(script).stem,
        n_nodes=len(blocks),
        n_chips_per_node=max(len(live_chips_of(block, begin)) for block in blocks),
        program=(sys.executable, "-m", "meshmend"),
        options=tuple(options),
        script=(script, *(arguments or ())),
        per_chip=per_chip,
        time=time,
        run_dir=run_dir,
        extras=tuple(sbatch or ()),
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


def slurm_job_command(
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    mesh: MeshOption,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    hosts: HostsOption = None,
    per_chip: PerChipOption = False,
    board: HostBoardOption = None,
    run_dir: Annotated[Path, typer.Option("--run-dir", metavar="FOLDER")],
    secret_file: Annotated[Path, typer.Option("--secret-file", metavar="FILE")],
    port: PortOption = None,
    sbatch: SbatchOption = None,
    is_module: ModuleOption = False,
) -> int:
    """Run a job inside a Slurm allocation; the job file of `meshmend submit slurm` calls this.

    It starts the coordinator, and one step per host or chip, and starts again what dies. It ends
    with the exit code of the coordinator. SIGTERM, as scancel sends it, ends everything.
    """
    from meshmend.errors import TerminatedError
    from meshmend.launch.host_blocks import host_shape_from
    from meshmend.launch.hosts import board_from
    from meshmend.launch.slurm_job import Allocation, SlurmJob, supervised
    from meshmend.launch.supervisor import supervise
    from meshmend.launch.termination import TERMINATED, terminable

    begin = mesh_of(mesh, wrap, fail)
    shape = host_shape_from(hosts, begin)
    job = SlurmJob(
        begin,
        shape,
        board_from(board, begin) if board else shape,
        run_dir.absolute(),
        secret_file.absolute(),
        (script, *(arguments or ())),
        is_module=is_module,
        per_chip=per_chip,
        port=port,
        extras=tuple(sbatch or ()),
    )
    try:
        with terminable():
            commands = supervised(job, Allocation.from_environment(os.environ))
            first, *_, last = [*commands.steps, *commands.steps]
            note(f"meshmend: {len(commands.steps)} steps, from {first} to {last}")
            return supervise(commands)
    except TerminatedError:
        note("meshmend: SIGTERM ends the job")
        return TERMINATED
