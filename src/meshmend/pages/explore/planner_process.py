"""A process that plans for the page, so that the page answers while a plan is searched for.

    tasks go in over a pipe, JSON values come out, one task at a time
    `newest_stale` tells the process that the task it works on is no longer wanted

A process keeps what it has compiled and planned, so it is started once. A stale task ends at the
next progress report of its search, within a few seconds. The process dies with the server.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from meshmend.errors import MeshmendError
from meshmend.processes import die_with_parent

DONE: Final = b""  # ends the answers of a task
_PROGRESS_EVERY_S: Final = 0.25


@dataclass(frozen=True)
class PlannerTask:
    """What to do for the page: `question` is the JSON object that the page sent."""

    number: int
    what: str
    question: dict[str, Any]
    cache_dir: Path | None = None


class _StaleTask(BaseException):
    """The task is no longer wanted; not an Exception, so that no search takes it for a failure."""


def start_planner(
    connection: Connection, newest_stale: Any, *, niceness: int
) -> multiprocessing.process.BaseProcess:
    """Start a process that serves one end of a pipe until that is closed."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=_serve,
        args=(connection, newest_stale, os.getpid(), niceness),
        daemon=True,
    )
    process.start()
    return process


def _serve(connection: Connection, newest_stale: Any, parent: int, niceness: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this
    die_with_parent(parent)
    from meshmend.pages.explore import (
        planner_tasks,  # takes a second; if nice, minutes where all is busy
    )

    os.nice(niceness)
    while True:
        try:
            task: PlannerTask = connection.recv()
        except (EOFError, OSError):
            return
        answers = _Answers(connection, task, newest_stale)
        try:
            for answer in planner_tasks.TASKS[task.what](task, answers.report):
                answers.send(answer)
                answers.report(task.what)
        except _StaleTask:
            pass
        except MeshmendError as error:
            answers.send({"kind": "error", "why": str(error)})
        except Exception as error:  # the page must hear of it, and the process goes on
            traceback.print_exc()
            answers.send({"kind": "error", "why": f"the planner failed: {error!r}"})
        connection.send_bytes(DONE)


class _Answers:
    """Sends the answers of one task, and its progress; two threads of a search may report."""

    def __init__(self, connection: Connection, task: PlannerTask, newest_stale: Any) -> None:
        self._connection = connection
        self._task = task
        self._newest_stale = newest_stale
        self._lock = threading.Lock()
        self._reported = time.monotonic()

    def send(self, answer: dict[str, Any]) -> None:
        with self._lock:
            self._connection.send_bytes(json.dumps(answer, separators=(",", ":")).encode())

    def report(self, step: str, part: float | None = None, /) -> None:
        """Tell the page how far the task is, a few times a second; end it if it is stale."""
        if self._newest_stale.value >= self._task.number:
            raise _StaleTask
        now = time.monotonic()
        if now - self._reported > _PROGRESS_EVERY_S:
            self._reported = now
            self.send({"kind": "progress", "step": step, "part": part})
