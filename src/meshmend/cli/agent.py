"""`meshmend agent`: runs the workers of one host, and starts those again that die."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import compile_for_workers
from meshmend.cli.options import (
    SCRIPT_LAST,
    CoordinatorOption,
    ModuleOption,
    ScriptArgument,
    ScriptArguments,
)
from meshmend.cli.settings import job_command
from meshmend.cli.worker import warn_if_unanswered
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.config import JobConfig
    from meshmend.launch.host_agent import HostWorkers

CONTEXT = SCRIPT_LAST


@job_command("agent", needs=("mesh.shape",))
def agent_command(
    config: "JobConfig",
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    coordinator: CoordinatorOption,
    chips: Annotated[
        str | None,
        typer.Option(
            "--chips",
            metavar="4x2@0,2",
            help="The chips of this host: a block, or one chip such as 0,2; else block number "
            "SLURM_NODEID or JOB_COMPLETION_INDEX of --hosts.",
        ),
    ] = None,
    is_module: ModuleOption = False,
    supervised: Annotated[
        bool,
        typer.Option(
            "--supervised",
            hidden=True,
            help="Print a line every second that says that the agent lives, and one at its end; "
            "on SIGTERM, have the workers save a checkpoint.",
        ),
    ] = False,
    slurm_job: Annotated[
        str | None,
        typer.Option(
            "--slurm-job",
            metavar="ID",
            hidden=True,
            help="Requeue this Slurm job if its first node is lost; needs --run-dir.",
        ),
    ] = None,
) -> int:
    """Run the workers of one host: one process per live chip, each started again if it dies.

    Start one per host, by any launcher, and one `meshmend coordinator`. The workers are those of
    `meshmend worker`. The agent ends with code 0 when all of them have finished, and with code 1
    if the job has failed, if a worker was refused, or if a worker fails again and again. SIGTERM
    ends it with its workers within two seconds. Each worker finds its number on this host in
    LOCAL_RANK.

    **Examples**

    - meshmend agent --coordinator 10.0.0.1:7000 --mesh 4x4 --chips 4x2@0,2 train.py --lr 0.1
    """
    from meshmend.launch.host_blocks import own_chips_from
    from meshmend.topology.text import configured_mesh

    begin = configured_mesh(config.mesh)
    own_chips = own_chips_from(chips, config.hosts.block, os.environ, begin)
    from meshmend.launch.hosts import (
        address_toward,
        board_from,
        endpoint_from,
        secret_from,
        with_whole_paths,
    )

    endpoint = endpoint_from(coordinator, "--coordinator")
    board_from(config.mesh.board, begin)  # refuses a board that does not fit
    secret = secret_from(os.environ, config.job.secret_file)
    if not is_module and not Path(script).is_file():
        raise InputError(f"meshmend agent needs a script, but there is no file {script}")
    address = config.sums.bind or address_toward(endpoint)
    warn_if_unanswered(endpoint, secret.encode(), f"the host of chip {own_chips[0]} waits")
    job_dir = Path(config.job.run_dir).absolute() if config.job.run_dir else None
    if slurm_job is not None and job_dir is not None:
        from meshmend.launch.slurm_watch import start_watch

        start_watch(slurm_job, job_dir, endpoint, secret.encode())
    compile_for_workers()
    from meshmend.launch.one_thread import compute_in_one_thread

    n_threads = compute_in_one_thread()  # before torch is imported, below
    from meshmend.launch.forked_worker import Script, script_body
    from meshmend.launch.host_agent import HostWorkers, variables_of
    from meshmend.launch.slurm_watch import is_ending
    from meshmend.planning.environment import Environment

    environment = Environment.from_config(
        with_whole_paths(config),
        coordinator=endpoint,
        secret=secret,
        bind=address,
        plans_ahead=True,
    )
    host = HostWorkers(
        variables_of(environment, own_chips),
        script_body(Script(script, tuple(arguments or ()), is_module)),
        n_threads,
        supervised,
        lambda: job_dir is not None and is_ending(job_dir, endpoint, secret.encode()),
    )
    return _run(host)


def _run(host: "HostWorkers") -> int:
    """Import what workers need, then run the workers of a host; return the exit code."""
    from meshmend.errors import TerminatedError
    from meshmend.launch.agent_lines import print_agent_line
    from meshmend.launch.host_agent import run_workers
    from meshmend.launch.preloading import preload_training
    from meshmend.launch.termination import TERMINATED, terminable

    preload_training(())
    try:
        with terminable():
            code = run_workers(host)
    except TerminatedError:
        code = TERMINATED
    if host.is_supervised:
        print_agent_line(code)
    return code
