"""Any `meshmend` command in a process forked from this one, which has imported torch."""

import faulthandler
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from meshmend.cli import main
from meshmend.launch.worker import end_openmp_threads
from meshmend.planning.plan import plan
from meshmend.processes import without_garbage
from meshmend.topology.mesh import Mesh
from meshmend.transport.event_loop import load_event_loop
from planners import make_no_plans_ahead
from process_tree import with_descendants
from waiting import until

_PRINT_STACKS = signal.SIGRTMAX - 1  # a command and its workers then print what they do


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


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

    @property
    def has_ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def signal(self, number: int) -> None:
        if not self.has_ended:
            os.kill(self.pid, number)

    def end(self) -> int:
        """Return its exit code once it has ended, minus the signal that killed it."""
        until(lambda: self.has_ended, why=self._what_it_does)
        assert self.code is not None
        return self.code

    def _what_it_does(self) -> str:
        """Return all that it has printed, and the stacks of its processes at last."""
        for pid in with_descendants(self.pid):
            os.kill(pid, _PRINT_STACKS)
            time.sleep(0.5)  # one stack after another
        return f"{self.name} did not end: {self.out}\n{self.err}"

    def _text(self, stream: str) -> str:
        path = self.folder / f"{self.name}.{stream}"
        return path.read_text() if path.exists() else ""


@contextmanager
def commands(folder: Path, *, plan_ahead: bool = False) -> Iterator[Callable[..., Command]]:
    """Yield what starts a command by a name of its own; none is left at the end.

    Only with `plan_ahead` do jobs plan for what may fail next.
    """
    _import_all()
    began: list[Command] = []

    def start(name: str, *arguments: str | Path, **environment: str) -> Command:
        end_openmp_threads()  # a test may have computed in several threads
        pid = os.fork()
        if pid == 0:
            if not plan_ahead:
                make_no_plans_ahead()
            _become(folder / name, [str(part) for part in arguments], environment)
        began.append(Command(pid, folder, name))
        return began[-1]

    try:
        yield start
    finally:
        for command in began:
            command.signal(signal.SIGKILL)
            command.end()


def meshmend_run(*arguments: str | Path, **environment: str) -> Ended:
    """Run `meshmend run` with these arguments and return how it ended."""
    with tempfile.TemporaryDirectory() as folder, commands(Path(folder)) as start:
        ran = start("run", "run", *arguments, **environment)
        return Ended(ran.end(), ran.out, ran.err)


@cache
@without_garbage()
def _import_all() -> None:
    """Import what commands import and load what they compute with: once, not in each of them."""
    import torch
    import torch._dynamo.utils
    import torch.distributed.rpc

    import meshmend.launch.script
    import meshmend.torch.group_factory
    import meshmend.train.torch.job  # noqa: F401

    torch.optim.SGD([torch.zeros(1)])  # imports torch's compiler
    load_event_loop()
    plan(Mesh((2, 2)))


@cache
@without_garbage()
def import_sharding() -> None:
    """Import what sharded models need, which would take a second in each worker that has one."""
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401


def _become(path: Path, arguments: list[str], environment: dict[str, str]) -> None:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{path}.{kind}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), fd)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # to the end
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        logging.getLogger().handlers.clear()  # pytest's, which would keep what is logged here
        faulthandler.register(_PRINT_STACKS, file=2)
        os.environ.update(environment)
        code = main.run_line(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
