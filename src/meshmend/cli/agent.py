"""`meshmend agent`: runs the workers of one host, and starts those again that die."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import compile_for_workers
from meshmend.cli.coordinator import BoardOption, JobOption, SecretOption
from meshmend.cli.options import (
    SCRIPT_LAST,
    FailOption,
    LinkTimeoutOption,
    MeshOption,
    WrapOption,
    mesh_of,
)
from meshmend.cli.worker import (
    AlgorithmOption,
    BindOption,
    CoordinatorOption,
    JoinTimeoutOption,
    ModuleOption,
    RunFolderOption,
    ScriptArgument,
    ScriptArguments,
    WaitForChipOption,
    warn_if_unanswered,
)

if TYPE_CHECKING:
    from meshmend.launch.host_agent import HostWorkers

CONTEXT = SCRIPT_LAST


def agent_command(
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    coordinator: CoordinatorOption,
    mesh: MeshOption,
    chips: Annotated[
        str | None,
        typer.Option(
            "--chips",
            metavar="4x2@0,2",
            help="The chips of this host: a block, or one chip such as 0,2.",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="4x2",
            help="Instead of --chips, the block of each host; this one has number SLURM_NODEID or "
            "JOB_COMPLETION_INDEX.",
        ),
    ] = None,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    bind: BindOption = None,
    job: JobOption = "job",
    board: BoardOption = None,
    algorithm: AlgorithmOption = "auto",
    run_dir: RunFolderOption = None,
    secret_file: SecretOption = None,
    link_timeout: LinkTimeoutOption = 2.0,
    join_timeout: JoinTimeoutOption = 300.0,
    wait_for_chip: WaitForChipOption = 60.0,
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
    from meshmend.errors import InputError
    from meshmend.launch.host_blocks import own_chips_from

    begin = mesh_of(mesh, wrap, fail)
    own_chips = own_chips_from(chips, hosts, os.environ, begin)
    from meshmend.launch.hosts import (
        address_toward,
        board_from,
        endpoint_from,
        ready_dir_from,
        secret_from,
    )

    endpoint = endpoint_from(coordinator, "--coordinator")
    boards = board_from(board, begin)
    secret = secret_from(os.environ, secret_file)
    if not is_module and not Path(script).is_file():
        raise InputError(f"meshmend agent needs a script, but there is no file {script}")
    address = bind or address_toward(endpoint)
    warn_if_unanswered(endpoint, secret.encode(), f"the host of chip {own_chips[0]} waits")
    job_dir = run_dir.absolute() if run_dir else None
    if slurm_job is not None and job_dir is not None:
        from meshmend.launch.slurm_watch import start_watch

        start_watch(slurm_job, job_dir, endpoint, secret.encode())
    compile_for_workers()
    from meshmend.launch.one_thread import compute_in_one_thread

    n_threads = compute_in_one_thread()  # before torch is imported, below
    from meshmend.launch.forked_worker import Script, script_body
    from meshmend.launch.host_agent import HostWorkers, variables_of
    from meshmend.launch.slurm_watch import is_ending
    from meshmend.planning.environment import Environment, sums_payloads_in
    from meshmend.planning.settings import Settings

    environment = Environment(
        Settings(
            begin,
            algorithm=algorithm,
            bind=address,
            sums_payloads=sums_payloads_in(os.environ),
            secret=secret,
        ),
        coordinator=endpoint,
        job=job,
        job_dir=job_dir,
        plans_ahead=True,
        board=boards,
        link_timeout_s=link_timeout,
        join_timeout_s=join_timeout,
        wait_for_chip_s=wait_for_chip,
        ready_dir=ready_dir_from(os.environ),
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
