"""The planner processes of a page's server, so that it answers while a plan is searched for.

    tasks go in over a pipe, JSON values come out, one task at a time
    `newest_stale` tells the process that the task it works on is no longer wanted

One process gives first answers, one searches. A thread of the server for each process feeds it
tasks. A task whose asker has gone is skipped, or, if it is under way, ended at the next progress
report of its search, within a few seconds. A process keeps what it has compiled and planned, so it
is started once; one that dies is started again with the next task. It dies with the server.
"""

import itertools
import json
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from meshmend.errors import MeshmendError
from meshmend.processes import die_with_parent

DONE: Final = b""  # ends the answers of a task
_POLL_S: Final = 0.05  # how often a task under way is looked at, to end it if it is stale
_DIED: Final = json.dumps(
    {"kind": "error", "why": "the planner process died, perhaps for lack of memory; ask again"}
).encode()
_PROGRESS_EVERY_S: Final = 0.25


@dataclass(frozen=True)
class PlannerTask:
    """What to do for the page: `question` is the JSON object that the page sent."""

    number: int
    what: str
    question: dict[str, Any]
    cache_dir: Path | None = None


@dataclass(frozen=True, eq=False)
class PlannerJob:
    """A task and where its answers go; set `is_stale` when nobody waits for them any more.

    `deliver` is called in another thread, last with `DONE`.
    """

    task: PlannerTask
    deliver: Callable[[bytes], object]
    is_stale: threading.Event = field(default_factory=threading.Event)


class Planner:
    """One planner process and its queue of jobs."""

    def __init__(self, *, niceness: int, cache_dir: Path | None) -> None:
        self._niceness = niceness
        self._cache_dir = cache_dir
        self._jobs: queue.SimpleQueue[PlannerJob | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._is_open = True
        self._newest_stale: Any = multiprocessing.get_context("spawn").RawValue("q", 0)
        self._start()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def ask(
        self, what: str, question: dict[str, Any], deliver: Callable[[bytes], object]
    ) -> PlannerJob:
        """Queue a task; its answers are delivered as bytes of JSON, then `DONE`."""
        task = PlannerTask(next(self._numbers), what, question, self._cache_dir)
        job = PlannerJob(task, deliver)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the process and the thread."""
        self._is_open = False
        self._jobs.put(None)
        self._process.kill()
        self._thread.join(timeout=5)
        self._process.join(timeout=5)

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process = start_planner(theirs, self._newest_stale, niceness=self._niceness)
        theirs.close()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.is_stale.is_set():
                try:
                    self._run(job)
                except (EOFError, OSError):
                    job.deliver(_DIED)
                    self._connection.close()
                    self._process.join()
                    if self._is_open:
                        self._start()
            job.deliver(DONE)

    def _run(self, job: PlannerJob) -> None:
        self._connection.send(job.task)
        while True:
            if job.is_stale.is_set():
                self._newest_stale.value = job.task.number
            if not self._connection.poll(_POLL_S):
                continue
            answer = self._connection.recv_bytes()
            if answer == DONE:
                return
            job.deliver(answer)


# The process.


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
