"""The handle of a collective under way, as torch.distributed gives it to its callers.

A handle has a future only if somebody asks for one. What waits for the handle itself then costs
no thread and no callback.
"""

import sys
import threading
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed

from meshmend.errors import StalledError
from meshmend.torch.completion import CompletionThreads

Future = torch.futures.Future[Any]

# A future that Python makes holds a Python object. A script makes one of a list of tensors.
_SCRIPT = """
def _later(gate: Future[int], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(gate)
    return tensors

def tensors_after(gate: Future[int], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(_later, gate, tensors)
"""


class Handle(torch.distributed.Work):
    """A collective under way: `wait` returns when this rank is done, or raises the error.

    As with Gloo, it is done when the callbacks of its future have run. They run in
    `completion`, and may wait for this handle and for others.
    """

    def __init__(
        self, what: str, result: list[torch.Tensor], completion: CompletionThreads
    ) -> None:
        super().__init__()
        self._what = what
        self._result = result
        self._completion = completion
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._has_run = False
        self._callback_thread: int | None = None
        self._error: Exception | None = None
        self._outcome: Future | None = None
        self._future: Future | None = None

    def finish(self, error: Exception | None) -> None:
        """Complete the handle; callbacks of its future run in another thread."""
        with self._lock:
            self._error = error
            self._has_run = True
            outcome = self._outcome
        if outcome is None:
            self._ended.set()
        else:
            self._completion.run(lambda: self._complete(outcome))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective is done, `timeout` at most; without one as long as it takes.

        Raises:
            StalledError: the timeout is over. The collective is still under way.
        """
        timeout_s = timeout.total_seconds() if timeout is not None else 0.0
        is_in_callback = self._callback_thread == threading.get_ident()
        if not is_in_callback and not self._ended.wait(timeout_s if timeout_s > 0 else None):
            raise StalledError(
                f"{self._what} is not done, but the timeout of {timeout_s:g} s is over; wait "
                "longer, or look for the rank that did not call it"
            )
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait until the collective is done."""
        self.wait()

    def get_future(self) -> Future:
        """Return the future of the tensors.

        In C++, the hook that compresses gradients to float16 refuses the future of a Python object.
        """
        future = self.python_future()
        is_half = bool(self._result) and self._result[0].dtype is torch.float16
        if not is_half or "get_future" in sys._getframe(1).f_code.co_names:
            return future
        typed: Future = _script().tensors_after(future, self._result)
        return typed

    def python_future(self) -> Future:
        """Return the future of a Python object, which is the list of tensors."""
        with self._lock:
            if self._future is None:
                self._outcome = torch.futures.Future()
                self._future = self._outcome.then(self._result_or_error)
                if self._has_run:  # nobody can have added a callback yet
                    self._outcome.set_result(None)
            return self._future

    def is_completed(self) -> bool:
        """Whether the collective has ended, with or without an error."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether the collective has ended without an error."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Wait for the end; return the error of the collective, or None."""
        self._ended.wait()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Wait for the end; return the tensors."""
        self.wait()
        return self._result

    def _result_or_error(self, _: Future) -> list[torch.Tensor]:
        # C++ code such as DDP's takes an error set with `set_exception` for a value. An error that
        # is raised in a callback is an error there too.
        if self._error is not None:
            raise self._error
        return self._result

    def _complete(self, outcome: Future) -> None:
        self._callback_thread = threading.get_ident()
        try:
            outcome.set_result(None)
        finally:
            self._ended.set()
            self._callback_thread = None


@cache
def _script() -> Any:
    return torch.jit.CompilationUnit(_SCRIPT)
