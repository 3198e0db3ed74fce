"""Keeps a launcher to one thread, because a fork of a process with OpenMP threads hangs.

OpenMP keeps the threads of a parallel loop for the next loop. A forked process inherits the list of
these threads, but not the threads: its first parallel loop waits for them for ever. So a launcher
computes in one thread. Before each fork it also ends threads that a library started nevertheless.
"""

import ctypes
import logging
import os
import re
import sys
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

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
