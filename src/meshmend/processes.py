"""Processes that are forked: they do not outlive their parent, and inherit what it imported."""

import atexit
import ctypes
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit now if it is already dead."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


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
