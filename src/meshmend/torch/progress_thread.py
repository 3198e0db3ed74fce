"""Threads of a process group that start collectives in the order in which they were submitted.

The caller gets a handle at once. The bytes move without the interpreter's lock, so gradients are
summed while the backward pass goes on. One thread at a time starts the next collective; then it
waits for it, and another thread starts the next. So several are in flight. Callbacks run in other
threads (`completion`).
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

import torch

from meshmend.torch.completion import CompletionThreads
from meshmend.torch.handle import Future, Handle

Rest = Callable[[], None]  # waits for a collective that was started, and completes it
Starter = Callable[[], Rest | None]  # starts a collective, or runs it whole
Submitted = tuple[Starter, Handle]

_MOST_THREADS: Final = 16  # so many collectives are in flight at most


class Progress:
    """A queue of collectives and the threads that run them."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Submitted | None] = queue.SimpleQueue()
        self._completion = CompletionThreads(f"{name}-callbacks")
        self._name = name
        self._turn = threading.Lock()  # held by the thread that takes and starts the next one
        self._counts = threading.Lock()
        self._n_free = 0  # threads that wait for their turn, or have it
        self._threads: list[threading.Thread] = []
        self._add_thread()

    def submit(
        self,
        what: str,
        collective: Starter,
        result: list[torch.Tensor],
        watch: Callable[[Future], None] | None = None,
    ) -> Handle:
        """Queue a collective; return its handle, whose future is `result` once it has run.

        `watch` gets that future before the collective can run.
        """
        handle = Handle(what, result, self._completion)
        if watch is not None:
            watch(handle.python_future())
        self._queue.put((collective, handle))
        return handle

    def finish(self, timeout_s: float) -> bool:
        """Run all submitted collectives, then end all threads; return whether they end in time."""
        self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        has_ended = not any(thread.is_alive() for thread in self._threads)
        if has_ended:
            self._completion.close()
        return has_ended

    def _add_thread(self) -> None:
        self._n_free += 1
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # In this mode, tensors made in it may be written too, and those that require gradients.
    @torch.inference_mode()
    def _work(self) -> None:
        while True:
            with self._turn:
                entry = self._queue.get()
                if entry is None:
                    self._queue.put(None)  # for the other threads
                    return
                collective, handle = entry
                rest, error = _started(collective)
            if rest is not None:
                error = self._finished(rest)
            handle.finish(error)
            del entry, collective, handle, rest, error  # an idle thread keeps no tensor alive

    def _finished(self, rest: Rest) -> Exception | None:
        """Wait for a collective while another thread starts the next; return its error."""
        with self._counts:
            self._n_free -= 1
            if not self._n_free and len(self._threads) < _MOST_THREADS:
                self._add_thread()
        try:
            rest()
        except Exception as raised:
            return raised
        finally:
            with self._counts:
                self._n_free += 1
        return None


def _started(collective: Starter) -> tuple[Rest | None, Exception | None]:
    try:
        return collective(), None
    except Exception as raised:
        return None, raised
