"""One thread per process group that runs collectives in the order in which they were submitted.

The caller gets a handle at once. The bytes move without the interpreter's lock, so gradients are
summed while the backward pass goes on.
"""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

Future = torch.futures.Future[Any]
Submitted = tuple[Callable[[], Any], Future]


class Handle(torch.distributed.Work):
    """A collective under way: `wait` returns when this rank is done, or raises the error.

    `outcome` resolves to an error or None; `future` resolves to the tensors, for C++ code.
    """

    def __init__(self, outcome: Future, future: Future) -> None:
        super().__init__()
        self._outcome = outcome
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective is done; the process group's timeout applies, not `timeout`."""
        if (error := self._outcome.wait()) is not None:
            raise error
        return True

    def get_future(self) -> Future:
        """Return the future of the tensors."""
        return self._future

    def is_completed(self) -> bool:
        """Whether the collective has ended, with or without an error."""
        return self._outcome.done()

    def is_success(self) -> bool:
        """Whether the collective has ended without an error."""
        return self._outcome.done() and self._outcome.value() is None

    def exception(self) -> BaseException | None:
        """Wait for the end; return the error of the collective, or None."""
        error: BaseException | None = self._outcome.wait()
        return error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors."""
        tensors: list[torch.Tensor] = self._future.wait()
        return tensors


class Progress:
    """A queue of collectives and the thread that runs them."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Submitted | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, collective: Callable[[], None], result: Any) -> Handle:
        """Queue a collective; return its handle, whose future is `result` once it has run."""
        outcome: Future = torch.futures.Future()

        # C++ code such as DDP's takes an error set with `set_exception` for a value. An error that
        # is raised in a callback is an error there too.
        def result_or_error(ended: Future) -> Any:
            if (error := ended.value()) is not None:
                raise error
            return result

        self._queue.put((collective, outcome))
        return Handle(outcome, outcome.then(result_or_error))

    def finish(self, timeout_s: float) -> bool:
        """Run all submitted collectives, then end the thread; return whether it ended in time."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            collective, outcome = entry
            error = None
            try:
                collective()
            except Exception as raised:
                error = raised
            outcome.set_result(error)
            del entry, collective, outcome, error  # an idle thread keeps no tensor alive
