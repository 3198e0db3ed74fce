"""`meshmend worker`: runs the worker of one chip, for a job on several hosts."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import compile_for_workers, note
from meshmend.cli.json_log import set_log_context
from meshmend.cli.options import (
    SCRIPT_LAST,
    CoordinatorOption,
    LogJsonOption,
    ModuleOption,
    ScriptArgument,
    ScriptArguments,
)
from meshmend.cli.settings import job_command
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.config import JobConfig
    from meshmend.launch.forked_worker import Script

CONTEXT = SCRIPT_LAST

_ANSWER_TIMEOUT_S = 2.0


@job_command("worker", needs=("mesh.shape",))
def worker_command(
    config: "JobConfig",
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    coordinator: CoordinatorOption,
    chip: Annotated[
        str | None,
        typer.Option(
            "--chip",
            metavar="R,C",
            help="Which chip this is; else live chip number RANK, SLURM_PROCID or "
            "JOB_COMPLETION_INDEX.",
        ),
    ] = None,
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
    job = config.job.name
    set_log_context(job=job)
    from meshmend.launch.hosts import (
        address_toward,
        board_from,
        chip_from,
        endpoint_from,
        secret_from,
        with_whole_paths,
    )
    from meshmend.topology.text import configured_mesh

    begin = configured_mesh(config.mesh)
    endpoint = endpoint_from(coordinator, "--coordinator")
    own_chip = chip_from(chip, os.environ, begin)
    set_log_context(job=job, chip=own_chip)
    board_from(config.mesh.board, begin)  # refuses a board that does not fit
    secret = secret_from(os.environ, config.job.secret_file)
    if not is_module and not Path(script).is_file():
        raise InputError(f"meshmend worker needs a script, but there is no file {script}")
    address = config.sums.bind or address_toward(endpoint)
    warn_if_unanswered(endpoint, secret.encode(), f"chip {own_chip} waits")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    compile_for_workers(meanwhile=_import_torch)
    from meshmend.launch.forked_worker import Script
    from meshmend.planning.environment import Environment

    os.environ |= Environment.from_config(
        with_whole_paths(config),
        chip=own_chip,
        coordinator=endpoint,
        secret=secret,
        bind=address,
        plans_ahead=True,
    ).to_environment()
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
