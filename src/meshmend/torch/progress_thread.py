"""Collectives under way: the handle that a caller gets, and the threads that complete it.

The caller gets a handle at once. The bytes move without the interpreter's lock, so gradients are
summed while the backward pass goes on. One thread at a time starts the next collective, in the
order in which they were submitted; then it waits for it, and another thread starts the next. So
several are in flight. Callbacks of futures run in threads of their own: one may wait for another
collective, whose callbacks then need a thread too, so a new one is started when all are busy.

A caller that waits at once runs its collective itself, if all earlier ones have started: handing
it to a thread and back takes more of a processor than a short sum does.
"""

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, Final

import torch
import torch.distributed

from meshmend.errors import InputError, MeshmendError, StalledError, StoppedError

Job = Callable[[], None]


class CompletionThreads:
    """Runs each job at once, in an idle thread or in a new one; threads are kept for later jobs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Condition()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._n_idle = self._n_running = 0
        self._is_closed = False

    def run(self, job: Job) -> None:
        """Run a job in another thread."""
        with self._lock:
            needs_thread = self._n_idle == 0
            self._n_idle -= not needs_thread
            self._n_running += 1
        self._jobs.put(job)
        if needs_thread:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def close(self, timeout_s: float = 0.0) -> bool:
        """Wait until all jobs are done, and end the threads; return whether they end in time.

        The callbacks that they run belong to objects, such as DDP's, that the caller drops next.
        """
        with self._lock:
            self._is_closed = True
            for _ in range(self._n_idle):
                self._jobs.put(None)
            self._n_idle = 0
            return self._lock.wait_for(lambda: self._n_running == 0, timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # an idle thread keeps no tensor alive
            with self._lock:
                self._n_running -= 1
                self._lock.notify_all()
                if self._is_closed:
                    return
                self._n_idle += 1


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
        self._gate = threading.Lock()  # held until the collective has ended
        self._gate.acquire()
        self._has_ended = self._has_run = False
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
            self._end()
        else:
            self._completion.run(lambda: self._complete(outcome))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective is done, `timeout` at most; without one as long as it takes.

        Raises:
            StalledError: the timeout is over. The collective is still under way.
        """
        timeout_s = timeout.total_seconds() if timeout is not None else 0.0
        is_in_callback = self._callback_thread == threading.get_ident()
        if not is_in_callback and not self._waited(timeout_s if timeout_s > 0 else -1.0):
            raise StalledError(
                f"{self._what} is not done, but the timeout of {timeout_s:g} s is over; wait "
                "longer, or look for the rank that did not call it"
            )
        if self._error is not None:
            raise self._error.with_traceback(None)  # without the frames of who has waited before
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
        return self._has_ended

    def is_success(self) -> bool:
        """Whether the collective has ended without an error."""
        return self._has_ended and self._error is None

    def exception(self) -> BaseException | None:
        """Wait for the end; return the error of the collective, or None."""
        self._waited(-1.0)
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Wait for the end; return the tensors."""
        self.wait()
        return self._result

    def _result_or_error(self, _: Future) -> list[torch.Tensor]:
        # C++ code such as DDP's takes an error set with `set_exception` for a value. An error that
        # is raised in a callback is an error there too, of which only the text is left. For that
        # text pybind11 walks the frames of the traceback. They must be of this thread: frames of
        # another one may vanish meanwhile, and the process with them (CPython 3.11).
        if self._error is not None:
            raise RuntimeError(f"{type(self._error).__name__}: {self._error}")
        return self._result

    def _complete(self, outcome: Future) -> None:
        self._callback_thread = threading.get_ident()
        try:
            outcome.set_result(None)
        finally:
            self._end()
            self._callback_thread = None

    def _end(self) -> None:
        self._has_ended = True
        self._gate.release()

    def _waited(self, timeout_s: float) -> bool:
        """Wait for the end, so many seconds at most, or with -1 as long as it takes."""
        if not self._has_ended and self._gate.acquire(timeout=timeout_s):
            self._gate.release()
        return self._has_ended


@cache
def _script() -> Any:
    return torch.jit.CompilationUnit(_SCRIPT)


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
        self._starting = threading.Lock()  # held by whoever starts one: such a thread, or a caller
        self._counts = threading.Lock()
        self._changed = threading.Condition(self._counts)
        self._n_unstarted = 0  # of those in the queue
        self._callers: set[int] = set()  # threads that run their collective themselves
        self._n_free = 0  # threads that wait for their turn, or have it
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()  # no fork inherits the threads
        self._is_over = False
        self._add_thread()

    def submit(
        self,
        what: str,
        collective: Starter,
        result: list[torch.Tensor],
        watch: Callable[[Future], None] | None = None,
        *,
        waits: bool = False,
    ) -> Handle:
        """Queue a collective; return its handle, whose future is `result` once it has run.

        `watch` gets that future before the collective can run. With `waits` the caller waits for
        the handle next, so it may be done when this returns.

        Raises:
            StoppedError: nobody would run it.
        """
        self.check(what)
        if threading.get_ident() in self._callers:
            raise InputError(
                f"{what} needs that its thread is in no other collective, but was called in the "
                "handler of a signal that interrupted one; set a flag in the handler, and call it "
                "in the loop"
            )
        handle = Handle(what, result, self._completion)
        if watch is not None:
            watch(handle.python_future())
        with self._counts:
            self.check(what)
            runs_here = (
                waits
                and watch is None
                and self._n_unstarted == 0
                and self._starting.acquire(blocking=False)
            )
            if runs_here:
                self._callers.add(threading.get_ident())
            else:
                self._n_unstarted += 1
                self._queue.put((collective, handle))
        if runs_here:
            self._run_here(collective, handle)
        return handle

    def check(self, what: str) -> None:
        """Raise StoppedError if nobody would run a collective."""
        if self._process != os.getpid():
            raise StoppedError(
                f"{what} needs the process that made the process group, but was called in one that "
                "was forked from it; make a group in each process"
            )
        if self._is_over:
            raise StoppedError(
                f"{what} needs a process group, but this one was destroyed; make it anew"
            )

    def finish(self, timeout_s: float) -> bool:
        """Run all submitted collectives, then end all threads; return whether they end in time."""
        deadline = time.monotonic() + timeout_s
        with self._counts:
            self._is_over = True
            self._queue.put(None)
            me = {threading.get_ident()}  # if this is the handler of a signal
            if not self._changed.wait_for(lambda: not self._callers - me, timeout_s):
                return False
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        return self._completion.close(max(0.0, deadline - time.monotonic()))

    def _add_thread(self) -> None:
        self._n_free += 1
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # In this mode, tensors made in it may be written too, and those that require gradients.
    @torch.inference_mode()
    def _run_here(self, collective: Starter, handle: Handle) -> None:
        """Run a collective in its caller's thread, which holds `_starting`, and complete it."""
        try:
            try:
                rest, error = _started(collective)
            finally:
                self._starting.release()
            if rest is not None:
                error = _outcome(rest)
            handle.finish(error)
        finally:
            with self._counts:
                self._callers.discard(threading.get_ident())
                if self._is_over:
                    self._changed.notify_all()

    @torch.inference_mode()
    def _work(self) -> None:
        while True:
            with self._turn:
                entry = self._queue.get()
                if entry is None:
                    self._queue.put(None)  # for the other threads
                    return
                collective, handle = entry
                with self._starting:
                    rest, error = _started(collective)
                with self._counts:
                    self._n_unstarted -= 1
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
            return _outcome(rest)
        finally:
            with self._counts:
                self._n_free += 1


def _started(collective: Starter) -> tuple[Rest | None, Exception | None]:
    try:
        return collective(), None
    except Exception as raised:
        return None, _for_other_threads(raised)


def _outcome(rest: Rest) -> Exception | None:
    try:
        rest()
    except Exception as raised:
        return _for_other_threads(raised)
    return None


def _for_other_threads(error: Exception) -> Exception:
    """Return an error without the frames of this thread; what is no message of ours notes them."""
    if not isinstance(error, MeshmendError):
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    return error.with_traceback(None)
