"""Runs a user's script on every live chip of a mesh on this machine: `meshmend run`.

`run_job` starts one worker per live chip, watches them, and ends them all when one fails.
`run_script` survives lost chips: the script builds a `meshmend.train.Job` or `JaxJob` and loops
over it, or loops over `meshmend.torch.steps`. The run's folder holds its ledgers, its
events and its report; without `run_dir` it is a temporary folder, which is removed at the end.

The workers are forked from this process, which has imported torch and made the plans: sixteen
start in the time of one. It may import JAX but must not compute with it: JAX then starts threads,
which no fork inherits, and the first computation of a worker would wait for them for ever.
"""

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from meshmend.config import JobConfig
from meshmend.errors import InputError, TerminatedError
from meshmend.lab.testbed.bed import Testbed
from meshmend.launch.elastic import RecordedRun, run_recorded
from meshmend.launch.job_page import PageRequest
from meshmend.launch.job_processes import ElasticJob, testbed_of, variables_here
from meshmend.launch.journal import start_event, write_report
from meshmend.launch.supervisor import Supervisor
from meshmend.launch.termination import TERMINATED, terminable
from meshmend.launch.worker import (
    Place,
    Rendezvous,
    Script,
    compute_in_one_thread,
    script_body,
)
from meshmend.membership.events import TimedEvent
from meshmend.packages import need
from meshmend.planning.catalogue import prepare
from meshmend.planning.environment import Environment
from meshmend.planning.settings import settings_of
from meshmend.processes import without_garbage
from meshmend.scratch import scratch_folder
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import configured_mesh
from meshmend.transport.event_loop import load_event_loop

_GRACE_S = 1.0  # after a failure, for its cause to end and for other workers to print their errors

_MASTER = ("127.0.0.1", 29500)  # of torchrun; workers find each other through a file
_BACKEND = ("meshmend.torch", "meshmend.torch.group_factory")
# DistributedDataParallel imports the first two at its first use, which would take each worker
# seconds.
_PRELOAD = ("torch._dynamo.utils", "torch.distributed.rpc", *_BACKEND)


def check_torch_installed() -> None:
    """Raise InputError if PyTorch, which the scripts of a job import, is not installed."""
    need(
        "meshmend run",
        "torch",
        extra="torch",
        otherwise=", or use --elastic with a loop over a JaxJob",
    )


def run_job(config: JobConfig, script: Script, *, n_threads: int = 1) -> int:
    """Run a script on every live chip of a mesh; return the exit code of the first to fail, or 0.

    Each worker computes in `n_threads` threads. The code of a worker that a signal killed is 128
    plus the signal's number. Ctrl-C ends all workers before this function raises KeyboardInterrupt.

    Raises:
        InputError: a module cannot be imported.
    """
    check_torch_installed()
    compute_in_one_thread()
    preload_modules((*_PRELOAD, *config.local.preload))
    mesh = configured_mesh(config.mesh)
    prepare(mesh, _algorithm(config, mesh))
    with testbed_of(config) as bed, scratch_folder() as folder, terminable():
        common = Environment(config, secret=secrets.token_hex(32))
        workers = _Workers(script, common, mesh, bed, n_threads)
        try:
            for rank in range(mesh.n_live):
                workers.start(rank, Path(folder) / "store")
            workers.until_over()
        except TerminatedError:
            return TERMINATED
        finally:
            workers.supervisor.end_all()
    return workers.report_failure()


def _algorithm(config: JobConfig, mesh: Mesh) -> str:
    """Return how the workers of a script sum; in a testbed each is on a host of its own."""
    is_alone = bool(config.local.testbed) and not config.sums.fabric
    return config.sums.algorithm if is_alone else settings_of(config.sums, mesh).planned_algorithm


class _Workers:
    """The running workers of a job; `common` is the environment that they have in common."""

    def __init__(
        self,
        script: Script,
        common: Environment,
        mesh: Mesh,
        bed: Testbed | None,
        n_threads: int,
    ) -> None:
        self._script, self._common, self._n_threads = script, common, n_threads
        self._mesh, self._bed = mesh, bed
        self.supervisor = Supervisor()
        self._ranks: dict[int, tuple[int, Chip]] = {}

    def start(self, rank: int, store: Path) -> None:
        """Fork the worker of one rank."""
        chip = self._mesh.live[rank]
        environment = replace(self._common, chip=chip)
        place = Place(
            chip=chip,
            enter=self._bed.enter if self._bed else None,
            environment=variables_here(environment, _MASTER, self._bed) | {"GROUP_RANK": "0"},
            rendezvous=Rendezvous(rank, self._mesh.n_live, store),
            n_threads=self._n_threads,
        )
        process = self.supervisor.fork_worker(script_body(self._script), place)
        self._ranks[process.pid] = rank, chip

    def until_over(self) -> None:
        """Wait until all workers have ended, or `_GRACE_S` after the first failure."""
        deadline = None
        while self.supervisor.alive():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            self.supervisor.serve(left)
            if deadline is None and self.supervisor.failed():
                deadline = time.monotonic() + _GRACE_S

    def report_failure(self) -> int:
        """Print the first failure on standard error; return its exit code, or 0 without failure."""
        failed = self.supervisor.failed()
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


def run_script(
    config: JobConfig,
    script: Script,
    show: Callable[[TimedEvent], None],
    *,
    n_threads: int = 1,
    page: PageRequest | None = None,
) -> tuple[RecordedRun, str | None]:
    """Run a script through all faults; write each event to the log and pass it to `show`.

    Each worker computes in `n_threads` threads. Returns the run and the path of its report, None if
    the run has no folder that stays, or no step.

    Raises:
        InputError: a module cannot be imported, or the run's folder cannot be made.
    """
    compute_in_one_thread()
    mesh = configured_mesh(config.mesh)
    with _folder(config.job.run_dir) as folder:
        keep_jax_programs(folder / "compiled")
        preload_training(config.local.preload)
        prepare(mesh, _algorithm(config, mesh))
        job = ElasticJob(
            config.with_({"job.run_dir": str(folder)}),
            body=script_body(script),
            on_event=show,
            n_threads=n_threads,
            page=page,
        )
        done = run_recorded(job, start_event(mesh, Path(script.name).name))
        has_report = bool(config.job.run_dir and done.run.n_done)
        return done, write_report(done.run, folder) if has_report else None


@contextmanager
def _folder(name: str) -> Iterator[Path]:
    """Yield a new folder for a run: the named one, or a temporary one."""
    if not name:
        with scratch_folder() as folder:
            yield Path(folder)
        return
    named = Path(name)
    try:
        (named / "ledger").mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"a run needs a new folder, but {named} cannot be made: {error.strerror}; name "
            "another with --run-dir"
        ) from None
    yield named.absolute()


_CACHE_VARIABLE: Final = "JAX_COMPILATION_CACHE_DIR"


@without_garbage()
def preload_modules(names: Iterable[str]) -> None:
    """Import modules by their names.

    Raises:
        InputError: a module cannot be imported, or has computed with JAX.
    """
    for name in names:
        try:
            import_module(name)
        except ImportError as error:
            raise InputError(
                f"--preload needs a module, but cannot import {name}: {error}"
            ) from None
    if _has_computed_with_jax():
        raise InputError(
            "--preload needs modules that only import JAX, but one of them has computed with it, "
            "and workers forked from this process would hang; make arrays in functions, or leave "
            "out that module"
        )


def keep_jax_programs(folder: Path) -> None:
    """Make JAX keep what it compiles in a folder, unless the user has named another.

    Call it before JAX is imported. Workers that are started again then compile nothing.
    """
    if not os.environ.get(_CACHE_VARIABLE):
        os.environ[_CACHE_VARIABLE] = str(folder)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@without_garbage()
def preload_training(names: Iterable[str]) -> None:
    """Import modules by their names, and the framework that workers train with; load our own code.

    The framework is JAX if one of the modules imports it, else PyTorch if it is installed.

    Raises:
        InputError: a module cannot be imported, or has computed with JAX.
    """
    preload_modules(names)
    if "jax" in sys.modules:
        preload_modules(["meshmend.train.jax.job"])
    elif find_spec("torch"):
        import torch

        preload_modules(["meshmend.train.torch.job", *_BACKEND])
        torch.optim.SGD([torch.zeros(1)])  # imports torch's compiler here, not in each worker
    load_event_loop()


def _has_computed_with_jax() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")  # JAX has no public name for this
    return bridge is not None and bool(bridge.backends_are_initialized())
