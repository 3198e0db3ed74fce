"""Runs scripts in forks of a process that has imported torch, which takes longer than most jobs.

    python forked_script.py torch ...

is that process. It reads what to run from standard input, one JSON object a line, and prints each
exit status. It is started at first use and does nothing else: forks need a quiet parent.
"""

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from meshmend.planning.catalogue import prepare
from meshmend.planning.settings import Settings
from meshmend.processes import die_with_parent, without_garbage
from meshmend.topology.mesh import Mesh
from waiting import HANG_S

# Every optimizer imports the first of them when it is made.
TORCH = (
    "torch._dynamo",
    "meshmend.launch.elastic",
    "meshmend.train.torch.job",
    "meshmend.train.torch.elastic_group",
    "meshmend.torch.group_factory",
)
JAX = ("torch", "optax", "meshmend.launch.elastic", "meshmend.train.jax.job")


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
    line, parent = [script, *arguments], _parent(imported)
    assert parent.stdin is not None
    assert parent.stdout is not None
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = _Request(line, dict(os.environ), str(Path.cwd()), str(out), str(err))
        print(json.dumps(asdict(request)), file=parent.stdin, flush=True)
        code = int(parent.stdout.readline())
        return subprocess.CompletedProcess(line, code, out.read_text(), err.read_text())


_parents: dict[tuple[str, ...], subprocess.Popen[str]] = {}


def _parent(imported: tuple[str, ...]) -> subprocess.Popen[str]:
    """Return a process that forks and has imported all of these; start one if there is none.

    It ends with its standard input, or when this process dies.
    """
    for others, parent in _parents.items():
        if set(imported) <= set(others):
            return parent
    _parents[imported] = subprocess.Popen(
        [sys.executable, __file__, *imported],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return _parents[imported]


def _serve() -> _Request | None:
    """Fork for each request; return the request in the fork, and None at the end of all."""
    parent = os.getpid()
    for text in sys.stdin:
        request = _Request(**json.loads(text))
        if (pid := os.fork()) == 0:
            die_with_parent(parent)
            return request
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return None


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
    die_with_parent(os.getppid())
    _load(sys.argv[1:])
    if (request := _serve()) is not None:
        _run(request)
