"""A lock that the processes of a host share: one of them does the work, the others wait for it."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_RETRY_S: Final = 0.005


@contextmanager
def folder_lock(
    folder: Path,
    *,
    timeout_s: float,
    is_needless: Callable[[], bool] = lambda: False,
    check: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Hold the lock of a folder; continue without it after `timeout_s` or if it is needless.

    The process that holds it may hang, so nobody waits for ever. The kernel releases the lock of a
    process that dies. `check` is called while this process waits, and may raise what ends the wait.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("wb")
    except OSError:
        yield
        return
    with lock:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not is_needless():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                check()
                time.sleep(_RETRY_S)
            except OSError:  # a file system without locks
                break
            else:
                break
        yield
