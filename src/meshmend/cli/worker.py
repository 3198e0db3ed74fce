"""`meshmend worker`: runs the worker of one chip, for a job on several hosts."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import compile_for_workers, note
from meshmend.cli.coordinator import BoardOption, JobOption, SecretOption
from meshmend.cli.json_log import set_log_context
from meshmend.cli.options import (
    SCRIPT_LAST,
    FailOption,
    LinkTimeoutOption,
    LogJsonOption,
    MeshOption,
    WrapOption,
    check_seconds,
    mesh_of,
)

if TYPE_CHECKING:
    from meshmend.launch.forked_worker import Script

CONTEXT = SCRIPT_LAST

_ANSWER_TIMEOUT_S = 2.0

ScriptArgument = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="The script, or with -m a module.")
]
ScriptArguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")]
CoordinatorOption = Annotated[
    str,
    typer.Option("--coordinator", metavar="HOST:PORT", help="The address of the coordinator."),
]
BindOption = Annotated[
    str | None,
    typer.Option(
        "--bind",
        metavar="ADDRESS",
        help="The address to listen on; else the one by which the coordinator is reached.",
    ),
]
AlgorithmOption = Annotated[
    str, typer.Option("--algorithm", metavar="NAME", help="How to sum; auto by default.")
]
RunFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        metavar="FOLDER",
        help="The folder of ledgers and of plans made ahead; else there are no ledgers, and "
        "plans are in the temporary folder.",
    ),
]
JoinTimeoutOption = Annotated[
    float,
    typer.Option(
        "--join-timeout",
        callback=check_seconds,
        min=0.0,
        help="Seconds to look for the coordinator.",
    ),
]
WaitForChipOption = Annotated[
    float,
    typer.Option(
        "--wait-for-chip",
        callback=check_seconds,
        min=0.0,
        help="Seconds to wait for a chip that has another worker.",
    ),
]
ModuleOption = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")]


def worker_command(
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    coordinator: CoordinatorOption,
    mesh: MeshOption,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    chip: Annotated[
        str | None,
        typer.Option(
            "--chip",
            metavar="R,C",
            help="Which chip this is; else live chip number RANK, SLURM_PROCID or "
            "JOB_COMPLETION_INDEX.",
        ),
    ] = None,
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
    log_json: LogJsonOption = False,
) -> int:
    """Run the worker of one chip: a script that loops over a meshmend.train.Job or JaxJob.

    Start one per chip, by torchrun, Slurm, Kubernetes or by hand, and one `meshmend
    coordinator`. A worker that is started again for a chip that died takes its state from its
    neighbours and goes on.

    **Examples**

    - meshmend worker --coordinator 10.0.0.1:7000 --mesh 4x4 --chip 0,3 train.py --lr 0.1

    - srun meshmend worker --coordinator 10.0.0.1:7000 --mesh 4x4 train.py
    """
    from meshmend.errors import InputError

    set_log_context(job=job)
    begin = mesh_of(mesh, wrap, fail)
    from meshmend.launch.hosts import (
        address_toward,
        board_from,
        chip_from,
        endpoint_from,
        ready_dir_from,
        secret_from,
    )

    endpoint = endpoint_from(coordinator, "--coordinator")
    own_chip = chip_from(chip, os.environ, begin)
    set_log_context(job=job, chip=own_chip)
    boards = board_from(board, begin)
    secret = secret_from(os.environ, secret_file)
    if not is_module and not Path(script).is_file():
        raise InputError(f"meshmend worker needs a script, but there is no file {script}")
    address = bind or address_toward(endpoint)
    warn_if_unanswered(endpoint, secret.encode(), f"chip {own_chip} waits")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    compile_for_workers(meanwhile=_import_torch)
    from meshmend.launch.forked_worker import Script
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
        chip=own_chip,
        coordinator=endpoint,
        job=job,
        job_dir=run_dir.absolute() if run_dir else None,
        plans_ahead=True,
        board=boards,
        link_timeout_s=link_timeout,
        join_timeout_s=join_timeout,
        wait_for_chip_s=wait_for_chip,
        ready_dir=ready_dir_from(os.environ),
    )
    os.environ |= environment.to_environment()
    return _run_script(Script(script, tuple(arguments or ()), is_module))


def _import_torch() -> None:
    """Import what nearly every script needs, and what takes seconds."""
    with suppress(ImportError):
        import torch  # noqa: F401


def warn_if_unanswered(endpoint: tuple[str, int], secret: bytes, who_waits: str) -> None:
    """Print a line if the coordinator does not answer yet; the workers then wait for it."""
    from meshmend.launch.hosts import is_answered

    if not is_answered(endpoint, secret, within_s=_ANSWER_TIMEOUT_S):
        host, port = endpoint
        note(f"meshmend: {who_waits} for its coordinator: nobody answers at {host}:{port}")


def _run_script(script: "Script") -> int:
    """Run a script in this process; print its exception, if any, and return its exit code."""
    from meshmend.errors import RefusedError, TerminatedError
    from meshmend.launch.forked_worker import error_text, exit_code_of, script_body
    from meshmend.launch.termination import TERMINATED, exit_soon_after_signal

    with exit_soon_after_signal():
        try:
            return script_body(script)()
        except TerminatedError:
            return TERMINATED
        except (RefusedError, KeyboardInterrupt):
            raise  # `main` prints one line, without a traceback
        except BaseException as error:
            if words := error_text(error):
                note(words.rstrip("\n"), level="error")
            return exit_code_of(error)
