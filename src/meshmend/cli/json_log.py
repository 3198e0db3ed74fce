"""Structured logs: everything on standard error as one JSON object per line.

Log records and the notes of a command become objects with their level. All other text that this
process writes to `sys.stderr`, such as a traceback or what a training script prints, becomes one
object per line of text. What a child process, or code that is not Python, writes is not ours.
"""

import atexit
import io
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

_LONGEST_LINE: Final = 1 << 16
_STREAM: Final = "stderr"  # the logger of text that no logger wrote


class JsonLog(io.TextIOBase):
    """A stream in the place of `sys.stderr`; `job` and `chip` are in every object."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = ""
        self._lock = threading.RLock()
        self.job: str | None = None
        self.chip: tuple[int, ...] | None = None

    def record(self, level: str, logger: str, message: str, **more: Any) -> None:
        """Write one object; `more` replaces or adds fields."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields = {"time": now, "level": level, "logger": logger, "message": message}
        context: Mapping[str, Any] = {"chip": self.chip, "job": self.job}
        line = json.dumps({**fields, **context, **more}, default=str) + "\n"
        data = line.encode(errors="backslashreplace")
        with self._lock, suppress(OSError):  # whoever read standard error is gone
            while data:
                data = data[os.write(self._fd, data) :]

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._text = (self._text + text).replace("\r", "\n").split("\n")
            if len(self._text) > _LONGEST_LINE:
                lines, self._text = [*lines, self._text], ""
            for line in filter(str.strip, lines):
                self.record("info", _STREAM, line)
        return len(text)

    def finish(self) -> None:
        """Write what was not ended by a line break."""
        with self._lock:
            if self._text:
                self.write("\n")

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd


class _Handler(logging.Handler):
    def __init__(self, log: JsonLog) -> None:
        super().__init__()
        self._log = log
        self.setFormatter(logging.Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info and self.formatter is not None:
            message += "\n" + self.formatter.formatException(record.exc_info)
        self._log.record(record.levelname.lower(), record.name, message)


def start_json_log() -> None:
    """Write everything as JSON from now on; a second call does nothing."""
    if isinstance(sys.stderr, JsonLog):
        return
    log = JsonLog(sys.stderr.fileno())
    sys.stderr.flush()
    sys.stderr = log
    root = logging.getLogger()
    root.handlers[:] = [_Handler(log)]
    root.setLevel(logging.INFO)
    logging.captureWarnings(capture=True)
    atexit.register(finish_json_log)


def finish_json_log() -> None:
    """Write what was not ended by a line break; does nothing if logs are plain."""
    if isinstance(sys.stderr, JsonLog):
        sys.stderr.finish()


def set_log_context(*, job: str | None = None, chip: tuple[int, ...] | None = None) -> None:
    """Set the job and the chip of all objects to come; does nothing if logs are plain."""
    if isinstance(sys.stderr, JsonLog):
        sys.stderr.job, sys.stderr.chip = job, chip
