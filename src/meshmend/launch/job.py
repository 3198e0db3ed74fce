"""Starts one worker per live chip, watches them, and ends them all when one fails.

The workers are forked from this process, which has imported torch and made the plans: sixteen
start in the time of one. Nothing here outlives the call: workers are killed with their process
groups, and by the kernel if this process is killed.
"""

import json
import os
import secrets
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import FrameType

from meshmend.errors import InputError
from meshmend.launch.lines import Lines
from meshmend.launch.worker import Pipes, Place, Script, work
from meshmend.topology.failures import Chip
from meshmend.torch.catalogue import prepare
from meshmend.torch.settings import Settings

_GRACE_S = 1.0  # for the cause of a failure to show itself, and for others to say their words
_TERMINATION_S = 3.0
_SIGNAL_BASE = 128

# What DistributedDataParallel imports when it is first used: seconds, which no worker should pay.
_PRELOAD = ("torch._dynamo.utils", "torch.distributed.rpc")


@dataclass(frozen=True)
class Job:
    """A script to run on every live chip of the settings' mesh.

    `enter(chip)` runs in each worker before anything else, and `address_of(chip)` names the
    address it listens on: so a testbed puts workers into its network. Modules of `preload` are
    imported once, before the workers are forked.
    """

    settings: Settings
    script: Script
    enter: Callable[[Chip], None] | None = None
    address_of: Callable[[Chip], str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()


@dataclass
class _Worker:
    """A worker as its parent sees it."""

    pid: int
    chip: Chip
    rank: int
    pidfd: int
    report_fd: int
    report: bytes = b""
    code: int | None = None
    ended: float = 0.0
    was_ended: bool = False  # by its parent, after the job was over

    @property
    def failed_at(self) -> float:
        """When it failed; deaths without a word count first, the others are their consequence."""
        told = json.loads(self.report)["time"] if self.report else self.ended
        return float(told) - (1e6 if self.code is not None and self.code > _SIGNAL_BASE else 0.0)


class _Terminated(BaseException):
    """This process was asked to end."""


def run_job(job: Job) -> int:
    """Run a script on every live chip of a mesh; return the exit code of the first to fail, or 0.

    A worker that a signal killed counts as 128 and the signal's number. Interrupted from the
    keyboard, all workers are ended first.

    Raises:
        InputError: the script is not there.
    """
    if not job.script.is_module and not Path(job.script.name).is_file():
        raise InputError(f"meshmend run needs a script, but there is no file {job.script.name}")
    for name in (*_PRELOAD, *job.preload):
        _import(name)
    mesh = job.settings.mesh
    prepare(mesh, job.settings.algorithm)
    if not job.settings.secret:
        job = replace(job, settings=replace(job.settings, secret=secrets.token_hex(32)))
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    with tempfile.TemporaryDirectory(prefix="meshmend-") as folder:
        watch = _Watch()
        try:
            for rank in range(mesh.n_live):
                watch.start(job, rank, Path(folder) / "store")
            watch.until_over()
        except _Terminated:
            return _SIGNAL_BASE + signal.SIGTERM
        finally:
            watch.end_all()
            signal.signal(signal.SIGTERM, before)
        return watch.verdict()


def _import(name: str) -> None:
    try:
        import_module(name)
    except ImportError as error:
        raise InputError(f"--preload needs a module, but cannot import {name}: {error}") from None


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise _Terminated


class _Watch:
    """The workers that were started, and everything that comes from them."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    def start(self, job: Job, rank: int, store: Path) -> None:
        """Fork the worker of one rank."""
        chip = job.settings.mesh.live[rank]
        place = Place(
            rank=rank,
            chip=chip,
            world_size=job.settings.mesh.n_live,
            store=store,
            enter=job.enter,
            environment=_environment(job, rank, chip),
        )
        (out, out_end), (err, err_end), (report, report_end) = (os.pipe() for _ in range(3))
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            work(job.script, place, Pipes(out_end, err_end, report_end), parent)
        for fd in (out_end, err_end, report_end):
            os.close(fd)
        worker = _Worker(pid, chip, rank, os.pidfd_open(pid), report)
        self._workers.append(worker)
        prefix = f"[{','.join(map(str, chip))}] "
        read = selectors.EVENT_READ
        self._selector.register(out, read, Lines(out, prefix, sys.stdout))
        self._selector.register(err, read, Lines(err, prefix, sys.stderr))
        self._selector.register(report, read, worker)
        self._selector.register(worker.pidfd, read, worker)

    def until_over(self) -> None:
        """Return when all workers have ended, or a while after the first has failed."""
        deadline = None
        while self._alive():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            self._handle(left)
            if deadline is None and any(worker.code for worker in self._workers):
                deadline = time.monotonic() + _GRACE_S

    def end_all(self) -> None:
        """End what still runs, gently at first, and print what is left in the pipes."""
        for number, patience_s in ((signal.SIGTERM, _TERMINATION_S), (signal.SIGKILL, None)):
            for worker in self._alive():
                worker.was_ended = True
                _kill_group(worker.pid, number)
            deadline = None if patience_s is None else time.monotonic() + patience_s
            while self._alive():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._handle(left)
        while self._handle(0.0):
            pass
        for key in list(self._selector.get_map().values()):
            self._forget(key.fd)
        self._selector.close()

    def verdict(self) -> int:
        """Report the first failure on standard error; return its exit code, or 0."""
        failed = [worker for worker in self._workers if worker.code and not worker.was_ended]
        if not failed:
            return 0
        first = min(failed, key=lambda worker: worker.failed_at)
        code = first.code or 1
        how = f"exit code {code}"
        if code > _SIGNAL_BASE:
            how = f"killed by {signal.Signals(code - _SIGNAL_BASE).name}"
        print(
            f"meshmend: chip {first.chip} (rank {first.rank}) failed first: {how}", file=sys.stderr
        )
        if first.report:
            print(json.loads(first.report)["traceback"], file=sys.stderr, end="")
        return code

    def _alive(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.code is None]

    def _handle(self, timeout_s: float | None) -> bool:
        """Handle what is there; return whether there was anything."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if isinstance(key.data, Lines):
                if not key.data.read():
                    self._forget(key.fd)
            elif key.fd == key.data.report_fd:
                data = os.read(key.fd, 1 << 16)
                key.data.report += data
                if not data:
                    self._forget(key.fd)
            else:
                self._reap(key.data)
        return bool(ready)

    def _reap(self, worker: _Worker) -> None:
        _, status = os.waitpid(worker.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        worker.code = code if code >= 0 else _SIGNAL_BASE - code
        worker.ended = time.monotonic()
        _kill_group(worker.pid, signal.SIGKILL)  # what the script may have left behind
        self._forget(worker.pidfd)

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)


def _environment(job: Job, rank: int, chip: Chip) -> dict[str, str]:
    """Return what torchrun would set, and what the backend reads."""
    settings = job.settings
    if job.address_of is not None:
        settings = replace(settings, bind=job.address_of(chip))
    world_size = str(settings.mesh.n_live)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "MESHMEND_CHIP": ",".join(map(str, chip)),
        **settings.environment(),
        **job.environment,
    }


def _kill_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return
