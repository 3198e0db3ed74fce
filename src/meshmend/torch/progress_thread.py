"""One thread per process group that runs collectives in the order in which they were submitted.

The caller gets a handle at once. The bytes move without the interpreter's lock, so gradients are
summed while the backward pass goes on. Callbacks run in other threads (`completion`).
"""

import queue
import threading
from collections.abc import Callable

import torch

from meshmend.torch.completion import CompletionThreads
from meshmend.torch.handle import Future, Handle

Submitted = tuple[Callable[[], None], Handle]


class Progress:
    """A queue of collectives and the thread that runs them."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Submitted | None] = queue.SimpleQueue()
        self._completion = CompletionThreads(f"{name}-callbacks")
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        what: str,
        collective: Callable[[], None],
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
        """Run all submitted collectives, then end the thread; return whether it ended in time."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        has_ended = not self._thread.is_alive()
        if has_ended:
            self._completion.close()
        return has_ended

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            collective, handle = entry
            error = None
            try:
                collective()
            except Exception as raised:
                error = raised
            handle.finish(error)
            del entry, collective, handle, error  # an idle thread keeps no tensor alive
