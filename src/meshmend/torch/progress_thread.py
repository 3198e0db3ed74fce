"""One thread per process group that runs collectives in the order they were asked for.

The caller gets a handle at once; the bytes move outside the interpreter lock, so gradients are
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
Job = tuple[Callable[[], Any], Future]


class Handle(torch.distributed.Work):
    """A collective under way: `wait` returns when this rank is done, or raises the error.

    `outcome` is the future of an error or None, `future` that of the tensors, for C++ code.
    """

    def __init__(self, outcome: Future, future: Future) -> None:
        super().__init__()
        self._outcome = outcome
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the collective is done; the time allowed is the process group's."""
        if (error := self._outcome.wait()) is not None:
            raise error
        return True

    def get_future(self) -> Future:
        """Return the future of the tensors."""
        return self._future

    def is_completed(self) -> bool:
        """Whether the collective has ended, well or not."""
        return self._outcome.done()

    def is_success(self) -> bool:
        """Whether the collective has ended well."""
        return self._outcome.done() and self._outcome.value() is None

    def exception(self) -> BaseException | None:
        """Return why the collective ended badly, if it did."""
        error: BaseException | None = self._outcome.wait()
        return error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors."""
        tensors: list[torch.Tensor] = self._future.wait()
        return tensors


class Progress:
    """A queue of collectives and the thread that runs them."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], result: Any) -> Handle:
        """Return a handle that ends with `result` when the job has run."""
        outcome: Future = torch.futures.Future()

        # An error set with `set_exception` is a value to C++ code such as DDP's; one that is
        # raised in a callback is an error there too.
        def concluded(ended: Future) -> Any:
            if (error := ended.value()) is not None:
                raise error
            return result

        self._jobs.put((job, outcome))
        return Handle(outcome, outcome.then(concluded))

    def finish(self, timeout_s: float) -> bool:
        """Run all submitted collectives, then end the thread; return whether it ended in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, outcome = entry
            error = None
            try:
                job()
            except Exception as raised:
                error = raised
            outcome.set_result(error)
            del entry, job, outcome, error  # an idle thread keeps no tensor alive
