"""Runs a coordinator with real sockets and the real clock: one thread, one selector."""

import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Final

from meshmend.errors import ChannelError, MessageError
from meshmend.membership.coordinator import Coordinator
from meshmend.membership.events import Event
from meshmend.membership.job import JobSpec
from meshmend.membership.job_status import JobStatus
from meshmend.membership.messages import (
    COORDINATOR,
    Message,
    packed_message,
    received_messages,
)
from meshmend.membership.record_file import RecordFile, RecordSaver, load_history
from meshmend.processes import allow_open_files
from meshmend.topology.failures import Chip
from meshmend.transport.channel import Channel
from meshmend.transport.event_fd import clear
from meshmend.transport.handshake import ConnectRequest
from meshmend.transport.listener import Listener
from meshmend.transport.liveness import keep_alive

_log = getLogger(__name__)

# Limits of a message to the coordinator. The longest is a hello, with all chips of a generation.
_LONGEST_BYTES: Final = 1 << 16
_BYTES_PER_CHIP: Final = 1 << 10
_SNAPSHOT_S: Final = 2.0


@dataclass(frozen=True)
class JobSnapshot:
    """How a job is at one moment, and the bytes that its chips have sent to each other."""

    status: JobStatus
    traffic: Mapping[Chip, Mapping[Chip, int]]


class CoordinatorServer:
    """Serves one job until all its workers have finished.

    `on_event` is called with every event that observers get. `record_file` holds what the next
    coordinator of the job must know if this one dies. `restarted`: no worker of the run that it
    records is left, so the job goes on from a checkpoint at once, or begins again without one.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        spec: JobSpec,
        *,
        record_file: Path | None = None,
        restarted: bool = False,
        on_event: Callable[[float, Event], None] = lambda clock, event: None,
    ) -> None:
        n_chips = spec.mesh.n_chips
        # Chips that call again may do so before the kernel has told that they hung up.
        allow_open_files(2 * n_chips, f"a coordinator of {n_chips} chips")
        self._record_file = record_file
        on_disk = RecordFile(record_file) if record_file else None
        self._saver = RecordSaver(on_disk.save if on_disk else lambda record: None)
        self._link_timeout_s = spec.timing.link_timeout_s
        self._longest_bytes = _LONGEST_BYTES + _BYTES_PER_CHIP * n_chips
        history = load_history(record_file, spec.job) if record_file else None
        if history is not None and not history.is_new:
            history.is_restarted = restarted
        self._coordinator = Coordinator(
            spec,
            self,
            history=history,
            token=secrets.randbits(32),
            keep=self._saver.save,
            term_on_disk=on_disk.term if on_disk else lambda: 0,
            on_event=on_event,
        )
        self._channels: dict[int, Channel] = {}
        self._congested: set[int] = set()  # connections that have not taken all that was sent
        self._broken: list[tuple[int, str]] = []  # connections that failed while we sent
        self._n_opened = 0
        self._is_stopped = False
        self._callers: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._readers: queue.SimpleQueue[queue.SimpleQueue[JobSnapshot]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # -1: closed
        self._waking = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._packed: tuple[Message | None, bytes] = None, b""  # the last message that was sent
        self._listener = Listener(
            listener,
            secret,
            COORDINATOR,
            name="the coordinator",
            admit=self._admit,
            n_expected=n_chips,
        )

    def serve(self) -> None:
        """Serve until all workers have finished and left, or until `stop` is called."""
        while not (self._coordinator.is_done or self._is_stopped):
            self._turn()

    def linger(self, seconds: float) -> None:
        """Serve on for this time, to tell a worker that comes late that the job is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._is_stopped:
            self._turn()

    def _turn(self) -> None:
        now = time.monotonic()
        self._handle(self._coordinator.next_wakeup(now) - now)
        self._coordinator.tick(time.monotonic())
        self._saver.retry()
        self._report_broken()

    def stop(self) -> None:
        """Make `serve` return soon; any thread may call this, also after `close`."""
        self._is_stopped = True
        self._wake()

    def _wake(self) -> None:
        with self._waking:  # else another file could get the number of one that is closed
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def snapshot(self) -> "JobSnapshot":
        """Return how the job is now; any thread but that of `serve` may call this.

        Raises:
            TimeoutError: `serve` does not run, or is held up.
        """
        answer: queue.SimpleQueue[JobSnapshot] = queue.SimpleQueue()
        self._readers.put(answer)
        self._wake()
        try:
            return answer.get(timeout=_SNAPSHOT_S)
        except queue.Empty:
            raise TimeoutError("the coordinator does not answer") from None

    @property
    def is_over(self) -> bool:
        """Whether the job has finished or failed, and no other coordinator serves it."""
        return self._coordinator.is_done and not self.is_superseded

    @property
    def failure(self) -> str:
        """Why the job could not go on; empty if it has not failed."""
        return self._coordinator.failure

    @property
    def is_superseded(self) -> bool:
        """Whether it has ended because another coordinator took its place."""
        return self._coordinator.is_superseded

    def close(self) -> None:
        """Close the listener and all connections; delete the record of a job that is done."""
        if self._record_file is not None and self._coordinator.is_done and not self.failure:
            _delete_record(self._record_file)
        self._listener.close()
        while not self._callers.empty():  # who was admitted after the last turn
            self._callers.get().close()
        for channel in self._channels.values():
            channel.close()
        self._selector.close()
        with self._waking:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def send(self, connection: int, message: Message) -> None:
        """Send a message over a connection; a failure is reported later."""
        channel = self._channels.get(connection)
        if channel is None:
            return
        try:
            if message is not self._packed[0]:  # one for all workers is encoded once
                self._packed = message, packed_message(message)
            channel.send_packed(self._packed[1])
            self._watch(connection)
        except ChannelError as error:
            self._broken.append((connection, str(error)))

    def hang_up(self, connection: int) -> None:
        """Close a connection."""
        if (channel := self._channels.pop(connection, None)) is not None:
            self._congested.discard(connection)
            self._selector.unregister(channel)
            channel.close()

    def _admit(self, connection: socket.socket, request: ConnectRequest) -> None:
        self._callers.put(connection)
        self._wake()

    def _handle(self, timeout_s: float) -> None:
        for key, events in self._selector.select(max(0.0, timeout_s)):
            if key.fd == self._wake_fd:
                clear(self._wake_fd)
            elif key.data in self._channels:
                self._serve_one(key.data, events)
        self._report_broken()
        # New connections come last: a dead worker is removed before its replacement says hello.
        while not self._callers.empty():
            self._open(self._callers.get())
        while not self._readers.empty():
            status = self._coordinator.status(time.monotonic())
            traffic = {chip: dict(sent) for chip, sent in self._coordinator.traffic.items()}
            self._readers.get().put(JobSnapshot(status, traffic))

    def _serve_one(self, connection: int, events: int) -> None:
        channel = self._channels[connection]
        try:
            if events & selectors.EVENT_WRITE:
                channel.flush()
                self._watch(connection)
            if events & selectors.EVENT_READ:
                for message in received_messages(channel):
                    self._coordinator.received(connection, message, time.monotonic())
        except ChannelError as error:
            self._lose(connection, str(error))
        except MessageError as error:
            self._coordinator.refuse(connection, str(error), time.monotonic())
        except Exception as error:  # one bad message must not stop the service for the others
            _log.exception("the coordinator failed to handle a message; it closes that connection")
            why = f"a message that the coordinator cannot handle ({error!r})"
            self._coordinator.refuse(connection, why, time.monotonic())

    def _open(self, connection: socket.socket) -> None:
        try:
            host, port = connection.getpeername()[:2]
            keep_alive(connection, self._link_timeout_s)  # observers may send nothing
        except OSError:  # the other end has closed already
            connection.close()
            return
        channel = Channel(connection, longest_bytes=self._longest_bytes)
        self._n_opened += 1
        self._channels[self._n_opened] = channel
        self._selector.register(channel, selectors.EVENT_READ, self._n_opened)
        self._coordinator.opened(self._n_opened, f"{host}:{port}", time.monotonic())

    def _watch(self, connection: int) -> None:
        """Wait until a connection takes more, if it has not taken all that was sent."""
        channel = self._channels[connection]
        if channel.has_unsent == (connection in self._congested):
            return
        self._congested ^= {connection}
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
        self._selector.modify(channel, events, connection)

    def _report_broken(self) -> None:
        while self._broken:
            self._lose(*self._broken.pop(0))

    def _lose(self, connection: int, why: str) -> None:
        self.hang_up(connection)
        self._coordinator.closed(connection, why, time.monotonic())


def _delete_record(file: Path) -> None:
    """Delete the record of a job that is done; if the disk does not let it, say so in a line."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        _log.error(
            "the job is over, but its record %s cannot be deleted: %s; delete it, or begin the "
            "next job with --new",
            file,
            error.strerror,
        )
