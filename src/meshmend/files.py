"""Writes files as a whole: a crash, a kill or a full disk leaves the old file or the new one.

The one way in which meshmend replaces a file. It knows nothing of what is written.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, cast
from uuid import uuid4

DRAFT: Final = ".part"  # ends the names of files that are being written

Content = str | bytes | Callable[[BinaryIO], object]

_NO_FOLDER_SYNC: Final = (errno.EINVAL, errno.ENOTSUP)  # of file systems that cannot flush a folder


def write_whole(file: Path, content: Content, *, is_durable: bool = True) -> None:
    """Write a file, or replace it, in one piece.

    `content` is text, bytes, or a function that writes to a stream. Each writer has a draft of its
    own, so several may write the same file at once: the last one stays. A durable file survives a
    power failure once this function has returned.

    Raises:
        OSError: it could not be written, whatever exception `content` made of that; the file before
            it is still there, and no draft is left.
    """
    draft = file.with_name(f".{file.name}.{uuid4().hex}{DRAFT}")
    try:
        with draft.open("xb") as stream:
            _write(stream, content)
            stream.flush()
            if is_durable:
                os.fsync(stream.fileno())
        draft.replace(file)
    except BaseException:
        with suppress(OSError):  # the disk may be read-only by now
            draft.unlink()
        raise
    if is_durable:
        sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a new file in it survives a power failure.

    Raises:
        OSError: that failed.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def why_unwritten(error: Exception) -> str:
    """Return in words why something could not be written."""
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"


def _write(stream: BinaryIO, content: Content) -> None:
    if isinstance(content, str | bytes):
        stream.write(content.encode() if isinstance(content, str) else content)
        return
    watched = _Watched(stream)
    try:
        content(cast(BinaryIO, watched))
    except Exception:
        if watched.error is not None:  # torch.save makes a RuntimeError of a full disk
            raise watched.error from None
        raise


class _Watched:
    """A stream that remembers the error of a write, which a library may turn into another."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._stream.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self.error = self.error or error
            raise
