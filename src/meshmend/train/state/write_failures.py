"""What a worker cannot write: each is logged and reported once; training goes on."""

import logging

from meshmend.membership.events import WriteFailed
from meshmend.train.core.worker_environment import WorkerEnvironment, coordinator_client

_log = logging.getLogger(__name__)


class WriteFailures:
    """Remembers what could not be written, so that it is reported once."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self._environment = environment
        self._reported: set[str] = set()

    def report(self, what: str, why: str, *, step: int | None = None) -> None:
        """Log and report that something cannot be written, unless that was done already.

        What is missing of a certain step is always reported, but logged once.
        """
        is_new, chip = what not in self._reported, self._environment.chip
        self._reported.add(what)
        if is_new:
            _log.warning("chip %s cannot write %s: %s", chip, what, why)
        if self._environment.identity is not None and (is_new or step is not None):
            coordinator_client().report(WriteFailed(chip, what, why, step))

    def clear(self, what: str) -> None:
        """Note that something can be written again; its next failure is reported again."""
        self._reported.discard(what)

    def has(self, what: str) -> bool:
        """Return whether something cannot be written now."""
        return what in self._reported
