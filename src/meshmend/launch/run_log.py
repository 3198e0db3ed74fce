"""Writes the events of a run to a file as they happen; a full disk never stops the run.

Events that cannot be written are kept in memory, so that the run's summary has all of them.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from meshmend.membership.events import TimedEvent, event_line

_log = logging.getLogger(__name__)


class EventSink(Protocol):
    """A second place that records events, such as TensorBoard's files."""

    def add(self, timed: TimedEvent) -> None:
        """Record an event."""

    def close(self) -> None:
        """Finish writing; no event may be added afterwards."""


class RunLog:
    """Writes events to a file and to a second sink.

    When one of the two fails, that is logged once, and nothing more is written to it.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, sink: EventSink | None = None) -> None:
        self._path, self._sink = path, sink
        self._size = 0  # bytes of the lines that are completely on disk
        self._stream = path.open("wb", buffering=0)
        self._in_memory: list[str] = []
        self._is_full = False

    def add(self, timed: TimedEvent) -> None:
        """Write an event to the file and the sink; keep it in memory if the disk is full."""
        line = event_line(timed)
        if self._is_full:
            self._in_memory.append(line)
        else:
            self._append(line)
        if self._sink is not None:
            try:
                self._sink.add(timed)
            except OSError as error:
                self._drop_sink(error)

    def lines(self) -> Iterator[str]:
        """Yield the lines of all events: those on disk, then those in memory."""
        left = self._size
        with self._path.open("rb") as stream:
            while left > 0:
                line = stream.readline()
                left -= len(line)
                yield line.decode()
        yield from self._in_memory

    def close(self) -> None:
        """Close the file and the sink."""
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
        self._in_memory.append(line)
        _log.error("cannot write to %s any more: %s; training goes on", self._path, why)

    def _drop_sink(self, error: OSError) -> None:
        name = type(self._sink).__name__
        self._sink = None
        _log.error(
            "cannot write to %s any more: %s; training goes on", name, error.strerror or error
        )


@contextmanager
def run_log(path: Path, sink: EventSink | None = None) -> Iterator[RunLog]:
    """Yield a `RunLog`, and close it at the end of the block."""
    log = RunLog(path, sink)
    try:
        yield log
    finally:
        log.close()
