"""Prepares a forked process as a worker, runs its script, and reports how it ended.

All of this runs in the child. The child dies with its parent, prints into pipes, finds the other
workers through a file, and sends the parent its exception before it exits.

The parent keeps to one thread (`compute_in_one_thread`), because a fork of a process with OpenMP
threads hangs. OpenMP keeps the threads of a parallel loop for the next loop. A forked process
inherits the list of these threads, but not the threads: its first parallel loop waits for them for
ever. Before each fork the parent also ends threads that a library started nevertheless.
"""

import atexit
import ctypes
import json
import logging
import os
import random
import re
import runpy
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO, cast

import numpy as np

from meshmend.config import COORDINATOR
from meshmend.errors import (
    InputError,
    RefusedError,
    ReplicasDifferError,
    ResumeError,
    WrongResultError,
)
from meshmend.launch.termination import ending_signals
from meshmend.processes import die_with_parent
from meshmend.topology.failures import Chip
from meshmend.transport.listener import Address

if TYPE_CHECKING:
    from meshmend.planning.environment import Environment  # which takes long to import

BAD_INPUT: Final = 2  # the exit code of a worker, and of a command, that was refused its input

_OF_TORCHRUN: Final = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
# The trainers that run on a `Job`, by the library that each is made for.
_TRAINERS: Final = ("meshmend.train.hf", "meshmend.train.lightning")


@dataclass(frozen=True)
class Script:
    """What a worker runs: a file, or a module by name, and its arguments."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True)
class Rendezvous:
    """How the workers of a process group find each other: a shared file, and the own rank."""

    rank: int
    world_size: int
    store: Path


@dataclass(frozen=True)
class Place:
    """A worker's place in the job.

    The worker calls `first()` while it is still in the network of its parent, then `enter(chip)`,
    which may move it to another network. It computes in `n_threads` threads.
    """

    chip: Chip
    first: Callable[[], object] | None = None
    enter: Callable[[Chip], None] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    rendezvous: Rendezvous | None = None
    n_threads: int = 1


@dataclass(frozen=True)
class Pipes:
    """The writing ends of a worker's pipes to its parent."""

    out: int
    err: int
    report: int


def worker_variables(
    environment: "Environment", master: Address, *, on_host: Sequence[Chip] = ()
) -> dict[str, str]:
    """Return the variables of the worker of a chip: those of torchrun, and what ours say of it.

    By those of torchrun scripts know that they are one of many. Chips that are missing when a job
    starts, and may come later, are counted after the live ones. `on_host` are the chips of the
    worker's host; without them all are of one host.
    """
    assert environment.settings is not None
    assert environment.chip is not None
    mesh, chip = environment.settings.mesh, environment.chip
    rank = [*mesh.live, *sorted(mesh.failed)].index(chip)
    local_rank, n_local = (on_host.index(chip), len(on_host)) if on_host else (rank, mesh.n_live)
    values = (rank, mesh.n_live, local_rank, n_local, *master)
    of_torchrun = dict(zip(_OF_TORCHRUN, map(str, values), strict=True))
    return of_torchrun | environment.to_environment()


def work(body: Callable[[], int], place: Place, pipes: Pipes, parent: int) -> None:
    """Run `body()` as this worker, then exit with the code that it returns; never return."""
    code = 1
    try:
        tie_to_parent(parent)
        _forget_finalizers()
        _redirect(pipes)
        os.environ.update(place.environment)
        compute_in_threads(place.n_threads)
        share_gpu_memory()
        if place.first is not None:
            place.first()
        if place.enter is not None:
            place.enter(place.chip)
        if place.rendezvous is not None:
            use_file_rendezvous(place.rendezvous)
        random.seed()
        np.random.seed()
        code = body()
    except BaseException as error:
        if text := error_text(error):
            _send_report(pipes.report, text)
        code = exit_code_of(error)
    finally:
        _end(code)


def _end(code: int) -> NoReturn:
    """End this process as Python would, but run none of the code of its parent.

    A script that has not failed has its threads waited for: they may still write what it trained.
    """
    try:
        if code == 0:
            threading._shutdown()  # type: ignore[attr-defined]  # the stubs lack it
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with suppress(Exception):  # the script has closed it, or put something else there
                cast("TextIO", stream).flush()
    finally:
        os._exit(code)


_JAX_MEMORY: Final = tuple(
    f"XLA_PYTHON_CLIENT_{each}" for each in ("PREALLOCATE", "MEM_FRACTION", "ALLOCATOR")
)


def share_gpu_memory() -> None:
    """Make JAX take memory of a GPU as it needs it, unless the user said how it takes memory.

    JAX takes three quarters of a GPU at its first computation: the second worker on it would die.
    """
    if not any(name in os.environ for name in _JAX_MEMORY):
        os.environ[_JAX_MEMORY[0]] = "false"


_of_parent: list[Any] = []


def _forget_finalizers() -> None:
    """Make sure that finalizers of the parent, as of its temporary folders, do not run here.

    They are kept, not freed: to free them would copy the memory pages of all that they hold.
    """
    finalize: Any = weakref.finalize  # the stubs lack its registry
    _of_parent.append(finalize._registry)
    finalize._registry = {}


def tie_to_parent(parent: int) -> None:
    """Make this process die with its parent, and keep Ctrl-C in the terminal away from it."""
    die_with_parent(parent)
    os.setpgid(0, 0)
    for number in ending_signals():
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def use_file_rendezvous(rendezvous: Rendezvous) -> None:
    """Make `init_process_group` find the other workers through a file.

    A TCP store resolves host names, which can take seconds with many workers on one machine.
    """
    numbers = count()

    dist: Any = import_module("torch.distributed")

    def rendezvous_by_file(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
        store = dist.FileStore(str(rendezvous.store), rendezvous.world_size)
        yield (
            dist.PrefixStore(f"rendezvous-{next(numbers)}", store),
            rendezvous.rank,
            rendezvous.world_size,
        )

    # The attribute torch.distributed.rendezvous is a function; it hides the module of that name.
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers["env"] = rendezvous_by_file


def _redirect(pipes: Pipes) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(pipes.out, 1)
    os.dup2(pipes.err, 2)
    # These streams stay open until the process ends, like those that they replace: what the parent
    # has in them is not printed here.
    _of_parent.extend((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))
    replaced: Any = sys  # the stubs call two of the four final
    replaced.stdout = replaced.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    replaced.stderr = replaced.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def script_body(script: Script) -> Callable[[], int]:
    """Return a function that runs a script as `__main__` and returns 0."""

    def run() -> int:
        sys.argv = [script.name, *script.arguments]
        if COORDINATOR.value_in(os.environ) and _uses_trainer(script):
            for name in _OF_TORCHRUN:
                os.environ.pop(name, None)
        if script.is_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(script.name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script.name).resolve().parent))
            runpy.run_path(script.name, run_name="__main__")
        return 0

    return run


def _uses_trainer(script: Script) -> bool:
    """Whether a script trains by another library's trainer, on a `Job`.

    Such a library would see torchrun's variables and make a process group of its own.
    """
    text = b"" if script.is_module else Path(script.name).read_bytes()
    return any(name in sys.modules or name.encode() in text for name in _TRAINERS)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a script that ended with this exception."""
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return int(error.code or 0) & 0xFF
    if isinstance(error, InputError):
        return BAD_INPUT
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def error_text(error: BaseException) -> str:
    """Return the text to print for the exception that ended a script.

    That is the traceback from the script's own frame on, or the text given to `sys.exit`. It is
    empty if the script exited with a number. What meshmend refuses is one line, with the line of
    the script that asked for it.
    """
    if isinstance(error, _OF_NO_LINE):
        return f"{error}\n"
    if isinstance(error, SystemExit):
        return "" if isinstance(error.code, int | None) else f"{error.code}\n"
    trace = error.__traceback__
    while trace is not None and not _is_of_script(trace.tb_frame):
        trace = trace.tb_next
    if isinstance(error, InputError) and trace is not None:
        lines = [line for frame, line in traceback.walk_tb(trace) if _is_of_script(frame)]
        return f"{sys.argv[0]}, line {lines[-1]}: {error}\n"
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def _is_of_script(frame: FrameType) -> bool:
    """Whether a frame runs the file of this worker's script."""
    return frame.f_code.co_filename == sys.argv[0]


def _send_report(report: int, text: str) -> None:
    """Send the parent the text of the exception that ended the script, and the time."""
    message = json.dumps({"time": time.monotonic(), "traceback": text}).encode()
    while message:
        message = message[os.write(report, message) :]


# No line of the script is wrong.
_OF_NO_LINE: Final = (ResumeError, RefusedError, ReplicasDifferError, WrongResultError)

_VARIABLE: Final = "OMP_NUM_THREADS"
_XLA_VARIABLE: Final = "XLA_FLAGS"  # JAX reads it at its first computation: in the worker
_XLA_ONE_THREAD: Final = "--xla_cpu_multi_thread_eigen=false"
_MAPS: Final = Path("/proc/self/maps")
_TASKS: Final = Path("/proc/self/task")  # one entry a thread
_GNU_OPENMP: Final = re.compile(r"/\S*/libgomp[^/\s]*\.so\S*")  # other OpenMPs handle forks
_PAUSE_HARD: Final = 2  # omp_pause_hard of OpenMP 5.0

_log = logging.getLogger(__name__)


def compute_in_one_thread() -> int:
    """Compute in one thread from now on; return how many threads the user wants in each worker.

    That is the value of OMP_NUM_THREADS, or one, as with torchrun. Call it before torch is imported
    if possible, so that torch starts no threads at all. A later call works, too.
    """
    wanted = _wanted_threads(os.environ.get(_VARIABLE, ""))
    _set_threads(1)
    return wanted


def compute_in_threads(n_threads: int) -> None:
    """Compute in this many threads from now on: in a worker, after the fork."""
    _set_threads(n_threads)
    if n_threads == 1:
        flags = os.environ.get(_XLA_VARIABLE, "")
        if _XLA_ONE_THREAD.split("=")[0] not in flags:
            os.environ[_XLA_VARIABLE] = f"{flags} {_XLA_ONE_THREAD}".strip()


def _set_threads(n_threads: int) -> None:
    """Set the number of threads of torch, which is imported or not, and of other libraries."""
    os.environ[_VARIABLE] = str(n_threads)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(n_threads)


def end_openmp_threads() -> None:
    """End the threads that OpenMP keeps for this thread's next parallel loop; call before a fork.

    Such threads exist only if a library computed in several threads. If an old OpenMP cannot end
    them, a warning is logged: workers may wait for them for ever. A process that was itself forked
    has one thread, and ending those of its parent would wait for ever, too.
    """
    if len(list(_TASKS.iterdir())) == 1:
        return
    for library in _gnu_openmps(len(sys.modules)):
        pause = getattr(ctypes.CDLL(library), "omp_pause_resource_all", None)
        if pause is None or pause(_PAUSE_HARD) != 0:
            _warn_once(library)


@lru_cache(maxsize=1)
def _gnu_openmps(n_modules: int) -> list[str]:
    """Return the paths of the OpenMP libraries that came with the modules imported so far.

    The map of a process that has imported torch takes 10 ms to read, for each of its forks.
    """
    return sorted(set(_GNU_OPENMP.findall(_MAPS.read_text(encoding="utf-8"))))


@cache
def _warn_once(library: str) -> None:
    _log.warning(
        "a launcher must end all OpenMP threads before it forks workers, but %s cannot end its "
        "threads; if workers hang, set OMP_NUM_THREADS=1",
        library,
    )


def _wanted_threads(text: str) -> int:
    """Return the first number of OMP_NUM_THREADS, which may be a list; 1 if it has no number."""
    first = text.split(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else 1
