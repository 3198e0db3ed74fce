"""Batches that loader workers make ahead of time: the processes of a PyTorch `DataLoader`.

The next shares of a chip follow from its share of this step, as long as the generation is the
same: each begins one batch later. So they are requested ahead. When the job asks for another share
than the one expected, all requests under way are void: loader workers drop them, and what they have
made already is thrown away. A loader worker ends with its worker; of its own death the job hears
when it asks for the next samples.
"""

import atexit
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int64
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Final

import torch
import torch.utils.data._utils.worker as torch_worker
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, get_worker_info

from meshmend.errors import LoaderError
from meshmend.processes import die_with_parent
from meshmend.train.data.sample_maker import BatchRequest, SampleMaker, is_stream
from meshmend.train.data.samples import Order, Seen, Share, StreamOrder

N_COMPARED_OF_STREAM: Final = 3  # samples, by the fingerprint of a job
_ADVICE: Final = "; if memory is short, use fewer num_workers or a smaller prefetch_factor"
_DEATH_S: Final = 5.0  # to hear of a death after a connection broke, on a busy machine


@dataclass(frozen=True)
class _Task:
    """What a loader worker is asked for: a batch, or the sample with this index, or nothing.

    Only the task with the newest ticket is wanted.
    """

    ticket: int
    what: BatchRequest | int | None


class LoaderSource:
    """The batches of a data set, made in the processes that a `DataLoader` asks for.

    Loader workers start with the first batch, and end with this process or with `close`.
    """

    def __init__(self, loader: "DataLoader[Any]", order: Order | StreamOrder) -> None:
        dataset: Any = loader.dataset
        self._n_samples = N_COMPARED_OF_STREAM if is_stream(dataset) else len(dataset)
        processes: Any = loader.multiprocessing_context or torch.multiprocessing
        self._newest = processes.RawValue(c_int64, 0)
        self._tasks = _Tasks(order)
        maker = SampleMaker(dataset, loader.collate_fn, order.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's own loader gave the same warnings
            self._loader: DataLoader[Any] = DataLoader(
                _Answers(maker, self._newest),
                batch_sampler=self._tasks,  # type: ignore[arg-type]  # any iterable will do
                collate_fn=_as_it_is,
                num_workers=loader.num_workers,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=_LoaderStart(os.getpid(), dataset, loader.worker_init_fn),
                multiprocessing_context=loader.multiprocessing_context,
                prefetch_factor=loader.prefetch_factor,
            )
        self._iterator: Any = None
        self._deaths = _DeathWatch()
        self._owner = os.getpid()
        self.seen: Seen | None = None  # of a stream, before the step of the last batch
        atexit.register(self._kill)

    def batch(self, share: Share, n_steps: int) -> Any:
        """Return the batch of a share, of the first of `n_steps` steps that are still to do.

        Raises:
            LoaderError: a loader worker died, or did not answer in the loader's `timeout`.
        """
        if not self._tasks.is_expected(share):
            self._newest.value = self._tasks.begin(share, n_steps)
        self._tasks.note_step(share)
        start, batch, self.seen = self._answer()
        assert start == share.start, f"asked for the samples at {share.start}, but got {start}"
        return batch

    def __len__(self) -> int:
        """Return how many samples there are; of a stream, how many to compare."""
        return self._n_samples

    def __getitem__(self, index: int) -> Any:
        """Return one sample, made by a loader worker; of a stream, one of the first."""
        self._newest.value = self._tasks.begin(index)
        return self._answer()[1]

    def close(self) -> None:
        """End the loader workers at once, also in the middle of a sample."""
        atexit.unregister(self._kill)
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            return
        self._newest.value = self._tasks.begin(None)
        if not self._loader.pin_memory:  # else its thread waits for a queue that they may hold
            _kill(iterator)
            # A worker that was killed while it looked at this event holds its lock for ever.
            iterator._workers_done_event = threading.Event()
        iterator._shutdown_workers()
        _kill(iterator)
        self._deaths.close()

    def _answer(self) -> Any:
        """Return the answer to the newest task; throw away those to earlier ones."""
        while True:
            with self._clear_errors(), self._deaths.reported():
                if self._iterator is None:
                    self._iterator = iter(self._loader)
                    self._deaths.watch()
                ticket, start, made, seen = next(self._iterator)
            if ticket != self._newest.value:
                continue
            if isinstance(made, ExceptionWrapper):
                made.reraise()  # type: ignore[no-untyped-call]
            return start, made, seen

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Turn the error of a loader worker that died or hangs into one line.

        Errors of the samples do not come here: they are answers. A worker that is killed while this
        process reads from it shows as a broken connection, or as half an answer.
        """
        try:
            yield
        except Exception as error:
            # The cause, if there is one, names the signal that killed it.
            cause = error.__cause__ if isinstance(error.__cause__, RuntimeError) else error
            text = " ".join(str(cause).split())
            if "killed by signal" not in text and "timed out" not in text:
                text = _how_one_died(getattr(self._iterator, "_workers", ())) or text
            if not text.startswith("DataLoader "):
                raise
            raise LoaderError(
                f"Job needs its loader workers, but a {text.rstrip('.')}{_ADVICE}"
            ) from None

    def _kill(self) -> None:
        if os.getpid() == self._owner and self._iterator is not None:
            _kill(self._iterator)


class _Tasks:
    """The endless row of tasks for the loader workers: the shares of the next steps."""

    def __init__(self, order: Order | StreamOrder) -> None:
        self._order = order
        self._ticket = 0
        self._ahead: Share | int | None = None  # what to request next
        self._n_left = 0
        self._expected: Share | None = None  # what the job will ask for next
        self._keep_from = 0

    def is_expected(self, share: Share) -> bool:
        """Whether this share was requested ahead."""
        return share == self._expected

    def begin(self, what: Share | int | None, n_steps: int = 1) -> int:
        """Request a share and those of the steps after it, or one sample; return their ticket."""
        self._ticket += 1
        self._ahead, self._n_left, self._expected = what, n_steps, None
        return self._ticket

    def note_step(self, share: Share) -> None:
        """Note which share the job uses now: samples of that step may be asked for again."""
        self._expected = _one_step_later(share)
        self._keep_from = share.stop - share.batch  # where the step begins, or earlier

    def __iter__(self) -> Iterator[_Task]:
        while True:
            what, self._n_left = self._ahead, self._n_left - 1
            if isinstance(what, Share) and self._n_left >= 0:
                self._ahead = _one_step_later(what)
                indices = self._order.samples(what.start, what.stop).tolist()
                request = BatchRequest(what.start, tuple(indices), self._keep_from, what.position)
                yield _Task(self._ticket, request)
            else:
                self._ahead = None
                yield _Task(self._ticket, what if isinstance(what, int) else None)


class _Answers(Dataset[Any]):
    """What loader workers run: it takes tasks for indices, as a data set that knows batches."""

    def __init__(self, maker: SampleMaker, newest: Any) -> None:
        self._maker, self._newest = maker, newest

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError("loader workers ask for whole batches")

    def __getitems__(self, task: Any) -> tuple[int, int, Any, Seen | None]:
        """Return the ticket, the place of the first sample, and the batch, a sample or an error.

        Beside a batch: what was read of a stream before its step.
        """
        ticket, what = task.ticket, task.what
        try:
            if isinstance(what, BatchRequest):
                made = self._maker.batch(what, lambda: bool(self._newest.value == ticket))
                return ticket, what.start, made, self._maker.seen(what)
            return ticket, 0, None if what is None else self._maker.sample(what), None
        except Exception:  # raised again in the worker, if the task is still wanted there
            wrapped = ExceptionWrapper(where="in a loader worker")  # type: ignore[no-untyped-call]
            return ticket, 0, wrapped, None


def _one_step_later(share: Share) -> Share:
    n = share.batch
    return replace(share, start=share.start + n, stop=share.stop + n, position=share.position + n)


def _as_it_is(answer: Any) -> Any:
    return answer


def _kill(iterator: Any) -> None:
    for process in getattr(iterator, "_workers", ()):
        process.kill()


@dataclass(frozen=True)
class _LoaderStart:
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


def _how_one_died(workers: Sequence[BaseProcess]) -> str | None:
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


class _DeathWatch:
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
