"""The planner processes of a server: one gives first answers, one searches.

A thread for each process feeds it tasks one at a time. A task whose asker has gone is skipped, or
ended if it is under way. A process that dies is started again with the next task.
"""

import itertools
import json
import multiprocessing
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from meshmend.pages.explore.planner_process import DONE, PlannerTask, start_planner

_POLL_S: Final = 0.05  # how often a task under way is looked at, to end it if it is stale
_DIED: Final = json.dumps(
    {"kind": "error", "why": "the planner process died, perhaps for lack of memory; ask again"}
).encode()


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
