"""`meshmend run` in a process of its own, forked from this one, which has imported torch."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshmend.cli import main


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def meshmend_run(*arguments: str | Path, timeout_s: float = 90.0, **environment: str) -> Ended:
    """Run `meshmend run` with these arguments and return how it ended."""
    with started(*arguments, **environment) as (pid, folder):
        code = wait_for_end(pid, timeout_s)
        return Ended(code, (folder / "out").read_text(), (folder / "err").read_text())


@contextmanager
def started(*arguments: str | Path, **environment: str) -> Iterator[tuple[int, Path]]:
    """Start `meshmend run`; yield its process and the folder of its output, `out` and `err`."""
    _import_all()
    with tempfile.TemporaryDirectory() as folder:
        pid = os.fork()
        if pid == 0:
            _become_command(Path(folder), [str(part) for part in arguments], environment)
        yield pid, Path(folder)


def wait_for_end(pid: int, timeout_s: float) -> int:
    """Return a child's exit code, or minus the signal that killed it."""
    deadline = time.monotonic() + timeout_s
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"the command did not end in {timeout_s} s")
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(ended[1])


def _import_all() -> None:
    """Import what the command imports, so that it is done once for all tests."""
    import torch._dynamo.utils
    import torch.distributed.rpc  # noqa: F401

    import meshmend.launch.static_job  # noqa: F401


def _become_command(folder: Path, arguments: list[str], environment: dict[str, str]) -> None:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), fd)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # to the end
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.update(environment)
        code = main.run_line(["run", *arguments])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
