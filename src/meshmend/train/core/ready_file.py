"""A file that exists while a worker trains, for the readiness probe of a scheduler.

A probe that looks for a file costs no Python process and needs no coordinator.
"""

import logging
from pathlib import Path

from meshmend.membership.messages import Status
from meshmend.topology.failures import Chip

_log = logging.getLogger(__name__)


class ReadyFile:
    """Keeps the file of one chip in a folder; without a folder it does nothing.

    A worker that is killed leaves its file behind. The next worker of the chip removes it when it
    starts.
    """

    def __init__(self, folder: Path | None, chip: Chip) -> None:
        self._file = folder / "-".join(map(str, chip)) if folder else None
        self._is_ready: bool | None = None

    def update(self, status: Status) -> None:
        """Make or remove the file: a worker is ready if it is up to date in its generation."""
        is_ready = status.ready and status.state_version == status.generation
        if self._file is None or is_ready == self._is_ready:
            return
        self._is_ready = is_ready
        try:
            if is_ready:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.touch()
            else:
                self._file.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("cannot change the ready file %s: %s", self._file, error.strerror)
