"""The processes of a `DataLoader` under a job: how they start, and who hears of their deaths."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Final

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import get_worker_info

from meshmend.processes import die_with_parent
from meshmend.train.data.sample_maker import is_stream

_DEATH_S: Final = 5.0  # to hear of a death after a connection broke, on a busy machine


@dataclass(frozen=True)
class LoaderStart:
    """What a loader worker does first: it ties itself to its worker, and looks like any other.

    `initialise` is the user's `worker_init_fn`.
    """

    worker: int  # the process that the samples are for
    dataset: Any
    initialise: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        """Prepare this process, which is loader worker number `number`."""
        self._die_with_worker()
        # SIGTERM may be a scheduler's notice to all processes that it will soon end the job.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        info = get_worker_info()
        assert info is not None, "this is a loader worker"
        torch_worker._worker_info = replace(info, dataset=self.dataset)  # else LoaderSource's own
        if self.initialise is not None:
            self.initialise(number)
        if is_stream(self.dataset):
            # Streams split themselves among loader workers, but this one reads all of it.
            torch_worker._worker_info = None

    def _die_with_worker(self) -> None:
        if os.getppid() == self.worker:
            die_with_parent(self.worker)
            return
        # A fork server is the parent of this process, so the kernel does not know who needs it.
        parent = multiprocessing.parent_process()
        assert parent is not None, "a loader worker is a child"

        def wait_for_end() -> None:
            wait([parent.sentinel])
            os._exit(1)

        threading.Thread(target=wait_for_end, daemon=True).start()


def how_one_died(workers: Sequence[BaseProcess]) -> str | None:
    """Return how a loader worker died, in torch's words; None if all of them live.

    The kernel closes the connections of a process that is killed before it tells of its death.
    """
    ending = wait([each.sentinel for each in workers], timeout=_DEATH_S)
    for each in workers:
        if each.sentinel in ending:
            each.join()
            code = each.exitcode or 0
            how = f"exited with code {code}"
            if code < 0:
                how = f"is killed by signal: {signal.strsignal(-code)}"
            return f"DataLoader worker (pid {each.pid}) {how}"
    return None


class DeathWatch:
    """Raises the error of a dead loader worker while the job waits for samples, and not elsewhere.

    torch's handler of SIGCHLD raises it in whatever the main thread does at that moment, such as a
    sum. This one keeps it until the job asks for the next samples.
    """

    def __init__(self) -> None:
        self._inner: Any = None  # torch's handler
        self._kept: RuntimeError | None = None
        self._is_waiting = False

    def watch(self) -> None:
        """Take the place of torch's handler; without effect in other threads than the first."""
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGCHLD)
        if is_main and callable(handler):
            self._inner = handler
            signal.signal(signal.SIGCHLD, self._take)

    def close(self) -> None:
        """Put torch's handler back."""
        if self._inner is not None and signal.getsignal(signal.SIGCHLD) == self._take:
            signal.signal(signal.SIGCHLD, self._inner)
        self._inner, self._kept = None, None

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Raise the error of a loader worker that has died, or dies meanwhile.

        Raises:
            RuntimeError: torch's words for it.
        """
        if self._kept is not None:
            raise self._kept
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        try:
            self._inner(number, frame)
        except RuntimeError as error:
            if self._is_waiting:
                raise
            self._kept = error
