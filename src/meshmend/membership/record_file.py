"""Saves and loads the coordinator's record: a small file that is replaced as a whole.

Its first field is a checksum of the bytes after it. What a disk made of the record is believed only
if it is what was written, bit for bit.
"""

import hashlib
import json
from collections.abc import Callable
from logging import getLogger
from pathlib import Path
from typing import Final

import msgspec

from meshmend.errors import InputError, MessageError
from meshmend.files import write_whole
from meshmend.membership.history import CoordinatorRecord, History
from meshmend.transport.codec import value_of
from meshmend.transport.listener import Address

VERSION: Final = 2
_CHECKSUM_BYTES: Final = 16
_BEFORE_CHECKSUM: Final = '{"checksum": "'
_AFTER_CHECKSUM: Final = '", '

_log = getLogger(__name__)


def load_history(path: Path, job: str) -> History:
    """Return what earlier coordinators of this job saved; an empty history if none did."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return History(CoordinatorRecord(job))
    except (OSError, ValueError) as error:
        return _unknown_history(job, f"{path}: {error}")
    return history_of(text, job)


def history_of(text: str, job: str) -> History:
    """Return the history of a job from the text of a record.

    A damaged text differs from no text: a state existed, but it is not known which. The history is
    then marked as unknown, and the coordinator waits for a worker that holds a state; the records
    that follow say so too, until a generation begins.
    """
    try:
        record = _record_of(text)
    except (ValueError, RecursionError, MessageError) as error:
        return _unknown_history(job, str(error))
    return History(record if record.job == job else CoordinatorRecord(job))


def check_record(path: Path, job: str, *, forget: bool) -> None:
    """Check that a coordinator of this job may keep its record in a file.

    Raises:
        InputError: it is a folder, or holds the record of another job that is not to be forgotten.
    """
    if path.is_dir():
        raise InputError(f"--state needs a file, but {path} is a folder; name a file in it")
    try:
        owner = _record_of(path.read_text(encoding="utf-8")).job
    except (OSError, ValueError, RecursionError, MessageError):
        return  # there is none yet, or it is damaged: `load_history` deals with that
    if owner != job and not forget:
        raise InputError(
            f"{path} is the record of job {owner!r}, but this is job {job!r}, which would replace "
            "it; name another file with --state, or forget that job with --new"
        )


class RecordFile:
    """A coordinator's record on disk, which another coordinator of its job may replace.

    What this one wrote itself it need not parse again, only compare: at a thousand chips that is
    the longest part of finding out whether there is another one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: tuple[bytes, int] = b"", 0  # what it wrote last, and its term
        self._read: tuple[tuple[int, int, int] | None, int] = None, 0

    def save(self, record: CoordinatorRecord) -> None:
        """Replace the record on disk; it survives a power failure from then on.

        Raises:
            OSError: it could not be written; the record before it is still there.
        """
        content = record_text(record).encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, content)
        self._written = content, record.term

    def term(self) -> int:
        """Return the term of the record on disk, 0 if there is none that can be read."""
        try:
            found = self._path.stat()
            version = found.st_ino, found.st_mtime_ns, found.st_size
            if version != self._read[0]:
                self._read = version, self._term_of(self._path.read_bytes())
        except OSError:
            return 0
        return self._read[1]

    def _term_of(self, content: bytes) -> int:
        written, term = self._written
        return term if content == written else _term_of(content)


def members_in(path: Path) -> tuple[Address, ...]:
    """Return where the workers of the last generations in a record listen, the latest first.

    Raises:
        InputError: the file cannot be read, or holds no record.
    """
    try:
        record = _record_of(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the coordinator's record {path}: {error.strerror}") from None
    except (ValueError, RecursionError, MessageError) as error:
        raise InputError(f"{path} is no record of a coordinator: {error}") from None
    begun = reversed(record.begun)
    return tuple(dict.fromkeys(address for each in begun for _, address in each.members))


def record_text(record: CoordinatorRecord) -> str:
    """Return a record as the text that `history_of` reads."""
    fields = msgspec.json.encode(record, order="deterministic").decode().removeprefix("{")
    rest = f'"version": {VERSION}, {fields}'
    return _BEFORE_CHECKSUM + _checksum(rest) + _AFTER_CHECKSUM + rest


class RecordSaver:
    """Saves records; one that cannot be saved is only logged, and saved as soon as it can be.

    The workers know their generation too, so a full disk must not stop a job that trains.
    `write` saves a record, or raises OSError.
    """

    def __init__(self, write: Callable[[CoordinatorRecord], None]) -> None:
        self._write = write
        self._unsaved: CoordinatorRecord | None = None

    def save(self, record: CoordinatorRecord) -> None:
        """Save a record in the place of the one before."""
        try:
            self._write(record)
        except OSError as error:
            if self._unsaved is None:
                _log.error("the coordinator's record cannot be written: %s", error)
            self._unsaved = record
        else:
            self._unsaved = None

    def retry(self) -> None:
        """Save the latest record again if that failed."""
        if self._unsaved is not None:
            self.save(self._unsaved)


def _record_of(text: str) -> CoordinatorRecord:
    """Return the record in a text.

    Raises:
        MessageError: another version wrote it, or it is not what was written.
        ValueError: it is no JSON.
    """
    document = json.loads(text)
    version = document.pop("version", None) if isinstance(document, dict) else None
    if version != VERSION:
        raise MessageError(f"its version is {version!r}, but this meshmend reads version {VERSION}")
    found = document.pop("checksum", None)
    begins = f"{_BEFORE_CHECKSUM}{found}{_AFTER_CHECKSUM}"
    if not text.startswith(begins) or found != _checksum(text.removeprefix(begins)):
        raise MessageError("it is not what was written: its checksum differs")
    record: CoordinatorRecord = value_of(document, CoordinatorRecord, "the record")
    return record


def _term_of(content: bytes) -> int:
    """Return the term of a record, 0 if it cannot be read."""
    try:
        return _record_of(content.decode()).term
    except (ValueError, RecursionError, MessageError):
        return 0


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_CHECKSUM_BYTES).hexdigest()


def _unknown_history(job: str, why: str) -> History:
    _log.error(
        "the coordinator's record cannot be read (%s); the coordinator waits for a worker that "
        "holds the job's state",
        why,
    )
    return History(CoordinatorRecord(job, is_unknown=True))
