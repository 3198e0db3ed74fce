"""Writes the events of a run to a file as they happen; a full disk never stops the run.

Events that cannot be written are kept in memory, so that the run's summary has all of them, also if
the file is deleted meanwhile. A run that goes on in its folder goes on in its file.
"""

import logging
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Protocol

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
    """

    def __init__(self, path: Path, sink: EventSink | None = None) -> None:
        self._path, self._sink = path, sink
        self._stream: FileIO | None = None
        self._size = 0  # bytes of the lines that are completely on disk
        self._in_memory: list[str] = []
        self._is_full = False
        self.last_t = 0.0  # the time of the last event
        try:
            self._stream = path.open("ab+", buffering=0)
            self._size = _whole_lines(self._stream)
            self._stream.truncate(self._size)  # a run that was killed may have left half a line
        except OSError as error:
            self._give_up(error.strerror or str(error))

    def add(self, timed: TimedEvent) -> None:
        """Write an event to the file and the sink; keep it in memory if the disk is full."""
        line = event_line(timed)
        self.last_t = timed.t
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
        if self._size:
            yield from self._lines_on_disk()
        yield from self._in_memory

    def _lines_on_disk(self) -> Iterator[str]:
        is_closed = self._stream is None or self._stream.closed
        with self._path.open("rb") if is_closed else self._again() as stream:
            stream.seek(0)
            left = self._size
            while left > 0 and (line := stream.readline()):
                left -= len(line)
                yield line.decode()

    def _again(self) -> BinaryIO:
        """Return the open file as a second stream: it may have no name any more."""
        assert self._stream is not None
        return os.fdopen(os.dup(self._stream.fileno()), "rb")

    def close(self) -> None:
        """Close the file and the sink; keep the lines in memory if the file was deleted."""
        if not self._path.exists():
            self._in_memory, self._size = list(self.lines()), 0
        if self._stream is not None:
            self._stream.close()
        if self._sink is not None:
            try:
                self._sink.close()
            except OSError as error:
                self._drop_sink(error)

    def _append(self, line: str) -> None:
        data = line.encode()
        assert self._stream is not None, "lines are kept in memory without a file"
        try:
            n_written = self._stream.write(data)
            if n_written == len(data):
                self._size += n_written
                return
            why = "No space left on device"
        except OSError as error:
            why = error.strerror or str(error)
        self._in_memory.append(line)
        self._give_up(why)

    def _give_up(self, why: str) -> None:
        self._is_full = True
        _log.error("cannot write to %s any more: %s; training goes on", self._path, why)

    def _drop_sink(self, error: OSError) -> None:
        name = type(self._sink).__name__
        self._sink = None
        _log.error(
            "cannot write to %s any more: %s; training goes on", name, error.strerror or error
        )


def _whole_lines(stream: FileIO) -> int:
    """Return how many bytes of a file belong to whole lines."""
    stream.seek(0)
    return stream.read().rfind(b"\n") + 1
