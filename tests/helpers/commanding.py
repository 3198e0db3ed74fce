"""Any `meshmend` command in a process forked from this one, which has imported torch."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from meshmend.cli import main


@dataclass
class Command:
    """A command under way; what it prints goes to files."""

    pid: int
    folder: Path
    name: str
    code: int | None = field(default=None)

    @property
    def out(self) -> str:
        return self._text("out")

    @property
    def err(self) -> str:
        return self._text("err")

    def signal(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def end(self, timeout_s: float = 60.0) -> int:
        """Return its exit code once it has ended, minus the signal that killed it."""
        deadline = time.monotonic() + timeout_s
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} did not end in {timeout_s} s: {self.err}")
            else:
                time.sleep(0.02)
        return self.code

    def _text(self, stream: str) -> str:
        path = self.folder / f"{self.name}.{stream}"
        return path.read_text() if path.exists() else ""


@contextmanager
def commands(folder: Path) -> Iterator[Callable[..., Command]]:
    """Yield what starts a command by a name of its own; none is left at the end."""
    import torch

    import meshmend.launch.elastic_script
    import meshmend.train.job  # noqa: F401

    torch.optim.SGD([torch.zeros(1)])  # imports torch's compiler, once for all
    began: list[Command] = []

    def start(name: str, *arguments: str | Path, **environment: str) -> Command:
        pid = os.fork()
        if pid == 0:
            _become(folder / name, [str(part) for part in arguments], environment)
        began.append(Command(pid, folder, name))
        return began[-1]

    try:
        yield start
    finally:
        for command in began:
            command.signal(signal.SIGKILL)
            command.end()


def until(is_so: Callable[[], bool], *, timeout_s: float = 60.0, why: Callable[[], str]) -> None:
    """Wait until something is so; fail with the reason if it does not come about."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)


def _become(path: Path, arguments: list[str], environment: dict[str, str]) -> None:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{path}.{kind}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), fd)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # to the end
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.update(environment)
        code = main.run_line(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
