"""The runs of one rank that are in flight, and who drives the event loop for them.

One thread at a time drives the loop: a caller that waits for its own run, or else a thread of its
own, which is made when a run is first started without waiting. A run that is started meanwhile
wakes the loop. When one run fails, all fail: bytes of any of them may be half sent. While nothing
moves, Python handles signals in the thread that drives; a handler may stop all runs.

The tables of a run are made once per task, kept, and used again by later runs.
"""

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from meshmend.errors import InputError, StoppedError, TransportError
from meshmend.transport import event_loop
from meshmend.transport.event_fd import clear
from meshmend.transport.event_loop import empty_loop, progress
from meshmend.transport.liveness import LinkWatch
from meshmend.transport.tasks import SEND, Bytes, Numbers, Task

_WORD: Final = 1 << 32
_LONGEST_INTERVAL_S: Final = 1.0  # between two looks whether anything moves

_MOST_KEPT: Final = 8  # tables of one task; each holds memory for data that arrives early

# Called with a status, the peer at fault, and the time allowed; returns what the runs raise.
OnFailure = Callable[[int, int, float], TransportError]


class PendingRun:
    """A run of a task in flight; its payload belongs to the transport until `wait` is over."""

    def __init__(
        self, runs: "RunsInFlight", number: int, owned: "_Owned", timeout_s: float, event_fd: int
    ) -> None:
        self._runs = runs
        self.number = number
        self.timeout_s = timeout_s
        self.event_fd = event_fd
        self.n_waiting = 0  # threads that wait for the event
        self.error: TransportError | None = None
        self._owned: _Owned | None = owned

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._runs.has_ended(self)

    @property
    def is_settled(self) -> bool:
        """Whether the run has ended and the event loop uses nothing of it any more."""
        return self._owned is None

    @property
    def peers(self) -> list[int]:
        """The ranks that a run which is not settled exchanges data with."""
        return [] if self._owned is None else self._owned.task_tables.peers.tolist()

    def wait(self) -> None:
        """Return when the payload is what the task makes of it; raise what `run` raises."""
        self._runs.wait_for(self)
        if self.error is not None:
            raise type(self.error)(str(self.error), self.error.rank)

    def settle(self, error: TransportError | None) -> None:
        """Note how the run ended, and free what it used."""
        assert self._owned is not None, "a run is settled once"
        self._owned.task_tables.give_back(self._owned.tables)
        self._owned, self.error = None, error
        if error is not None:
            os.eventfd_write(self.event_fd, 1)
        self.close_unused()

    def close_unused(self) -> None:
        """Close the event descriptor if the run is settled and nobody waits there."""
        if self.is_settled and self.n_waiting == 0 and self.event_fd >= 0:
            os.close(self.event_fd)
            self.event_fd = -1


class RunsInFlight:
    """The runs of one rank over its connections, which are file descriptors in `loop.links`."""

    def __init__(
        self,
        n_links: int,
        connections: Mapping[int, socket.socket],
        on_failure: OnFailure,
        *,
        stop_fd: int,
        link_timeout_s: float = 0.0,
    ) -> None:
        self.loop = empty_loop(n_links)
        self.broken: TransportError | None = None  # why no run can be started before `renew`
        self._connections = connections
        self._on_failure = on_failure
        self._stop_fd = stop_fd
        self._link_timeout_s = link_timeout_s
        self._scratch = np.empty((n_links, event_loop.BLOCK_BYTES), dtype=np.uint8)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._fds = np.array([self._wake_fd, stop_fd], dtype=np.int64)
        self._tables: WeakKeyDictionary[Task, _TaskTables] = WeakKeyDictionary()
        self._pending: deque[PendingRun] = deque()  # in the order of their numbers
        self._changed = threading.Condition()  # guards what follows, and who drives
        self._driver: int | None = None  # the thread that drives
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self, task: Task, payload: Bytes, timeout_s: float, *, wakes: bool) -> PendingRun:
        """Start a run; whoever drives takes it along, else the thread if this `wakes` it.

        Nobody drives a run that wakes no thread before somebody waits for it.
        """
        if payload.nbytes != task.n_bytes:
            raise InputError(f"the task needs {task.n_bytes} bytes, but got {payload.nbytes}")
        while True:
            with self._changed:
                self._refuse_in_handler()
                self._reap()
                if self.broken is not None:
                    raise type(self.broken)(str(self.broken), self.broken.rank)
                if len(self._pending) < event_loop.MOST_RUNS:
                    run = self._enter(task, payload, timeout_s)
                    if self._driver is not None:
                        os.eventfd_write(self._wake_fd, 1)
                    elif wakes:
                        self._wake_thread()
                    return run
                oldest = self._pending[0]
            self.wait_for(oldest)

    def has_ended(self, run: PendingRun) -> bool:
        """Whether a run has ended, with or without an error."""
        with self._changed:
            return self._has_ended(run)

    def wait_for(self, run: PendingRun) -> None:
        """Return when a run has ended; drive the loop if nobody does."""
        with self._changed:
            if self._has_ended(run):
                return
            self._refuse_in_handler()
            must_drive = self._driver is None
            if must_drive:
                self._driver = threading.get_ident()
            run.n_waiting += not must_drive
        if must_drive:
            self._drive(run)
            return
        try:
            poll = select.poll()
            poll.register(run.event_fd, select.POLLIN)
            poll.poll()
        finally:
            with self._changed:
                run.n_waiting -= 1
                run.close_unused()

    def stop(self) -> None:
        """Make all runs in flight fail with StoppedError; return when nobody drives the loop."""
        with self._changed:
            if not self._pending and self._driver is None:
                return
            if self._driver == threading.get_ident():  # in the handler of a signal
                self._leave(StoppedError("stopped by the handler of a signal"))
                return
            os.eventfd_write(self._stop_fd, 1)
            if self._driver is None:  # nobody has waited for these runs yet
                self._wake_thread()
            self._changed.wait_for(lambda: not self._pending and self._driver is None)
            if self.broken is None:  # all have ended before they could be stopped
                clear(self._stop_fd)

    def renew(self, generation: int) -> None:
        """Begin to number runs anew in a new generation."""
        with self._changed:
            self._clear()
            self.loop.numbers[event_loop.GENERATION] = generation
            self.broken = None

    def peers_in_use(self) -> set[int]:
        """Return the ranks that some run in flight exchanges data with."""
        with self._changed:
            self._reap()
            return {peer for run in self._pending for peer in run.peers}

    def close(self) -> None:
        """Stop all runs, and end the thread."""
        self.stop()
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self.broken = TransportError("the transport is closed")
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake_fd)

    def _refuse_in_handler(self) -> None:
        """Raise InputError in the handler of a signal that has interrupted the loop: it rests."""
        if self._driver == threading.get_ident():
            raise InputError(
                "a collective needs that its thread is in no other one, but this one was called in "
                "the handler of a signal that interrupted another; set a flag in the handler, and "
                "call it in the loop"
            )

    def _enter(self, task: Task, payload: Bytes, timeout_s: float) -> PendingRun:
        """Write a new run to the tables of the loop."""
        if (task_tables := self._tables.get(task)) is None:
            task_tables = self._tables[task] = _TaskTables(task, len(self.loop.links))
        owned = _Owned(task_tables, task_tables.take(), payload)
        numbers = self.loop.numbers
        number = int(numbers[event_loop.LAST_STARTED]) + 1
        slot = number % event_loop.MOST_RUNS
        event_fd = os.eventfd(0, os.EFD_CLOEXEC)
        line = self.loop.runs[slot]
        task_tables.enter(owned.tables, payload, line, self.loop.ports[slot])
        line[event_loop.CALL] = int(numbers[event_loop.GENERATION]) * _WORD + number
        line[event_loop.DONE_FD] = event_fd
        run = PendingRun(self, number, owned, timeout_s, event_fd)
        self._pending.append(run)
        numbers[event_loop.LAST_STARTED] = number
        return run

    def _wake_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="meshmend-loop", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closed or (self._pending and self._driver is None)
                )
                if self._is_closed:
                    return
                self._driver = threading.get_ident()
            self._drive(None)

    def _drive(self, run: PendingRun | None) -> None:
        """Drive the loop until a run has ended, or without one until all have."""
        number = run.number if run is not None else 0
        error: TransportError | None = None
        try:
            while error is None:
                status, peer = self._until_still(number)
                if status != event_loop.DONE:
                    error = self._on_failure(status, peer, self._patience_s())
                    break
                with self._changed:
                    self._reap()
                    is_over = self._has_ended(run) if run is not None else not self._pending
                    if is_over:
                        break
        except BaseException as raised:  # such as KeyboardInterrupt, in a caller that drives
            error = TransportError(f"the event loop was left in the middle of a run: {raised!r}")
            raise
        finally:
            self._leave(error)

    def _leave(self, error: TransportError | None) -> None:
        """Stop driving; without an error the thread goes on with what is in flight."""
        with self._changed:
            if self._driver != threading.get_ident():  # a handler of a signal has stopped all runs
                return
            self._driver = None
            if error is not None:
                self._fail(error)
            elif self._pending:
                self._wake_thread()
            self._changed.notify_all()

    def _until_still(self, number: int) -> tuple[int, int]:
        """Run the loop to the end of a run; while nothing moves, check that all peers answer."""
        watches: dict[int, LinkWatch] = {}
        before, still_since = b"", time.monotonic()
        while True:
            timeout_s = self._patience_s()
            link_s = LinkWatch(self._link_timeout_s).interval_s or timeout_s
            interval_s = min(link_s, timeout_s, _LONGEST_INTERVAL_S)
            status, peer = progress(
                self.loop,
                number,
                self._scratch.ctypes.data,
                max(1, int(1e3 * interval_s)),
                self._fds,
            )
            if status == event_loop.SIGNALLED and self._driver != threading.get_ident():
                return event_loop.DONE, -1
            if status not in (event_loop.TIMED_OUT, event_loop.SIGNALLED):
                return status, peer
            now = time.monotonic()
            state = self.loop.links.tobytes() + self.loop.runs.tobytes()
            if state != before:
                still_s = interval_s if status == event_loop.TIMED_OUT else 0.0
                before, still_since = state, now - still_s
            if now - still_since >= timeout_s:
                return event_loop.TIMED_OUT, -1
            if not self._link_timeout_s:
                continue
            if (silent := self._silent_peer(watches, now)) is not None:
                return event_loop.SILENT, silent
            if now - still_since >= self._link_timeout_s and (ahead := self._peers_ahead()):
                return event_loop.AHEAD, ahead[0]

    def _silent_peer(self, watches: dict[int, LinkWatch], now: float) -> int | None:
        for peer in np.flatnonzero(self.loop.links[:, event_loop.N_USERS]).tolist():
            watch = watches.setdefault(peer, LinkWatch(self._link_timeout_s))
            if watch.is_dead(self._connections[peer], now):
                return int(peer)
        return None

    def _peers_ahead(self) -> list[int]:
        """Return the peers in a later generation from which a run of this one waits for frames.

        The others learn of a new generation soon after the first; who learns nothing of it for long
        has been sent a frame that cannot be right, or has lost the coordinator.
        """
        links = self.loop.links
        is_ahead = (links[:, event_loop.IN_PARKED] > 0) & (links[:, event_loop.N_TO_COME] > 0)
        found: list[int] = np.flatnonzero(is_ahead).tolist()
        return found

    def _patience_s(self) -> float:
        """Return how long nothing may move: the shortest time that a run in flight allows."""
        with self._changed:
            return min((run.timeout_s for run in self._pending), default=_LONGEST_INTERVAL_S)

    def _has_ended(self, run: PendingRun) -> bool:
        if run.is_settled:
            return True
        return bool(self.loop.runs[run.number % event_loop.MOST_RUNS, event_loop.ENDED])

    def _reap(self) -> None:
        """Settle the runs before the oldest that has not ended."""
        oldest = self.loop.numbers[event_loop.OLDEST]
        while self._pending and self._pending[0].number < oldest:
            self._pending.popleft().settle(None)

    def _fail(self, error: TransportError) -> None:
        """Fail what is in flight; void half-sent frames, so that the next can be recognised."""
        self.broken = error
        links = self.loop.links
        links[links[:, event_loop.OUT_KEY] >= 0, event_loop.OUT_KEY] = event_loop.TAIL
        links[links[:, event_loop.IN_PARKED] == 0, event_loop.IN_MODE] = event_loop.DROP
        self._reap()
        while self._pending:
            run = self._pending.popleft()
            run.settle(None if self._has_ended(run) else error)
        self._clear()

    def _clear(self) -> None:
        """Forget all runs; connections, and frames in the middle of being sent or read, stay."""
        assert not self._pending, "runs are stopped before they are forgotten"
        links, numbers = self.loop.links, self.loop.numbers
        links[:, event_loop.COUNTS_OF_RUNS] = 0
        links[:, event_loop.TO_ANNOUNCE] = links[:, event_loop.ANNOUNCED]
        last = int(numbers[event_loop.LAST_STARTED])
        self.loop.ports[: min(last, event_loop.MOST_RUNS - 1) + 1] = 0
        numbers[[event_loop.LAST_STARTED, event_loop.LAST_BEGUN]] = 0
        numbers[event_loop.OLDEST] = 1


@dataclass(frozen=True, eq=False)
class _RunTables:
    """What one run changes while it runs: which keys wait, are ready, or are staged."""

    keys: Numbers
    heap: Numbers
    stack: Numbers
    staging: Bytes

    @cached_property
    def addresses(self) -> Numbers:
        """Where they are in memory, in the order of the columns of `runs`."""
        tables = self.staging, self.keys, self.heap, self.stack
        return np.array([each.ctypes.data for each in tables])


class _TaskTables:
    """What all runs of one task have in common, and the tables of runs that have ended."""

    def __init__(self, task: Task, n_links: int) -> None:
        program, layout = task.program, task.layout
        n_moves, n_keys = program.n_moves, len(layout.size)
        self._staging_bytes = layout.staging_bytes
        self._kept: list[_RunTables] = []
        self.peers = np.array(program.peers, dtype=np.int64)
        self._moves = np.zeros((event_loop.N_MOVE_LINES, n_moves + 1), dtype=np.int64)
        self._moves[event_loop.FOLLOWING] = program.following_ptr
        self._moves[:4, :-1] = program.kind, program.row, program.peer, program.needs
        self._moves[event_loop.LEVEL, :-1] = task.levels
        self._following = np.ascontiguousarray(program.following, dtype=np.int64)
        self._keys = np.zeros((event_loop.N_KEY_LINES, n_keys), dtype=np.int64)
        needs = np.tile(program.needs, layout.n_slices)
        self._keys[:4] = layout.start, layout.size, layout.staging_offset, needs
        self._keys[event_loop.SOURCE] = layout.source
        self._ports = _ports(task, self.peers, n_links)
        self._line = np.zeros(event_loop.N_RUN_COLUMNS, dtype=np.int64)
        self._line[:6] = n_keys, 0, task.fingerprint, task.code, n_moves, n_keys
        self._line[event_loop.MOVES_AT] = self._moves.ctypes.data
        self._line[event_loop.FOLLOWING_AT] = self._following.ctypes.data

    def take(self) -> _RunTables:
        """Return tables for a run that has not begun."""
        if self._kept:
            tables = self._kept.pop()
            tables.keys[:] = self._keys
            return tables
        n_keys = self._keys.shape[1]
        return _RunTables(
            keys=self._keys.copy(),
            heap=np.empty(n_keys + 1, dtype=np.int64),
            stack=np.empty(n_keys + 1, dtype=np.int64),
            staging=np.empty(self._staging_bytes, dtype=np.uint8),
        )

    def give_back(self, tables: _RunTables) -> None:
        """Keep the tables of a run that has ended for a later run."""
        if len(self._kept) < _MOST_KEPT:
            self._kept.append(tables)

    def enter(self, tables: _RunTables, payload: Bytes, line: Numbers, ports: Numbers) -> None:
        """Write a run to its line of `runs` and its lines of `ports`."""
        line[:] = self._line
        line[event_loop.PAYLOAD] = payload.ctypes.data
        line[event_loop.STAGING : event_loop.STACK_AT + 1] = tables.addresses
        ports[self.peers] = self._ports


def _ports(task: Task, peers: Numbers, n_links: int) -> Numbers:
    """Return what a run exchanges with each of its peers when it begins."""
    program, n_slices = task.program, task.layout.n_slices
    is_send = program.kind == SEND
    n_sends = np.bincount(program.peer[is_send], minlength=n_links) * n_slices
    has_bytes = task.layout.size > 0
    sends, peer_of_key = np.tile(is_send, n_slices), np.tile(program.peer, n_slices)
    comes = np.tile(~is_send & ~program.is_local, n_slices) & has_bytes
    ports = np.zeros((n_links, event_loop.N_PORT_COLUMNS), dtype=np.int64)
    ports[:, event_loop.HEAP_BASE] = np.cumsum(n_sends) - n_sends
    ports[:, event_loop.UNSENT] = np.bincount(peer_of_key[sends & has_bytes], minlength=n_links)
    ports[:, event_loop.EXPECTED] = np.bincount(peer_of_key[comes], minlength=n_links)
    ports[:, event_loop.IS_USED] = 1
    return ports[peers]


@dataclass(frozen=True, eq=False)
class _Owned:
    """What the event loop reads and writes by address: kept alive while a run is in flight."""

    task_tables: _TaskTables
    tables: _RunTables
    payload: Bytes
