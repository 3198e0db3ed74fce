"""Writes the events of a run to a file as they happen; a full disk never stops the run.

Events that cannot be written are kept in memory until there is room again, so that file and summary
have all of them. The summary has them also if the file is deleted meanwhile. A run that goes on in
its folder goes on in its file.
"""

import errno
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

    When one of the two fails, that is logged once. The file is tried again with each event; nothing
    more is written to the sink.
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
            self._note_failure(error.strerror or str(error))
            if self._stream is not None:  # nobody knows where its last whole line ends
                self._stream.close()
                self._stream = None

    def add(self, timed: TimedEvent) -> None:
        """Write an event to the file and the sink; keep it in memory if the disk is full."""
        line = event_line(timed)
        self.last_t = timed.t
        self._in_memory.append(line)
        self._write_out()
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

    def _write_out(self) -> None:
        """Write the lines in memory to the file, oldest first, as far as there is room."""
        if self._stream is None:
            return
        n_written = 0
        try:
            if self._is_full:
                self._stream.truncate(self._size)  # the last line that was tried may be there half
            for line in self._in_memory:
                data = line.encode()
                if self._stream.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._size += len(data)
                n_written += 1
        except OSError as error:
            self._note_failure(error.strerror or str(error))
        else:
            if self._is_full:
                _log.warning("%s has all events again", self._path)
            self._is_full = False
        del self._in_memory[:n_written]

    def _note_failure(self, why: str) -> None:
        if not self._is_full:
            _log.error("cannot write to %s: %s; training goes on", self._path, why)
        self._is_full = True

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
