"""What commands print: results on standard output, everything else on standard error.

With `--log-json`, everything on standard error is one JSON object per line (`JsonLog`). Log records
and the notes of a command become objects with their level. All other text that this process writes
to `sys.stderr`, such as a traceback or what a training script prints, becomes one object per line
of text. What a child process, or code that is not Python, writes is not ours.
"""

import atexit
import errno
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

from meshmend.errors import InputError
from meshmend.files import write_named

_LONGEST_LINE: Final = 1 << 16
_STREAM: Final = "stderr"  # the logger of text that no logger wrote

_SHOW_BAR_AFTER_S = 1.0
_LINE_EVERY_S = 30.0  # where there is no terminal
# How many loops a plan compiles on a new machine, measured.
_ABOUT_N_LOOPS = 90
_COMPILING = "compiling for the first use on this machine; this takes about half a minute ..."


def print_json(value: Any) -> None:
    """Print one JSON object on standard output."""
    json.dump(value, sys.stdout)
    sys.stdout.write("\n")


def note(line: str, *, message: str = "", level: str = "info", **fields: Any) -> None:
    """Print a line on standard error.

    With `--log-json` it is an object instead, with these fields; `message` replaces the line.
    """
    if isinstance(sys.stderr, JsonLog):
        text = message or line.removeprefix("meshmend: ").rstrip()
        sys.stderr.record(level, "meshmend", text, **fields)
    else:
        print(line, file=sys.stderr)


def write_text(path: Path, text: str) -> None:
    """Write a file, and make the folders above it; if that fails, an earlier file is kept.

    Raises:
        InputError: it cannot be written.
    """
    _make_folder(path)
    try:
        write_named(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def check_writable(*paths: Path | None) -> None:
    """Raise InputError if one of these files cannot be written.

    A command calls it before it starts long work. It makes folders that are missing.
    """
    for path in filter(None, paths):
        _make_folder(path)
        if path.is_dir():
            raise InputError(f"cannot write {path}: {os.strerror(errno.EISDIR)}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InputError(f"cannot write {path}: {os.strerror(errno.EACCES)}")


def check_suffix(path: Path | None, suffix: str, option: str = "-o") -> None:
    """Raise InputError if a file's name promises another kind of file than is written."""
    if path is not None and not path.is_dir() and path.suffix.lower() != suffix:
        raise InputError(
            f"{option} writes {suffix[1:].upper()}, so it needs a name such as "
            f"{path.with_suffix(suffix).name}, but got {path.name}"
        )


def _make_folder(path: Path) -> None:
    """Make the folders above a file, but none in the root folder: such a path is a mistake."""
    folder = path.absolute().parent
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    if missing and missing[-1].parent == Path(folder.anchor):
        raise InputError(f"cannot write {path}: there is no folder {missing[-1]}; make it first")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"cannot write {path}: {path.parent} is no folder") from None
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def check_readable(path: Path, what: str) -> None:
    """Raise InputError if a file does not exist, may not be read, or never ends, as a device."""
    try:
        if path.is_char_device():
            raise InputError(f"cannot read {what} {path}: it is a device, not a file")
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"cannot read {what} {path}: {error.strerror}") from None


def cache_dir() -> Path:
    """Return the folder in which this user's plans and answers are cached."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "meshmend"


class Bar:
    """A bar on standard error that shows the progress of work that takes more than a second.

    Call it with the current step and, if known, the share of all work that is done. It shows
    nothing in a quiet command. If standard error is not a terminal, it shows nothing or, with
    `or_line`, prints the step of that moment as one line, and again every half minute.
    """

    def __init__(self, *, quiet: bool, or_line: bool = False) -> None:
        self._step = "starting"
        self._part: float | None = None
        self._shown: Any = None
        self._closed = False
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        if not quiet and (or_line or sys.stderr.isatty()):
            self._show_after(_SHOW_BAR_AFTER_S)

    def __call__(self, step: str, part: float | None = None, /) -> None:
        with self._lock:
            self._step = step
            if part is not None:
                self._part = max(part, self._part or 0.0)
            self._draw()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the bar while results are printed."""
        with self._lock:
            if self._shown is not None:
                self._shown.stop()
            yield
            sys.stdout.flush()
            if self._shown is not None:
                self._shown.start()

    def close(self) -> None:
        """Remove the bar."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            if self._shown is not None:
                self._shown.stop()

    def _show_after(self, time_s: float) -> None:
        self._timer = threading.Timer(time_s, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        if not sys.stderr.isatty():
            with self._lock:
                if not self._closed:
                    part = f" {self._part:.0%}" if self._part else ""
                    note(f"meshmend: {self._step} ...{part}")
                    self._show_after(_LINE_EVERY_S)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        columns = (BarColumn(), TaskProgressColumn(), Elapsed(), TextColumn("{task.description}"))
        with self._lock:
            if self._closed:
                return
            self._shown = Progress(
                *columns,
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,  # results must reach the real standard output
                redirect_stderr=False,
            )
            self._shown.add_task(self._step, total=None)
            self._draw()
            self._shown.start()

    def _draw(self) -> None:
        if self._shown is not None:
            total = (
                None if self._part is None else 1.0
            )  # without a total the bar moves back and forth
            task = self._shown.task_ids[0]
            self._shown.update(task, description=self._step, total=total, completed=self._part)


@contextmanager
def progress(*, quiet: bool = False, or_line: bool = False) -> Iterator[Bar]:
    """Yield a bar that shows progress on a terminal; call it at each step.

    With `or_line`, work of more than a second prints a line now and then where there is none.
    """
    bar = Bar(quiet=quiet, or_line=or_line)
    _bars.append(bar)
    try:
        yield bar
    finally:
        _bars.remove(bar)
        bar.close()


_bars: list[Bar] = []  # those on the screen; there is at most one


def compile_for_workers(meanwhile: Callable[[], None] = lambda: None) -> None:
    """Compile what the workers of a job need, or wait for a process of this host that does.

    `meanwhile` is called during the wait, if there is one.
    """
    from meshmend.planning.compile_once import compile_once

    announce_compilation()
    began: list[float] = []

    def announce() -> None:
        began.append(time.monotonic())
        _tell_of_compiling()

    compile_once(announce, meanwhile)
    if began:
        note(f"meshmend: compiled in {time.monotonic() - began[0]:.0f} s")


@cache  # loops that others compile for this process, and those that it compiles, are told as one
def _tell_of_compiling() -> None:
    note(f"meshmend: {_COMPILING}")


@cache  # a second listener would start a second process
def announce_compilation(ahead: str = "meshmend.planning.warm_up") -> None:
    """Print a line, once in a process, when Numba compiles instead of loading its cache.

    A second process then runs the module `ahead`, which compiles what the command will need later.
    This function imports Numba, which is slow, so a command reads its options before it calls this.
    """
    import numba.core.event as event

    n_begun = 0

    class Announcer(event.Listener):
        def on_start(self, event: Any) -> None:
            nonlocal n_begun
            n_begun += 1
            if n_begun == 1:
                _tell_of_compiling()
                _compile_ahead(ahead)
            for bar in _bars:
                bar(f"compiling for the first use, loop {n_begun} of about {_ABOUT_N_LOOPS}")

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", Announcer())  # type: ignore[no-untyped-call]


def _compile_ahead(module: str) -> None:
    command = [sys.executable, "-m", module]
    helper = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(helper.kill)  # it must not outlive the command, even if unfinished


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
