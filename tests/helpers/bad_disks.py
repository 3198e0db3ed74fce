"""Disks that fail while a checkpoint is written: full, over quota, failing, read-only; generated.

The fault is at the seam to the operating system: the file takes some bytes, then every call fails.
"""

import errno
import io
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SMALLEST, LARGEST = 10_000, 50_000_000  # bytes of a state
_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_CALLS = ("write", "write", "write", "write", "fsync", "replace", "mkdir", "open")


@dataclass(frozen=True)
class BadDisk:
    """A disk on which a call fails from the n-th checkpoint on, for so many; a write at an offset.

    `keeps_drafts`: what is on it cannot be deleted either.
    """

    call: str
    error: int
    n_bytes: int
    offset: int
    first: int
    count: int
    keeps_drafts: bool

    @staticmethod
    def of(seed: int) -> "BadDisk":
        """Return the disk of a seed; a hundred seeds cover all kinds."""
        rng = random.Random(seed)
        n_bytes = int(SMALLEST * (LARGEST / SMALLEST) ** rng.random())
        call, error = _CALLS[seed % len(_CALLS)], _ERRORS[seed // len(_CALLS) % len(_ERRORS)]
        offset = rng.choice([0, 1, n_bytes - 1, rng.randrange(n_bytes), rng.randrange(n_bytes)])
        first, count = rng.choice([1, 2, 3]), rng.choice([1, 2, 99])
        return BadDisk(call, error, n_bytes, offset, first, count, error == errno.EROFS)

    @contextmanager
    def mounted(self, folder: Path) -> Iterator[None]:
        """Let files in a folder be on this disk."""
        state = _State(self)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "replace", "mkdir", "unlink"):
                patch.setattr(Path, name, state.wrapped(name, getattr(Path, name), folder))
            patch.setattr(os, "fsync", state.wrapped("fsync", os.fsync, folder))
            yield


class _State:
    """Counts checkpoints by the drafts that are opened, and fails the calls that are to fail."""

    def __init__(self, disk: BadDisk) -> None:
        self.disk = disk
        self.n_drafts = 0

    @property
    def is_bad(self) -> bool:
        first = self.disk.first
        return first <= self.n_drafts < first + self.disk.count

    def wrapped(self, name: str, call: Any, folder: Path) -> Any:
        def calls(place: Any, *arguments: Any, **named: Any) -> Any:
            path = Path(f"/proc/self/fd/{place}").readlink() if name == "fsync" else place
            if not path.is_relative_to(folder):
                return call(place, *arguments, **named)
            is_draft = name == "open" and path.name.startswith(".shard-")
            self.n_drafts += is_draft
            if self.is_bad and (
                name == self.disk.call or (name == "unlink" and self.disk.keeps_drafts)
            ):
                raise OSError(self.disk.error, os.strerror(self.disk.error))
            if is_draft and self.is_bad and self.disk.call == "write":
                return io.BufferedWriter(_Raw(str(path), self.disk))
            return call(place, *arguments, **named)

        return calls


class _Raw(io.FileIO):
    """A file that takes bytes up to an offset, as a disk with so much room does."""

    def __init__(self, path: str, disk: BadDisk) -> None:
        super().__init__(path, "xb")
        self._disk, self._left = disk, disk.offset

    def write(self, data: Any) -> int:
        if not self._left:
            raise OSError(self._disk.error, os.strerror(self._disk.error))
        taken = super().write(memoryview(data)[: self._left]) or 0
        self._left -= taken
        return taken
