"""Writes files as a whole: a crash, a kill or a full disk leaves the old file or the new one.

The one way in which meshmend replaces a file. It knows nothing of what is written.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final
from uuid import uuid4

DRAFT: Final = ".part"  # ends the names of files that are being written

Content = str | bytes | Callable[[BinaryIO], object]

_NOT_REPLACED: Final = (errno.EACCES, errno.EPERM, errno.EBUSY)
_NO_FOLDER_SYNC: Final = (errno.EINVAL, errno.ENOTSUP)  # of file systems that cannot flush a folder


def write_whole(file: Path, content: Content, *, is_durable: bool = True) -> None:
    """Write a file, or replace it, in one piece.

    `content` is text, bytes, or a function that writes to a stream. Each writer has a draft of its
    own, so several may write the same file at once: the last one stays. A durable file survives a
    power failure once this function has returned.

    Raises:
        OSError: it could not be written; the file before it is still there, and no draft is left.
    """
    draft = file.with_name(f".{file.name}.{uuid4().hex}{DRAFT}")
    try:
        with draft.open("xb") as stream:
            if callable(content):
                content(stream)
            else:
                stream.write(content.encode() if isinstance(content, str) else content)
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


def write_named(path: Path, content: str | bytes) -> None:
    """Write a file that a user has named, and replace it in one piece where that can be done.

    A link stays a link. What is no plain file, such as /dev/stdout, and what cannot be replaced,
    such as a file that is mounted or lies in somebody else's folder, is written in place.

    Raises:
        OSError: it could not be written.
    """
    file = path.resolve()
    if not file.exists() or file.is_file():
        try:
            write_whole(file, content, is_durable=False)
            return
        except OSError as error:
            if error.errno not in _NOT_REPLACED or not file.exists():
                raise
    path.write_bytes(content.encode() if isinstance(content, str) else content)


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


def why_unwritten(error: OSError) -> str:
    """Return in words why something could not be written."""
    return error.strerror or str(error) or type(error).__name__
