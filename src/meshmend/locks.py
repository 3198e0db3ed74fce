"""Locks that the processes of a host share; the kernel releases those of a process that dies."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

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


def held_lock(file: Path) -> BinaryIO | None:
    """Lock a file, which is made if it is missing; return None if another process holds the lock.

    The lock is held until the stream is closed, and by processes that were forked meanwhile. A file
    system without locks has none to hold.

    Raises:
        OSError: the file cannot be made.
    """
    stream = file.open("ab")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    except OSError:  # a file system without locks
        pass
    return stream
