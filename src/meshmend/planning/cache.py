"""Answers kept on disk, so that no search, simulation or plan is repeated: one file for each.

The name of a file is the hash of its key and of the version that wrote it, so an answer of another
version is not found. A file that is damaged, or is not what it should be, is ignored and made anew.
Several processes may use a folder at once: each sees a file whole or not at all.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from os import utime
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from meshmend.errors import MeshmendError
from meshmend.files import DRAFT, write_whole

Value = TypeVar("Value")
Key = tuple[object, ...]  # of JSON values

MOST_BYTES: Final = 128 << 20  # of one folder; the choice of `auto` on 4096 chips takes a megabyte
_LEFT_AFTER_REMOVAL: Final = 0.75  # of the limit, so that not every new file removes an old one
_SUFFIX: Final = ".json"
# What reading a file that someone else wrote, or cut off, may raise.
_DAMAGE: Final = (
    MeshmendError,
    msgspec.MsgspecError,
    AssertionError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Cache(Generic[Value]):
    """Values in a folder by key; without a folder nothing is kept.

    `decode` raises if bytes are no value of this cache. Above `most_bytes` the files that were not
    used for the longest time are removed.
    """

    folder: Path | None
    version: str
    encode: Callable[[Value], bytes]
    decode: Callable[[bytes], Value]
    most_bytes: int = MOST_BYTES

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, or None if there is none that can be read."""
        if self.folder is None:
            return None
        path = self._path(self.folder, key)
        try:
            value = self.decode(path.read_bytes())
        except (OSError, *_DAMAGE):
            return None
        with suppress(OSError):
            utime(path)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Keep a value.

        Raises:
            OSError: the disk does not take it.
        """
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(self.folder, key), self.encode(value), is_durable=False)
        self._remove_oldest(self.folder)

    def get_or_make(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of a key, or make it, and keep it if the disk takes it."""
        value = self.get(key)
        if value is None:
            value = make()
            with suppress(OSError):
                self.put(key, value)
        return value

    def has_file(self, key: Key) -> bool:
        """Whether there is a file for a key, which may be damaged."""
        return self.folder is not None and self._path(self.folder, key).exists()

    def _path(self, folder: Path, key: Key) -> Path:
        text = json.dumps([self.version, *key])
        return folder / f"{hashlib.sha256(text.encode()).hexdigest()}{_SUFFIX}"

    def _remove_oldest(self, folder: Path) -> None:
        files = []
        for path in folder.iterdir():
            if path.name.endswith((_SUFFIX, DRAFT)):
                with suppress(FileNotFoundError):  # another process removed it
                    about = path.stat()
                    files.append((about.st_mtime, about.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self.most_bytes:
            return
        for _, size, path in sorted(files):
            if total <= _LEFT_AFTER_REMOVAL * self.most_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size
