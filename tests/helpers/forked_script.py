"""Runs scripts in forks of a process that has imported torch, which takes longer than most jobs.

    python forked_script.py PID ADDRESS torch ...

is that process. It listens on a Unix socket with this abstract address, forks for each caller that
sends what to run, as one line of JSON, and answers with the exit status. It ends with the process
PID. All processes of a test run share it; the first that needs it starts it. It does nothing else:
forks need a quiet parent.
"""

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

from meshmend.planning.catalogue import prepare
from meshmend.planning.settings import Settings
from meshmend.processes import die_with_parent, without_garbage
from meshmend.topology.mesh import Mesh
from waiting import HANG_S, until

# Every optimizer imports the first of them when it is made.
TORCH = (
    "torch._dynamo",
    "meshmend.launch.elastic",
    "meshmend.train.torch.job",
    "meshmend.train.torch.elastic_group",
    "meshmend.torch.group_factory",
)
# Of the packages that a test may take away, these import none.
COMMAND_LINE = (
    "meshmend.cli.main",
    "meshmend.cli.plan",
    "meshmend.cli.simulate",
    "meshmend.cli.show",
)
JAX = (*TORCH, "optax", "meshmend.train.jax.job")


@dataclass(frozen=True)
class _Request:
    """A script with its arguments, where it runs, and the files that get what it prints."""

    line: list[str]
    environment: dict[str, str]
    cwd: str
    out: str
    err: str


def run_forked(
    script: str, *arguments: str, imported: tuple[str, ...] = TORCH
) -> subprocess.CompletedProcess[str]:
    """Return how a script ended and what it printed, as `subprocess.run` does.

    It runs in a fork of a process that has imported some modules, by default torch.
    """
    line = [script, *arguments]
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = _Request(line, dict(os.environ), str(Path.cwd()), str(out), str(err))
        code = int(_asked(imported, json.dumps(asdict(request))))
        return subprocess.CompletedProcess(line, code, out.read_text(), err.read_text())


def run_program(
    text: str, imported: tuple[str, ...] = COMMAND_LINE
) -> subprocess.CompletedProcess[str]:
    """Return how a program ended and what it printed, as `run_forked` does."""
    with TemporaryDirectory() as folder:
        script = Path(folder, "program.py")
        script.write_text(text)
        return run_forked(str(script), imported=imported)


_started: list[subprocess.Popen[bytes]] = []


def _asked(imported: tuple[str, ...], request: str) -> str:
    """Return what a process that has imported all of these answers; start one if there is none.

    One that has imported torch makes those that shall import more.
    """
    runner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    address = f"meshmend-tests-{runner}-{crc32(repr(imported).encode())}"
    caller = socket.socket(socket.AF_UNIX)
    with caller, caller.makefile("rw") as line:
        if not _is_reached(caller, address):
            if imported[: len(TORCH)] == TORCH != imported:
                _asked(TORCH, json.dumps([address, *imported[len(TORCH) :]]))
            else:
                command = [sys.executable, __file__, str(runner), address, *imported]
                null = subprocess.DEVNULL
                _started.append(subprocess.Popen(command, stdin=null, stdout=null))
            until(lambda: _is_reached(caller, address))
        print(request, file=line, flush=True)
        return line.readline()


def _is_reached(caller: socket.socket, address: str) -> bool:
    with suppress(ConnectionRefusedError):
        caller.connect(f"\0{address}")
        return True
    return False


def _serve(runner: int, address: str, imported: list[str]) -> _Request:
    """Fork for each caller; return the request in the fork. Another may have been faster."""
    listener, its_end = socket.socket(socket.AF_UNIX), os.pidfd_open(runner)
    try:
        listener.bind(f"\0{address}")
    except OSError:
        os._exit(0)
    listener.listen(64)
    _load(imported)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    server = os.getpid()
    while its_end not in select.select([listener.fileno(), its_end], [], [])[0]:
        caller, _ = listener.accept()
        with caller:
            if os.fork() == 0:
                listener.close()
                return _answer(caller, runner, server)
    os._exit(0)


def _answer(caller: socket.socket, runner: int, server: int) -> _Request:
    """Serve with more imported, or wait for a script; return the request in the fork for that."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with caller.makefile("rw") as line:
        asked = json.loads(line.readline())
        if isinstance(asked, list):
            print(0, file=line, flush=True)
            return _serve(runner, asked[0], asked[1:])
        die_with_parent(server)
        waiting = os.getpid()
        if (pid := os.fork()) == 0:
            die_with_parent(waiting)
            return _Request(**asked)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=line, flush=True)
        os._exit(0)


def _run(request: _Request) -> None:
    """Run a script as in a process that was started for it alone, and end; never return.

    What was imported is not freed one object after another: that takes longer than most scripts.
    """
    signal.alarm(int(HANG_S))
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in ((1, request.out), (2, request.err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = request.line
    sys.path[0] = str(Path(request.line[0]).parent)
    code = 1
    try:
        runpy.run_path(request.line[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@without_garbage()
def _load(names: list[str]) -> None:
    """Import modules and load compiled loops, as `meshmend run` does."""
    for name in names:
        import_module(name)
    mesh = Mesh((2, 2))
    prepare(mesh, Settings(mesh).planned_algorithm)


if __name__ == "__main__":
    _run(_serve(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
