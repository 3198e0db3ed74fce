"""Temporary folders of running processes; those of processes that were killed are deleted."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from meshmend.locks import held_lock

_PREFIX: Final = "meshmend-scratch-"
_LOCK: Final = ".lock"


class ScratchFolder:
    """A temporary folder, which is deleted at the end of the block, or by `cleanup`.

    Its user holds the lock in it. A lock, unlike a process number, means the same in the containers
    of one host that share their temporary folder. Processes that were forked meanwhile hold it too.
    """

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp(prefix=_PREFIX)
        draft = Path(self.name, ".making")
        self._lock = held_lock(draft)
        draft.rename(draft.with_name(_LOCK))  # so that nobody finds it before it is locked

    def cleanup(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.name, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> str:
        return self.name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cleanup()


def scratch_folder() -> ScratchFolder:
    """Return a new temporary folder, and delete those whose processes are gone.

    A process that was killed cannot delete its own folder. Folders of other users stay, and so does
    one that anybody still uses.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, of another user, or just deleted
            _sweep(folder)
    return ScratchFolder()


def _sweep(folder: Path) -> None:
    """Delete a folder if nobody holds its lock."""
    lock = folder / _LOCK
    if folder.stat().st_uid != os.geteuid() or not lock.exists():
        return
    with lock.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError if somebody holds it
        shutil.rmtree(folder, ignore_errors=True)
