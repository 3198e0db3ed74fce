"""The supervisor of a launcher: starts processes, prints their output, restarts and ends them.

A launcher says what is to run: `fork` starts a function of this program, `spawn` a command, and
`keep` a `ProcessSpec`, which is started again when it dies. `serve` forwards what the processes
print and notes how each of them ended; `restart_due` starts again what has died, and kills what
hangs. What an end means is for the launcher to say (`ProcessSpec.judge`).

No forked process outlives this one: it is killed with its process group, and by the kernel if this
process is killed. A command is ended by `end_all` alone: srun, for one, passes signals on itself.

Two things beside it start processes, too. The workers of `meshmend bench` answer questions over a
socket, and are neither restarted nor listened to: `lab` knows no launcher. The hosts of a Ray job
are actors, no children of any process here: Ray starts them, restarts them, and shows their output
(`ray_hosts`).
"""

import gc
import json
import math
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from signal import Signals
from typing import IO, Final

from meshmend.launch.termination import unhurried
from meshmend.launch.worker import Pipes, Place, end_openmp_threads, work
from meshmend.processes import allow_open_files
from meshmend.topology.failures import format_chip
from meshmend.transport.pacing import Backoff

SIGNAL_BASE: Final = 128

_FILES_PER_PROCESS: Final = 4  # three pipes and a handle
_TERMINATION_S: Final = 3.0  # from SIGTERM to SIGKILL
_RAN_LONG_S: Final = 30.0  # a process that has run for so long was all right
_READ_BYTES: Final = 1 << 16  # what a pipe holds
_MOST_LAST_READS: Final = 16  # what a pipe holds that a process has made as large as it can
_LONGEST_LINE: Final = 1 << 16
_ASK_AFTER_S: Final = 10.0  # from its start
_ASK_EVERY_S: Final = 2.0
_MOST_UNANSWERED: Final = 3  # in a row


def say(line: str) -> None:
    """Print a line of meshmend itself on standard error."""
    sys.stderr.write(f"meshmend: {line}\n")  # in one piece: several threads print
    sys.stderr.flush()


@dataclass
class Child:
    """A child process as its parent sees it.

    `code` is its exit code, or 128 plus the number of the signal that killed it. `report` is the
    JSON that a forked worker sends before it exits with an exception. `probe(now)` returns in words
    that it hangs; the supervisor asks only processes that it keeps.
    """

    pid: int
    pidfd: int
    wait: Callable[[], int]  # as of `subprocess.Popen`
    has_group: bool = True  # of its own
    probe: Callable[[float], str] = lambda now: ""
    report: bytes = b""
    code: int | None = None
    ended: float = 0.0
    is_end_expected: bool = False  # the parent ended it, or injected the fault that did
    pipes: dict[int, Callable[[], None]] = field(default_factory=dict)  # that are still read

    @property
    def killed_by(self) -> Signals | None:
        """The signal that killed it, also if it says so by its exit code, as shells do."""
        with suppress(ValueError):
            return Signals((self.code or 0) - SIGNAL_BASE)
        return None

    @property
    def failed_at(self) -> float:
        """The time of its failure, for sorting: processes that a signal killed come first.

        Such a process is the cause; the others fail because they have lost it.
        """
        time_s = json.loads(self.report)["time"] if self.report else self.ended
        return float(time_s) - (1e6 if self.killed_by else 0.0)

    @property
    def how_it_ended(self) -> str:
        """The signal or the exit code that it ended with, in words."""
        by = self.killed_by
        return f"killed by {by.name}" if by is not None else f"exit code {self.code}"

    @property
    def traceback(self) -> str:
        """The text of the exception that ended it; empty if there was none."""
        return str(json.loads(self.report)["traceback"]) if self.report else ""

    def signal(self, number: int) -> None:
        """Send a signal to the process, or to its group if it has one, if it still runs."""
        if self.code is None:
            with suppress(ProcessLookupError):
                (os.killpg if self.has_group else os.kill)(self.pid, number)


class LogPump:
    """Copies the output of a process from a pipe to a stream, line by line, after a prefix.

    Lines for which `take` returns True are not printed.
    """

    def __init__(
        self,
        fd: int,
        target: IO[str],
        prefix: str = "",
        take: Callable[[bytes], bool] = lambda line: False,
    ) -> None:
        self._fd = fd
        self._target = target
        self._prefix = prefix
        self._take = take
        self._rest = b""

    def read(self) -> bool:
        """Read the pipe once and print the whole lines; return False at the end of the pipe."""
        data = os.read(self._fd, _READ_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines, self._rest = [*lines, self._rest], b""
        printed = [line for line in lines if not self._take(line)]
        for line in printed:
            self._target.write(f"{self._prefix}{line.decode(errors='replace')}\n")
        if printed:
            self._target.flush()
        return bool(data)


class HangProbe:
    """Notices a process that lives but does not answer: three questions in a row.

    `is_answered()` asks it once.
    """

    def __init__(self, is_answered: Callable[[], bool], now: float) -> None:
        self._is_answered = is_answered
        self._ask_at = now + _ASK_AFTER_S
        self._n_unanswered = 0

    def __call__(self, now: float) -> str:
        """Ask the process, if that is due; return in words that it hangs, or an empty text."""
        if now >= self._ask_at:
            self._ask_at = now + _ASK_EVERY_S
            self._n_unanswered = 0 if self._is_answered() else self._n_unanswered + 1
        return "does not answer, and is killed" if self._n_unanswered >= _MOST_UNANSWERED else ""


class Ending(Enum):
    """What the end of a process means for the next one."""

    DONE = auto()  # there is none
    KILLED = auto()  # from outside: it is started again, and has not failed
    FAILED = auto()  # it is started again, later after each failure in a row
    GAVE_UP = auto()  # the next one would fail, too


@dataclass(frozen=True)
class RestartPolicy:
    """How long after its end a process is started again, and after how many failures in a row not.

    The waits double from `first_s` to `longest_s`, and are short again once a process has run for
    half a minute. A process that gave up is started again after `gave_up_s`. Without it, neither
    that nor a process that failed `most_failures` times in a row is started again.
    """

    first_s: float
    longest_s: float
    most_failures: float = math.inf
    gave_up_s: float | None = None


@dataclass(frozen=True)
class ProcessSpec:
    """A process to keep running: `start` starts it, and `judge` says what its end means.

    `clean_up` ends what may be left of it when it had to be killed. `tell` prints the lines about
    its ends.
    """

    name: str
    start: Callable[[], Child]
    judge: Callable[[Child], Ending]
    policy: RestartPolicy
    clean_up: Callable[[], None] = lambda: None
    tell: Callable[[str], None] = say


class KeptProcess:
    """A process that is kept running: the latest one, and when the next one starts."""

    def __init__(self, spec: ProcessSpec, number: int) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.is_done = False  # it has ended as it should
        self.n_failures: float = 0  # in a row
        self.start_at: float | None = 0.0  # None if it runs, or is not started again
        policy = spec.policy
        self._backoff = Backoff(number, first_s=policy.first_s, longest_s=policy.longest_s)
        self._started = 0.0
        self._is_judged = False
        self._is_hanging = False

    @property
    def is_running(self) -> bool:
        """Whether it runs now."""
        return self.child is not None and self.child.code is None

    @property
    def has_given_up(self) -> bool:
        """Whether it has failed too often in a row, or said that a restart does not help."""
        return self.n_failures >= self.spec.policy.most_failures

    def handle(self, now: float) -> None:
        """Start the process if that is due, judge one that has ended, and kill one that hangs."""
        if self.start_at is not None and now >= self.start_at:
            self.start_at, self._started = None, now
            self._is_judged = self._is_hanging = False
            self.child = self.spec.start()
        elif self.child is None or self._is_judged:
            return
        elif self.child.code is not None:
            self._is_judged = True
            self._plan_restart(self.child)
        elif not self._is_hanging and (words := self.child.probe(now)):
            self._is_hanging = True
            self.spec.tell(f"{self.spec.name} {words}")
            self.child.signal(signal.SIGKILL)  # a stopped process acts on no other signal

    def _plan_restart(self, process: Child) -> None:
        spec, policy = self.spec, self.spec.policy
        if self._is_hanging:
            spec.clean_up()
        ending = spec.judge(process)
        if ending is Ending.DONE:
            self.is_done = True
            return
        if process.ended - self._started > _RAN_LONG_S:
            self._backoff.reset()
            self.n_failures = 0
        if ending is Ending.KILLED:
            self.n_failures = 0
        else:
            self.n_failures += policy.most_failures if ending is Ending.GAVE_UP else 1
        if self.has_given_up and policy.gave_up_s is None:
            return
        wait_s = policy.gave_up_s if ending is Ending.GAVE_UP else None
        wait_s = self._backoff.wait_s() if wait_s is None else wait_s
        self.start_at = time.monotonic() + wait_s
        how = process.how_it_ended
        spec.tell(f"{spec.name} ended: {how}; it is started again in {wait_s:.1f} s")


class Supervisor:
    """All child processes of a launcher, and the loop that serves their pipes and their ends."""

    def __init__(self) -> None:
        self._processes: list[Child] = []
        self._kept: list[KeptProcess] = []
        self._selector = selectors.DefaultSelector()

    def fork(self, prefix: str, body: Callable[[Pipes, int], None]) -> Child:
        """Fork a process that runs `body(pipes, parent)`, which must not return.

        It makes itself a process group of its own. What it prints gets the prefix.
        """
        (out, out_end), (err, err_end), (report, report_end) = (os.pipe() for _ in range(3))
        sys.stdout.flush()
        sys.stderr.flush()
        # The garbage collector ignores all objects that exist now. Otherwise each child's collector
        # would walk through all imported modules, which took a tenth of a small step, and would
        # copy their memory pages. `end_all` undoes it for this process.
        gc.freeze()
        end_openmp_threads()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for key in self._selector.get_map().values():  # the pipes of other processes
                with suppress(OSError):  # connections are closed by the fork already
                    os.close(key.fd)
            body(Pipes(out_end, err_end, report_end), parent)
        with suppress(OSError):  # it has done so itself; until then no signal would reach it
            os.setpgid(pid, pid)
        for fd in (out_end, err_end, report_end):
            os.close(fd)
        process = self._add(Child(pid, os.pidfd_open(pid), lambda: _wait_for(pid)))

        def read_report() -> bool:
            part = os.read(report, _READ_BYTES)
            process.report += part
            return bool(part)

        self._read(process, out, LogPump(out, sys.stdout, prefix).read)
        self._read(process, err, LogPump(err, sys.stderr, prefix).read)
        self._read(process, report, read_report)
        return process

    def fork_worker(self, body: Callable[[], int], place: Place, name: str = "") -> Child:
        """Fork a process that runs `body()` in a place; what it prints is after name or chip."""
        return self.fork(
            f"[{name or format_chip(place.chip)}] ",
            lambda pipes, parent: work(body, place, pipes, parent),
        )

    def spawn(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        take: Callable[[bytes], bool] | None = None,
        has_group: bool = False,
    ) -> Child:
        """Start a command, which prints where this process prints.

        With `take`, its standard output comes through a pipe: see `LogPump`. With `has_group` it
        has a process group of its own.
        """
        popen = subprocess.Popen(
            command,
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=None if take is None else subprocess.PIPE,
            process_group=0 if has_group else None,
        )
        pidfd = os.pidfd_open(popen.pid)
        process = self._add(Child(popen.pid, pidfd, popen.wait, has_group=has_group))
        if take is not None:
            assert popen.stdout is not None
            out = os.dup(popen.stdout.fileno())
            popen.stdout.close()
            self._read(process, out, LogPump(out, sys.stdout, take=take).read)
        return process

    def keep(self, spec: ProcessSpec) -> KeptProcess:
        """Keep a process running; the next `restart_due` starts it."""
        kept = KeptProcess(spec, len(self._kept))
        self._kept.append(kept)
        return kept

    def watch(self, fd: int, action: Callable[[], None]) -> None:
        """Call an action whenever a file descriptor can be read."""
        self._selector.register(fd, selectors.EVENT_READ, action)

    def unwatch(self, fd: int) -> None:
        """Undo `watch` for a file descriptor."""
        self._selector.unregister(fd)

    def alive(self) -> list[Child]:
        """Return the processes that still run."""
        return [process for process in self._processes if process.code is None]

    def failed(self) -> list[Child]:
        """Return the processes that failed unexpectedly, sorted by `failed_at`."""
        failed = [each for each in self._processes if each.code and not each.is_end_expected]
        return sorted(failed, key=lambda process: process.failed_at)

    def serve(self, timeout_s: float | None) -> bool:
        """Wait for output, reports and ends of processes; return whether any came.

        A timeout of None waits for ever.
        """
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if self._selector.get_map().get(key.fd) is key:  # no earlier one has closed it
                key.data()
        return bool(ready)

    def restart_due(self) -> None:
        """Start the kept processes that are due, judge those that ended, kill those that hang."""
        for kept in self._kept:
            kept.handle(time.monotonic())

    def end_all(self, termination_s: float = _TERMINATION_S) -> None:
        """End all processes, by SIGTERM and then by SIGKILL, and print what they printed last."""
        with unhurried():
            self._end_all(termination_s)
        # Or nothing that is part of a cycle would be freed at the end of this process, and
        # libraries that count their objects then would print hundreds of them.
        gc.unfreeze()

    def _end_all(self, termination_s: float) -> None:
        self._signal_alive(signal.SIGCONT)  # a stopped process does not act on SIGTERM
        self._signal_alive(signal.SIGTERM)
        deadline = time.monotonic() + termination_s
        while self.alive() and (left := deadline - time.monotonic()) > 0:
            self.serve(left)
        killed = {process.pid for process in self.alive()}
        self._signal_alive(signal.SIGKILL)
        while self.alive():
            self.serve(None)
        for kept in self._kept:
            if kept.child is not None and kept.child.pid in killed:
                kept.spec.clean_up()
        while self.serve(0.0):
            pass
        for key in list(self._selector.get_map().values()):
            self._close(key.fd)
        self._selector.close()

    def _signal_alive(self, number: int) -> None:
        for process in self.alive():
            process.is_end_expected = True
            process.signal(number)

    def _add(self, process: Child) -> Child:
        self._processes.append(process)
        self.watch(process.pidfd, lambda: self._reap(process))
        n = len(self._processes)
        allow_open_files(
            _FILES_PER_PROCESS * n, f"a launcher that has started {n} of its processes"
        )
        return process

    def _read(self, process: Child, fd: int, read: Callable[[], bool]) -> None:
        """Call `read` whenever a pipe of a process can be read, until it returns False."""

        def act() -> None:
            if not read():
                del process.pipes[fd]
                self._close(fd)

        process.pipes[fd] = act
        self.watch(fd, act)

    def _reap(self, process: Child) -> None:
        """Note how a process ended, and read what it wrote last."""
        code = process.wait()
        process.ended = time.monotonic()
        process.code = code if code >= 0 else SIGNAL_BASE - code
        if process.has_group:
            with suppress(ProcessLookupError):  # processes that it started and left
                os.killpg(process.pid, signal.SIGKILL)
        for fd, act in list(process.pipes.items()):
            for _ in range(_MOST_LAST_READS):  # a process that it left may write for ever
                if fd not in process.pipes or not _is_readable(fd):
                    break
                act()
        self._close(process.pidfd)

    def _close(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _wait_for(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except (
        ChildProcessError
    ):  # an exception, as of SIGTERM, came between its end and the note of it
        return 1
