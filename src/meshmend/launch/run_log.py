"""The events of a run, written down as they come; a full disk never stops the run.

What cannot be written any more is kept in memory, so that the run's summary is whole.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from meshmend.membership.events import TimedEvent, event_line

_log = logging.getLogger(__name__)


class EventSink(Protocol):
    """Something else that takes events down, such as TensorBoard's files."""

    def add(self, timed: TimedEvent) -> None:
        """Take an event down."""

    def close(self) -> None:
        """Take no more."""


class RunLog:
    """Writes events to a file and to one more sink.

    Each that fails is named once, on the log, and is left alone from then on.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, sink: EventSink | None = None) -> None:
        self._path, self._sink = path, sink
        self._size = 0  # of the lines that are on disk whole
        self._stream = path.open("wb", buffering=0)
        self._kept: list[str] = []
        self._is_full = False

    def add(self, timed: TimedEvent) -> None:
        """Write an event down, if it can be."""
        line = event_line(timed)
        if self._is_full:
            self._kept.append(line)
        else:
            self._append(line)
        if self._sink is not None:
            try:
                self._sink.add(timed)
            except OSError as error:
                self._drop_sink(error)

    def lines(self) -> Iterator[str]:
        """Yield the lines of all events, whether they are on disk or not."""
        left = self._size
        with self._path.open("rb") as stream:
            while left > 0:
                line = stream.readline()
                left -= len(line)
                yield line.decode()
        yield from self._kept

    def close(self) -> None:
        """Write no more."""
        self._stream.close()
        if self._sink is not None:
            try:
                self._sink.close()
            except OSError as error:
                self._drop_sink(error)

    def _append(self, line: str) -> None:
        data = line.encode()
        try:
            n_written = self._stream.write(data)
            if n_written == len(data):
                self._size += n_written
                return
            why = "No space left on device"
        except OSError as error:
            why = error.strerror or str(error)
        self._is_full = True
        self._kept.append(line)
        _log.error("%s ends here: %s; training goes on", self._path, why)

    def _drop_sink(self, error: OSError) -> None:
        name = type(self._sink).__name__
        self._sink = None
        _log.error("%s ends here: %s; training goes on", name, error.strerror or error)


@contextmanager
def run_log(path: Path, sink: EventSink | None = None) -> Iterator[RunLog]:
    """Yield a log that is closed afterwards."""
    log = RunLog(path, sink)
    try:
        yield log
    finally:
        log.close()
