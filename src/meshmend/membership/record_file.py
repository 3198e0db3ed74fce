"""What a coordinator remembers on disk: a small file that is whole or not there."""

import json
import os
from logging import getLogger
from pathlib import Path
from typing import Final
from uuid import uuid4

from meshmend.errors import MessageError
from meshmend.membership.history import RECORDS, CoordinatorRecord, History

VERSION: Final = 1

_log = getLogger(__name__)


def load_history(path: Path, job: str) -> History:
    """Return what the coordinators of a job before this one kept; an empty history if none did.

    A file that cannot be read is not the same as none: there was a state, and nobody knows which.
    Such a history says so, and a coordinator then waits for a worker that holds a state.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document.pop("version", None) if isinstance(document, dict) else None
        if version != VERSION:
            raise MessageError(f"it is of version {version!r}, this reads {VERSION}")
        record: CoordinatorRecord = RECORDS.decode(document)
    except FileNotFoundError:
        return History(CoordinatorRecord(job))
    except (OSError, ValueError, RecursionError, MessageError) as error:
        _log.error(
            "the coordinator's record %s cannot be read (%s); it waits for a worker that holds "
            "the job's state",
            path,
            error,
        )
        return History(CoordinatorRecord(job), is_unknown=True)
    return History(record if record.job == job else CoordinatorRecord(job))


def save_record(path: Path, record: CoordinatorRecord) -> None:
    """Put a record on the disk in the place of the one before; a failure is logged, no more.

    Workers remember too. A full disk must not stop a job whose workers are well.
    """
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    document = {"version": VERSION, **RECORDS.encode(record)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("w", encoding="utf-8") as stream:
                json.dump(document, stream)
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        _log.error("the coordinator's record %s cannot be written: %s", path, error.strerror)
