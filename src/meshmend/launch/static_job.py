"""Starts one worker per live chip, watches them, and ends them all when one fails.

The workers are forked from this process, which has imported torch and made the plans: sixteen
start in the time of one. No worker outlives the call: workers are killed with their process
groups, and by the kernel if this process is killed.
"""

import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from meshmend.errors import InputError, TerminatedError
from meshmend.launch.children import Children
from meshmend.launch.forked_worker import (
    Place,
    Rendezvous,
    Script,
    script_body,
    torchrun_variables,
    work,
)
from meshmend.launch.one_thread import compute_in_one_thread
from meshmend.launch.preloading import preload_modules
from meshmend.launch.termination import TERMINATED, terminable
from meshmend.planning.catalogue import prepare
from meshmend.planning.environment import Environment
from meshmend.planning.settings import Settings
from meshmend.scratch import scratch_folder
from meshmend.topology.failures import Chip

_GRACE_S = 1.0  # after a failure, for its cause to end and for other workers to print their errors

# DistributedDataParallel imports these at its first use, which would take each worker seconds.
_PRELOAD = ("torch._dynamo.utils", "torch.distributed.rpc", "meshmend.torch")


@dataclass(frozen=True)
class StaticJob:
    """A script to run on every live chip of the settings' mesh.

    Each worker calls `enter(chip)` first, then listens on `address_of(chip)`: this is how a testbed
    puts workers into its network. Modules of `preload` are imported once, before the workers are
    forked. Each worker computes in `n_threads` threads.
    """

    settings: Settings
    script: Script
    enter: Callable[[Chip], None] | None = None
    address_of: Callable[[Chip], str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    n_threads: int = 1


def check_torch_installed() -> None:
    """Raise InputError if PyTorch, which the scripts of a job import, is not installed."""
    if find_spec("torch") is None:
        raise InputError(
            "meshmend run needs torch, but it is not installed; install it with pip install "
            "'meshmend[torch]', or use --elastic with a loop over a JaxJob"
        )


def run_job(job: StaticJob) -> int:
    """Run a script on every live chip of a mesh; return the exit code of the first to fail, or 0.

    The code of a worker that a signal killed is 128 plus the signal's number. Ctrl-C ends all
    workers before this function raises KeyboardInterrupt.

    Raises:
        InputError: the script does not exist, or a module cannot be imported.
    """
    if not job.script.is_module and not Path(job.script.name).is_file():
        raise InputError(f"meshmend run needs a script, but there is no file {job.script.name}")
    check_torch_installed()
    compute_in_one_thread()
    preload_modules((*_PRELOAD, *job.preload))
    mesh = job.settings.mesh
    if job.address_of is not None:
        job = replace(job, settings=replace(job.settings, bind=job.address_of(mesh.live[0])))
    prepare(mesh, job.settings.planned_algorithm)
    if not job.settings.secret:
        job = replace(job, settings=replace(job.settings, secret=secrets.token_hex(32)))
    workers = _Workers()
    with scratch_folder() as folder, terminable():
        try:
            for rank in range(mesh.n_live):
                workers.start(job, rank, Path(folder) / "store")
            workers.until_over()
        except TerminatedError:
            return TERMINATED
        finally:
            workers.children.end_all()
    return workers.report_failure()


class _Workers:
    """The running workers of a job."""

    def __init__(self) -> None:
        self.children = Children()
        self._ranks: dict[int, tuple[int, Chip]] = {}

    def start(self, job: StaticJob, rank: int, store: Path) -> None:
        """Fork the worker of one rank."""
        chip = job.settings.mesh.live[rank]
        place = Place(
            chip=chip,
            enter=job.enter,
            environment=_environment(job, rank, chip),
            rendezvous=Rendezvous(rank, job.settings.mesh.n_live, store),
            n_threads=job.n_threads,
        )
        child = self.children.start(
            f"[{','.join(map(str, chip))}] ",
            lambda pipes, parent: work(script_body(job.script), place, pipes, parent),
        )
        self._ranks[child.pid] = rank, chip

    def until_over(self) -> None:
        """Wait until all workers have ended, or `_GRACE_S` after the first failure."""
        deadline = None
        while self.children.alive():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            self.children.handle(left)
            if deadline is None and self.children.failed():
                deadline = time.monotonic() + _GRACE_S

    def report_failure(self) -> int:
        """Print the first failure on standard error; return its exit code, or 0 without failure."""
        failed = self.children.failed()
        if not failed:
            return 0
        first = failed[0]
        rank, chip = self._ranks[first.pid]
        print(
            f"meshmend: chip {chip} (rank {rank}) failed first: {first.how_it_ended}",
            file=sys.stderr,
        )
        print(first.traceback, file=sys.stderr, end="")
        return first.code or 1


def _environment(job: StaticJob, rank: int, chip: Chip) -> dict[str, str]:
    """Return the variables that torchrun would set, and those that the backend reads."""
    settings = job.settings
    if job.address_of is not None:
        settings = replace(settings, bind=job.address_of(chip))
    n_live = settings.mesh.n_live
    return {
        **torchrun_variables(
            rank, n_live, local_rank=rank, local_world_size=n_live, master=("127.0.0.1", 29500)
        ),
        "GROUP_RANK": "0",
        **Environment(settings, chip=chip).to_environment(),
        **job.environment,
    }
