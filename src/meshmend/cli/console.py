"""What commands print: results on standard output, everything else on standard error."""

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshmend.errors import InputError

_COMPILING = "compiling for the first use on this machine; this takes some seconds, once ..."


def print_json(value: Any) -> None:
    """Print one JSON object on standard output."""
    json.dump(value, sys.stdout)
    sys.stdout.write("\n")


def note(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr)


def write_text(path: Path, text: str) -> None:
    """Write a file, or say in one line why not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def cache_dir() -> Path:
    """Return the folder of this user in which answers are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "meshmend"


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show which step is under way on a terminal; the caller names each step as it begins."""
    if quiet or not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda step: status.update(step)


def announce_compilation() -> None:
    """Say on standard error, once, when Numba compiles instead of loading its cache.

    A second process then compiles ahead what the command will need later.
    """
    import numba.core.event as event

    said: list[bool] = []

    class Announcer(event.Listener):
        def on_start(self, event: Any) -> None:
            if not said:
                said.append(True)
                note(f"meshmend: {_COMPILING}")
                _compile_ahead()

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", Announcer())  # type: ignore[no-untyped-call]


def _compile_ahead() -> None:
    command = [sys.executable, "-m", "meshmend.planning.warm_up"]
    helper = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(helper.kill)  # done or not, it does not outlive the command
