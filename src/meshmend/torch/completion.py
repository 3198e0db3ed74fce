"""Threads that complete collectives: they run the callbacks of futures.

A callback may wait for another collective, whose own callbacks then need a thread too. So no
callback ever waits for a thread: a new one is started when all others are busy.
"""

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class CompletionThreads:
    """Runs each job at once, in an idle thread or in a new one; threads are kept for later jobs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._n_idle = 0
        self._is_closed = False

    def run(self, job: Job) -> None:
        """Run a job in another thread."""
        with self._lock:
            needs_thread = self._n_idle == 0
            self._n_idle -= not needs_thread
        self._jobs.put(job)
        if needs_thread:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def close(self) -> None:
        """End the idle threads now, and each of the others after its job."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._n_idle):
                self._jobs.put(None)
            self._n_idle = 0

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # an idle thread keeps no tensor alive
            with self._lock:
                if self._is_closed:
                    return
                self._n_idle += 1
