"""A command that serves a page until the end of a block. The benchmarks use it too: no pytest."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from waiting import HANG_S, until


@dataclass(frozen=True)
class ServedPage:
    """The address of a page, and the process of the command that serves it."""

    address: str
    pid: int


@contextmanager
def served_page(
    *command: str, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[ServedPage]:
    """Yield the page of a `meshmend` command once its address is printed; then end the command."""
    lines: list[str] = []
    process = subprocess.Popen(
        [sys.executable, "-m", "meshmend", *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()

    def addresses() -> list[str]:
        assert process.poll() is None, "".join(lines)
        return [line.split()[-1] for line in lines if "http://127.0.0.1" in line]

    try:
        until(addresses, why=lambda: "".join(lines))
        yield ServedPage(addresses()[0], process.pid)
    finally:
        process.terminate()  # SIGINT is ignored where tests run in the background
        process.wait(timeout=HANG_S)
        reader.join(HANG_S)
        assert process.stdout is not None
        process.stdout.close()
