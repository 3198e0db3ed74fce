"""Forked processes and everything that comes from them: their output, their last words, their end.

Nothing here outlives this process: children are killed with their process groups, and by the
kernel if this process is killed.
"""

import gc
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshmend.launch.forked_worker import Pipes
from meshmend.launch.one_thread import end_openmp_threads
from meshmend.launch.output_lines import Lines

SIGNAL_BASE = 128
_TERMINATION_S = 3.0


@dataclass
class Child:
    """A child as its parent sees it; a code above 128 is that of a signal."""

    pid: int
    pidfd: int
    report: bytes = b""
    code: int | None = None
    ended: float = 0.0
    was_ended: bool = False  # by its parent

    @property
    def failed_at(self) -> float:
        """When it failed; deaths without a word count first, the others are their consequence."""
        told = json.loads(self.report)["time"] if self.report else self.ended
        return float(told) - (1e6 if self.code is not None and self.code > SIGNAL_BASE else 0.0)

    @property
    def how_it_ended(self) -> str:
        """How a child that failed ended, in words."""
        code = self.code or 0
        if code > SIGNAL_BASE:
            return f"killed by {signal.Signals(code - SIGNAL_BASE).name}"
        return f"exit code {code}"

    @property
    def traceback(self) -> str:
        """The exception that ended it, or nothing."""
        return str(json.loads(self.report)["traceback"]) if self.report else ""

    def signal(self, number: int) -> None:
        """Send a signal to the child and all that it started."""
        if self.code is None:
            signal_group(self.pid, number)


class Children:
    """The children that were started."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()

    def start(self, prefix: str, body: Callable[[Pipes, int], None]) -> Child:
        """Fork a child that runs `body(pipes, parent)`, which must not return."""
        (out, out_end), (err, err_end), (report, report_end) = (os.pipe() for _ in range(3))
        sys.stdout.flush()
        sys.stderr.flush()
        # What is there now stays for good: no child's collector has to walk through all that was
        # imported, which took a tenth of a small step, nor copies its pages by that.
        gc.freeze()
        end_openmp_threads()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for key in self._selector.get_map().values():  # those of its brothers
                os.close(key.fd)
            body(Pipes(out_end, err_end, report_end), parent)
        for fd in (out_end, err_end, report_end):
            os.close(fd)
        child = Child(pid, os.pidfd_open(pid))
        self._children.append(child)
        read = selectors.EVENT_READ
        self._selector.register(out, read, Lines(out, prefix, sys.stdout))
        self._selector.register(err, read, Lines(err, prefix, sys.stderr))
        self._selector.register(report, read, child)
        self._selector.register(child.pidfd, read, child)
        return child

    def watch(self, fd: int, action: Callable[[], None]) -> None:
        """Call an action whenever a descriptor can be read."""
        self._selector.register(fd, selectors.EVENT_READ, action)

    def unwatch(self, fd: int) -> None:
        """Take back `watch`."""
        self._selector.unregister(fd)

    def alive(self) -> list[Child]:
        """Return the children that still run."""
        return [child for child in self._children if child.code is None]

    def failed(self) -> list[Child]:
        """Return the children that failed by themselves, in the order in which they did."""
        failed = [child for child in self._children if child.code and not child.was_ended]
        return sorted(failed, key=lambda child: child.failed_at)

    def handle(self, timeout_s: float | None) -> bool:
        """Handle what is there; return whether there was anything."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            self._serve(key.fd, key.data)
        return bool(ready)

    def end_all(self) -> None:
        """End what still runs, gently at first, and print what is left in the pipes."""
        for number, patience_s in ((signal.SIGTERM, _TERMINATION_S), (signal.SIGKILL, None)):
            for child in self.alive():
                child.was_ended = True
                child.signal(number)
            deadline = None if patience_s is None else time.monotonic() + patience_s
            while self.alive():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self.handle(left)
        while self.handle(0.0):
            pass
        for key in list(self._selector.get_map().values()):
            self._forget(key.fd)
        self._selector.close()

    def _serve(self, fd: int, data: Any) -> None:
        if isinstance(data, Lines):
            if not data.read():
                self._forget(fd)
        elif not isinstance(data, Child):
            data()
        elif fd == data.pidfd:
            self._reap(data)
        else:
            part = os.read(fd, 1 << 16)
            data.report += part
            if not part:
                self._forget(fd)

    def _reap(self, child: Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        child.ended = time.monotonic()
        child.code = code if code >= 0 else SIGNAL_BASE - code
        signal_group(child.pid, signal.SIGKILL)  # what it may have left behind
        self._forget(child.pidfd)

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group, if there still is one."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return
