"""Runs tasks over TCP: one authenticated connection per pair of ranks that exchange data.

Connections outlive collectives and generations. If a run is interrupted in the middle of a frame,
the rest of the frame is still sent later, and the receiver drops it. So the receiver always knows
where the next frame begins.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from meshmend.errors import (
    InputError,
    MismatchError,
    PeerLostError,
    StalledError,
    StoppedError,
    TransportError,
)
from meshmend.execute import frames
from meshmend.execute.combine import bind_combine
from meshmend.execute.event_loop import begin, progress
from meshmend.execute.frames import Engine
from meshmend.execute.peer_connections import PeerConnections, has_ended
from meshmend.execute.rank_program import SEND, Numbers
from meshmend.execute.transport import Bytes, Task, describe_fingerprint
from meshmend.net.event_fd import clear, is_set
from meshmend.net.listener import Address
from meshmend.net.liveness import LinkWatch, acknowledged_bytes, keep_alive

# Urgent data cannot overtake data in the buffers of the kernel, so these buffers are small: few
# unsent bytes at the sender, a small receive buffer at the receiver. With default buffers TCP
# queued 16 to 25 ms a hop over slow links, which cost trees a sixth of their time. A fast link with
# a long round trip needs a larger window.
_UNSENT_BYTES: Final = 1 << 13
WINDOW_BYTES: Final = 20_000
_REPORT_S: Final = 0.25  # for sending or reading the reason of a failure
_LONGEST_TEXT: Final = 4096
_WORD: Final = 1 << 32


class SocketTransport:
    """The connections of one rank, and the runs of tasks over them.

    Messages call a rank by `labels[rank]`. With `reports_failures`, a rank that fails sends the
    reason to its peers, which fail with the same text: every rank learns of a failure at once.
    Otherwise it sends nothing, and can continue after `renew`. A peer on another address may send
    `window_bytes` ahead; with 0, and on loopback, the kernel decides. A peer is lost when its
    kernel answers nothing for `link_timeout_s`; a busy peer is not lost. With 0 none ever is.
    """

    def __init__(
        self,
        rank: int,
        labels: Sequence[str],
        secret: bytes,
        *,
        bind: str = "127.0.0.1",
        reports_failures: bool = False,
        window_bytes: int = WINDOW_BYTES,
        link_timeout_s: float = 0.0,
    ) -> None:
        self.rank = rank
        self._link_timeout_s = link_timeout_s
        self._window_bytes = window_bytes
        self.generation = 0
        self._labels = tuple(labels)
        self._reports_failures = reports_failures
        self._sequence = 0
        self._broken = ""
        self._sockets: dict[int, socket.socket] = {}
        self._epochs: dict[int, int] = {}
        self._counted: dict[int, int] = {}
        self._sent_before: dict[int, int] = {}  # bytes, over connections that are closed
        self._links = np.empty((len(labels), frames.N_LINK_COLUMNS), dtype=np.int64)
        self.drop(range(len(labels)))
        self._scratch = np.empty((len(labels), frames.BLOCK_BYTES), dtype=np.uint8)
        self._staging = np.empty(0, dtype=np.uint8)
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._peer_connections = PeerConnections(
            rank,
            self._labels,
            secret,
            bind=bind,
            stop_fd=self._stop_fd,
            link_timeout_s=link_timeout_s,
        )
        self.address: Address = self._peer_connections.address
        bind_combine()

    def connect(
        self,
        addresses: Mapping[int, Address],
        *,
        epochs: Mapping[int, int] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Keep or make a connection to each of these ranks.

        With `epochs`, an old connection of another epoch is closed first, and both ends must name
        the same epoch. So a rank that left and joined again never uses its old connection.

        Raises:
            PeerLostError: one cannot be reached in time. HandshakeError: the secrets differ.
            StoppedError: `interrupt` was called.
        """
        deadline = time.monotonic() + timeout_s
        wanted = {peer: (epochs or {}).get(peer, 0) for peer in addresses}
        self.drop([peer for peer in wanted if not self._is_kept(peer, wanted[peer])])
        missing = [peer for peer in addresses if not self._is_linked(peer)]
        try:
            for peer in sorted(missing, reverse=True):  # dials first, then waits for calls
                connection = self._peer_connections.connection(
                    peer, addresses[peer], deadline, epoch=wanted[peer]
                )
                self._link(peer, connection, wanted[peer])
        except StoppedError:
            clear(self._stop_fd)
            raise

    def run(self, task: Task, payload: Bytes, *, timeout_s: float = 1800.0) -> None:
        """Send and receive what the task says, in place in the payload's bytes.

        Raises:
            PeerLostError, MismatchError, StoppedError, StalledError: see `transport`. The
            transport can then not run another task before `renew`.
        """
        if self._broken:
            raise TransportError(self._broken)
        if payload.nbytes != task.n_bytes:
            raise InputError(f"the task needs {task.n_bytes} bytes, but got {payload.nbytes}")
        self._sequence += 1
        if len(self._staging) < task.layout.staging_bytes:
            self._staging = np.empty(task.layout.staging_bytes, dtype=np.uint8)
        peers = np.array(task.program.peers, dtype=np.int64)
        engine = self._engine(task, payload)
        status, peer = begin(engine, peers)
        if status == frames.DONE:
            status, peer = self._until_done(engine, peers, timeout_s)
        if status != frames.DONE:
            self._abandon()
            raise self._failure(status, peer, task, timeout_s)

    def interrupt(self) -> None:
        """Make the current run or connect raise StoppedError, or the next one if there is none."""
        os.eventfd_write(self._stop_fd, 1)
        self._peer_connections.wake()

    def renew(self, generation: int) -> None:
        """Begin a new generation on the open connections; frames of older ones will be dropped."""
        if generation <= self.generation:
            raise InputError(
                f"renew needs a generation above {self.generation}, but got {generation}"
            )
        self.generation, self._sequence, self._broken = generation, 0, ""
        self.drop(np.flatnonzero(self._links[:, frames.CLOSED]).tolist())
        self.drop([peer for peer, connection in self._sockets.items() if has_ended(connection)])
        clear(self._stop_fd)

    def drop(self, peers: Iterable[int]) -> None:
        """Close the connections to these ranks; `connect` makes new ones when needed."""
        for peer in peers:
            if connection := self._sockets.pop(peer, None):
                sent = self._sent_before.get(peer, 0) + acknowledged_bytes(connection)
                self._sent_before[peer] = sent
                connection.close()
                del self._epochs[peer]
            self._links[peer] = 0
            self._links[peer, [frames.FD, frames.IN_KEY, frames.OUT_KEY]] = -1

    def sever(self, peer: int) -> None:
        """Break the connection to a rank, as a cut link would; any thread may call this."""
        if connection := self._sockets.get(peer):
            with suppress(OSError):  # it may be broken already
                connection.shutdown(socket.SHUT_RDWR)

    def answer_askers(self, on_asker: Callable[[socket.socket], None]) -> None:
        """Pass on callers that want anyone; `on_asker` runs in another thread, without blocking."""
        self._peer_connections.on_asker = on_asker

    def sent_bytes(self) -> dict[int, int]:
        """Return how many bytes each rank has got from this one; any thread may call this."""
        sent = dict(self._sent_before)
        for peer, connection in list(self._sockets.items()):
            sent[peer] = sent.get(peer, 0) + acknowledged_bytes(connection)
        # A connection that is being closed may be missing for a moment; a count never falls.
        self._counted = {peer: max(n, self._counted.get(peer, 0)) for peer, n in sent.items()}
        return self._counted

    def check(self) -> None:
        """Raise StoppedError if `interrupt` was called: for a rank that waits for no peers."""
        if is_set(self._stop_fd):
            clear(self._stop_fd)
            raise StoppedError(f"{self._me} was told to stop")

    def close(self) -> None:
        """Close all connections and stop listening."""
        self._peer_connections.close()
        for connection in self._sockets.values():
            connection.close()
        self._links[:, frames.FD] = -1

    def __enter__(self) -> "SocketTransport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _me(self) -> str:
        return self._labels[self.rank]

    def _is_kept(self, peer: int, epoch: int) -> bool:
        """Whether the connection to a rank is of this epoch and, as far as this end knows, open.

        A peer that was interrupted while it connected has closed; it calls again in that epoch.
        """
        connection = self._sockets.get(peer)
        if connection is None or self._epochs.get(peer) != epoch:
            return False
        return not self._peer_connections.has_new_call(peer, epoch) and not has_ended(connection)

    def _is_linked(self, peer: int) -> bool:
        return bool(self._links[peer, frames.FD] >= 0)

    def _link(self, peer: int, connection: socket.socket, epoch: int) -> None:
        try:
            self._set_up(connection)
        except OSError as error:  # the peer may have closed already
            connection.close()
            raise PeerLostError(
                f"{self._labels[peer]} hung up on {self._me}: {error.strerror}", peer
            ) from None
        self._sockets[peer], self._epochs[peer] = connection, epoch
        self._links[peer, frames.FD] = connection.fileno()

    def _set_up(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        if self._window_bytes and not connection.getpeername()[0].startswith("127."):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._window_bytes)
        if self._link_timeout_s:
            keep_alive(connection, self._link_timeout_s)

    def _until_done(self, engine: Engine, peers: Numbers, timeout_s: float) -> tuple[int, int]:
        """Run a task to its end; while nothing moves, check that all peers still answer."""
        watches = {peer: LinkWatch(self._link_timeout_s) for peer in self._watched(peers)}
        interval_s = min([watch.interval_s for watch in watches.values()], default=timeout_s)
        interval_ms = int(min(1e3 * interval_s, 1e3 * timeout_s, 2**31 - 1))
        before, still_since = b"", time.monotonic()
        while True:
            status, peer = progress(engine, peers, self._stop_fd, interval_ms)
            if status != frames.TIMED_OUT:
                return status, peer
            now, state = time.monotonic(), engine.links.tobytes() + engine.numbers.tobytes()
            if state != before:
                before, still_since = state, now - 1e-3 * interval_ms
            if now - still_since >= timeout_s:
                return status, peer
            for each, watch in watches.items():
                if watch.is_dead(self._sockets[each], now):
                    return frames.SILENT, each

    def _watched(self, peers: Numbers) -> list[int]:
        return peers.tolist() if self._link_timeout_s else []

    def _engine(self, task: Task, payload: Bytes) -> Engine:
        program, layout = task.program, task.layout
        n_keys = len(layout.size)
        sends = np.bincount(program.peer[program.kind == SEND], minlength=len(self._labels))
        self._links[:, frames.HEAP_BASE] = (np.cumsum(sends) - sends) * layout.n_slices
        self._links[:, frames.HEAP_SIZE] = 0
        moves = np.zeros((5, program.n_moves + 1), dtype=np.int64)
        moves[frames.FOLLOWING] = program.following_ptr
        moves[:4, :-1] = program.kind, program.row, program.peer, program.needs
        keys = np.zeros((5, n_keys), dtype=np.int64)
        needs = np.tile(program.needs, layout.n_slices)
        keys[:4] = layout.start, layout.size, layout.staging_offset, needs
        call = self.generation * _WORD + self._sequence
        addresses = [array.ctypes.data for array in (payload, self._staging, self._scratch)]
        return Engine(
            moves=moves,
            following=program.following,
            keys=keys,
            heap=np.empty(n_keys, dtype=np.int64),
            stack=np.empty(n_keys + 1, dtype=np.int64),
            links=self._links,
            numbers=np.array(
                [n_keys, call, task.fingerprint, task.code, program.n_moves, *addresses]
            ),
        )

    def _abandon(self) -> None:
        """Mark all frames in progress as void, so that later frames can still be recognised."""
        links = self._links
        links[:, frames.IN_EXPECTED] = 0
        links[links[:, frames.OUT_KEY] >= 0, frames.OUT_KEY] = frames.TAIL
        links[links[:, frames.IN_PARKED] == 0, frames.IN_MODE] = frames.DROP

    def _failure(self, status: int, peer: int, task: Task, timeout_s: float) -> TransportError:
        if status == frames.INTERRUPTED:
            clear(self._stop_fd)
            self._broken = f"{self._me} was told to stop; begin a new generation with renew"
            return StoppedError(self._broken)
        error: TransportError
        if status == frames.TIMED_OUT:
            error = StalledError(f"{self._me} saw nothing move for {timeout_s:g} s")
        elif status == frames.LOST:
            error = PeerLostError(f"{self._labels[peer]} hung up on {self._me}", peer)
        elif status == frames.SILENT:
            error = PeerLostError(
                f"{self._labels[peer]} has answered nothing that {self._me} sent for "
                f"{self._link_timeout_s:g} s",
                peer,
            )
            self.sever(peer)
        elif status == frames.PEER_FAILED:
            error = TransportError(self._reported_reason(peer), peer)
        else:
            theirs = describe_fingerprint(
                int(self._links[peer, frames.IN_WORDS + frames.FINGERPRINT_WORD])
            )
            error = MismatchError(
                f"ranks disagree: {self._me} is in a {describe_fingerprint(task.fingerprint)}, but "
                f"{self._labels[peer]} in a {theirs}; call the same collectives in the same order "
                "with tensors of one size and type on every rank",
                peer,
            )
        self._broken = str(error)
        if self._reports_failures:
            self._report_failure(self._broken)
        return error

    def _report_failure(self, text: str) -> None:
        """Send every peer why this rank gives up; wait at most `_REPORT_S` for peers to read it."""
        words = text.encode()[:_LONGEST_TEXT]
        header = struct.pack(
            "=qqqq", self.generation * _WORD + self._sequence, frames.GAVE_UP, len(words), 0
        )
        unsent = {
            connection.fileno(): (connection, self._tail_of(peer) + header + words)
            for peer, connection in self._sockets.items()
            if not self._links[peer, frames.CLOSED]
        }
        poll = select.poll()
        for fd in unsent:
            poll.register(fd, select.POLLOUT)
        deadline = time.monotonic() + _REPORT_S
        while unsent and (left_s := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1e3):
                connection, rest = unsent.pop(fd)
                try:
                    rest = rest[connection.send(rest) :]
                    if rest:
                        unsent[fd] = (connection, rest)
                        continue
                    connection.shutdown(socket.SHUT_WR)
                except BlockingIOError:
                    unsent[fd] = (connection, rest)
                    continue
                except OSError:  # the peer has closed
                    pass
                poll.unregister(fd)

    def _tail_of(self, peer: int) -> bytes:
        """Return bytes that complete the frame in progress to a peer; their content is void."""
        if self._links[peer, frames.OUT_KEY] == frames.NONE:
            return b""
        done = int(self._links[peer, frames.OUT_DONE])
        words = self._links[peer, frames.OUT_WORDS : frames.OUT_WORDS + 4]
        frame = frames.HEADER_BYTES + int(words[frames.LENGTH_WORD])
        header: bytes = words.tobytes()[done:]
        self._links[peer, frames.OUT_KEY] = frames.NONE
        return header + bytes(frame - done - len(header))

    def _reported_reason(self, peer: int) -> str:
        """Read and return the reason that a peer sent when it gave up."""
        length = min(int(self._links[peer, frames.IN_WORDS + frames.LENGTH_WORD]), _LONGEST_TEXT)
        connection = self._sockets[peer]
        words = b""
        try:
            connection.settimeout(_REPORT_S)
            while len(words) < length and (part := connection.recv(length - len(words))):
                words += part
        except OSError:
            pass
        return words.decode(errors="replace") or f"{self._labels[peer]} gave up"
