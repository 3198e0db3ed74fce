"""Starts forked processes, forwards their output, and notes how each of them ended.

No child outlives this process: it kills children with their process groups, and the kernel kills
them if this process is killed.
"""

import gc
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from meshmend.launch.output_lines import OutputLines
from meshmend.launch.worker import Pipes, end_openmp_threads

SIGNAL_BASE = 128
_TERMINATION_S = 3.0


@dataclass
class Child:
    """A child process as its parent sees it.

    `code` is its exit code, or 128 plus the number of the signal that killed it. `report` is the
    JSON that a worker sends before it exits with an exception.
    """

    pid: int
    pidfd: int
    report: bytes = b""
    code: int | None = None
    ended: float = 0.0
    is_end_expected: bool = False  # the parent ended it, or injected the fault that did

    @property
    def failed_at(self) -> float:
        """The time of its failure, for sorting: children that a signal killed come first.

        Such a child is the cause; the others fail because they have lost it.
        """
        time_s = json.loads(self.report)["time"] if self.report else self.ended
        return float(time_s) - (1e6 if self.code is not None and self.code > SIGNAL_BASE else 0.0)

    @property
    def how_it_ended(self) -> str:
        """The signal or the exit code of a child that failed, in words."""
        code = self.code or 0
        if code > SIGNAL_BASE:
            return f"killed by {signal.Signals(code - SIGNAL_BASE).name}"
        return f"exit code {code}"

    @property
    def traceback(self) -> str:
        """The text of the exception that ended it; empty if there was none."""
        return str(json.loads(self.report)["traceback"]) if self.report else ""

    def signal(self, number: int) -> None:
        """Send a signal to the process group of the child, if the child still runs."""
        if self.code is None:
            signal_group(self.pid, number)


class Children:
    """All children of this process, and the loop that serves their pipes and their ends."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()

    def start(self, prefix: str, body: Callable[[Pipes, int], None]) -> Child:
        """Fork a child that runs `body(pipes, parent)`, which must not return."""
        (out, out_end), (err, err_end), (report, report_end) = (os.pipe() for _ in range(3))
        sys.stdout.flush()
        sys.stderr.flush()
        # The garbage collector ignores all objects that exist now. Otherwise each child's collector
        # would walk through all imported modules, which took a tenth of a small step, and would
        # copy their memory pages.
        gc.freeze()
        end_openmp_threads()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for key in self._selector.get_map().values():  # the pipes of other children
                with suppress(OSError):  # connections are closed by the fork already
                    os.close(key.fd)
            body(Pipes(out_end, err_end, report_end), parent)
        for fd in (out_end, err_end, report_end):
            os.close(fd)
        child = Child(pid, os.pidfd_open(pid))
        self._children.append(child)
        read = selectors.EVENT_READ
        self._selector.register(out, read, OutputLines(out, prefix, sys.stdout))
        self._selector.register(err, read, OutputLines(err, prefix, sys.stderr))
        self._selector.register(report, read, child)
        self._selector.register(child.pidfd, read, child)
        return child

    def watch(self, fd: int, action: Callable[[], None]) -> None:
        """Call an action whenever a file descriptor can be read."""
        self._selector.register(fd, selectors.EVENT_READ, action)

    def unwatch(self, fd: int) -> None:
        """Undo `watch` for a file descriptor."""
        self._selector.unregister(fd)

    def alive(self) -> list[Child]:
        """Return the children that still run."""
        return [child for child in self._children if child.code is None]

    def failed(self) -> list[Child]:
        """Return the children that failed unexpectedly, sorted by `failed_at`."""
        failed = [child for child in self._children if child.code and not child.is_end_expected]
        return sorted(failed, key=lambda child: child.failed_at)

    def handle(self, timeout_s: float | None) -> bool:
        """Wait for output, reports and ends of children; handle them, and return whether any came.

        A timeout of None waits for ever.
        """
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            self._dispatch(key.fd, key.data)
        return bool(ready)

    def end_all(self, termination_s: float = _TERMINATION_S) -> None:
        """End all children, by SIGTERM and then by SIGKILL, and print what is left in the pipes."""
        for number, timeout_s in ((signal.SIGTERM, termination_s), (signal.SIGKILL, None)):
            for child in self.alive():
                child.is_end_expected = True
                child.signal(number)
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while self.alive():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self.handle(left)
        while self.handle(0.0):
            pass
        for key in list(self._selector.get_map().values()):
            self._close(key.fd)
        self._selector.close()

    def _dispatch(self, fd: int, data: Any) -> None:
        if isinstance(data, OutputLines):
            if not data.read():
                self._close(fd)
        elif not isinstance(data, Child):
            data()
        elif fd == data.pidfd:
            self._reap(data)
        else:
            part = os.read(fd, 1 << 16)
            data.report += part
            if not part:
                self._close(fd)

    def _reap(self, child: Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        child.ended = time.monotonic()
        child.code = code if code >= 0 else SIGNAL_BASE - code
        signal_group(child.pid, signal.SIGKILL)  # processes that it started and left
        self._close(child.pidfd)

    def _close(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group, if it still exists."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return
