"""Processes that are forked: they do not outlive their parent, and inherit what it imported.

And how many files a process may have open: the usual limit, 1024, is too low for a thousand chips.
"""

import atexit
import ctypes
import gc
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from meshmend.errors import InputError

_PR_SET_PDEATHSIG = 1
_OTHER_FILES = 128  # libraries, the record, a page


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit now if it is already dead."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def allow_open_files(n: int, who: str) -> None:
    """Let this process have n open files and connections, besides those of its libraries.

    Processes that it forks may have as many.

    Raises:
        InputError: this machine allows fewer.
    """
    n += _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= n:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))
    except ValueError:
        raise InputError(
            f"{who} needs {n} open files, but this machine allows a process {hard}; raise its hard "
            "limit (ulimit -Hn, or LimitNOFILE of a service)"
        ) from None


@contextmanager
def without_garbage() -> Iterator[None]:
    """Import and load what stays for good: the collector does not look at it, now or later.

    It would take a quarter of the time to import torch and transformers, and in a forked process
    it would copy the memory pages that it looks at. At the end of this process it looks at all
    again: libraries that count their objects then would list those that are part of a cycle.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)
    finally:
        if was_enabled:
            gc.enable()
