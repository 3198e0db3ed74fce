"""Neighbour TCP sockets: one proved connection per pair of ranks that exchange data.

Listens on loopback unless told otherwise. A rank dials those above it and welcomes those below.
Connections outlive collectives and generations: after an interruption the rest of a frame that
was under way is still sent, and dropped at the other end, so that the stream stays in step.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from logging import getLogger
from types import TracebackType
from typing import Final

import numpy as np

from meshmend.errors import InputError
from meshmend.execute import engine
from meshmend.execute.combine import bind_combine
from meshmend.execute.engine import Engine
from meshmend.execute.handshake import HandshakeError, Patience, dial, welcome
from meshmend.execute.program import SEND
from meshmend.execute.transport import (
    Bytes,
    MismatchError,
    PeerLostError,
    StalledError,
    StoppedError,
    Task,
    TransportError,
    describe_fingerprint,
)

Address = tuple[str, int]

_log = getLogger(__name__)
_HANDSHAKE_S: Final = 5.0
_FAREWELL_S: Final = 1.0
_LONGEST_TEXT: Final = 4096
_WORD: Final = 1 << 32


class SocketTransport:
    """The connections of one rank, and the runs of tasks over them.

    `labels[rank]` is how messages call a rank. If `tells` is set, a rank that fails says why to
    its peers, which fail with the same words: every rank learns of a failure at once. Otherwise
    it is silent, and may go on with `renew`.
    """

    def __init__(
        self,
        rank: int,
        labels: Sequence[str],
        secret: bytes,
        *,
        bind: str = "127.0.0.1",
        tells: bool = False,
    ) -> None:
        self.rank = rank
        self.generation = 0
        self._labels = tuple(labels)
        self._secret = secret
        self._tells = tells
        self._sequence = 0
        self._broken = ""
        n_ranks = len(labels)
        self._sockets: dict[int, socket.socket] = {}
        self._arrived: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._links = np.zeros((n_ranks, engine.N_LINK_COLUMNS), dtype=np.int64)
        self._links[:, [engine.FD, engine.IN_KEY, engine.OUT_KEY]] = -1
        self._scratch = np.empty((n_ranks, engine.BLOCK_BYTES), dtype=np.uint8)
        self._arena = np.empty(0, dtype=np.uint8)
        bind_combine()
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener = _listening(bind, backlog=n_ranks)
        self.address: Address = self._listener.getsockname()[:2]
        self._is_open = True
        threading.Thread(target=self._welcome_all, name="meshmend-welcome", daemon=True).start()

    def connect(self, addresses: Mapping[int, Address], *, timeout_s: float = 30.0) -> None:
        """Return when this rank has a connection to each of these, new or kept.

        Raises:
            PeerLostError: one cannot be reached in time. HandshakeError: the secrets differ.
            StoppedError: `interrupt` was called.
        """
        patience = Patience(time.monotonic() + timeout_s, self._stop_fd)
        missing = [peer for peer in sorted(addresses) if not self._is_linked(peer)]
        for peer in missing:
            if peer > self.rank:
                try:
                    connection = dial(
                        addresses[peer], self._secret, (self.rank, peer), patience
                    )
                except TransportError as error:
                    message = f"{self._me} cannot reach {self._labels[peer]}: {error}"
                    raise type(error)(message, peer) from None
                self._link(peer, connection)
        for peer in missing:
            if peer < self.rank:
                self._link(peer, self._caller(peer, patience.deadline))

    def run(self, task: Task, payload: Bytes, *, timeout_s: float = 1800.0) -> None:
        """Send and receive what the task says, in place in the payload's bytes.

        Raises:
            PeerLostError, MismatchError, StoppedError, StalledError: as their names say. The
            transport is of no use then until `renew`.
        """
        if self._broken:
            raise TransportError(self._broken)
        if payload.nbytes != task.n_bytes:
            raise InputError(f"the task needs {task.n_bytes} bytes, but got {payload.nbytes}")
        self._sequence += 1
        if len(self._arena) < task.layout.arena_bytes:
            self._arena = np.empty(task.layout.arena_bytes, dtype=np.uint8)
        peers = np.array(task.program.peers, dtype=np.int64)
        timeout_ms = int(min(timeout_s * 1e3, 2**31 - 1))
        status, peer = engine.progress(
            self._engine(task, payload), peers, self._stop_fd, timeout_ms
        )
        if status != engine.DONE:
            self._abandon()
            raise self._failure(status, peer, task, timeout_s)

    def interrupt(self) -> None:
        """Stop waiting now: a run or connect under way, or the next one, raises StoppedError."""
        os.eventfd_write(self._stop_fd, 1)
        with self._changed:
            self._changed.notify_all()

    def renew(self, generation: int) -> None:
        """Begin a new generation on the connections there are; older frames will be dropped."""
        if generation <= self.generation:
            raise InputError(f"renew needs more than {self.generation}, but got {generation}")
        self.generation, self._sequence, self._broken = generation, 0, ""
        self._clear_stop()

    def close(self) -> None:
        """Give up all connections and stop listening."""
        self._is_open = False
        # A blocked accept returns only when the listener is shut down, not when it is closed.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in (*self._sockets.values(), *self._arrived.values()):
            connection.close()
        self._links[:, engine.FD] = -1

    def __enter__(self) -> "SocketTransport":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _me(self) -> str:
        return self._labels[self.rank]

    def _is_linked(self, peer: int) -> bool:
        return self._links[peer, engine.FD] >= 0 and not self._links[peer, engine.CLOSED]

    def _link(self, peer: int, connection: socket.socket) -> None:
        if old := self._sockets.get(peer):
            old.close()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[peer] = connection
        self._links[peer] = 0
        self._links[peer, [engine.IN_KEY, engine.OUT_KEY]] = -1
        self._links[peer, engine.FD] = connection.fileno()

    def _caller(self, peer: int, deadline: float) -> socket.socket:
        """Wait until a rank below this one has called and been let in."""
        with self._changed:
            while peer not in self._arrived:
                if _is_set(self._stop_fd):
                    self._clear_stop()
                    raise StoppedError(f"{self._me} was told to stop waiting for a connection")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise PeerLostError(
                        f"{self._me} waited in vain for {self._labels[peer]} to connect", peer
                    )
            return self._arrived.pop(peer)

    def _welcome_all(self) -> None:
        while self._is_open:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._welcome_one, args=(connection, address), daemon=True
            ).start()

    def _welcome_one(self, connection: socket.socket, address: Address) -> None:
        """Let one caller in, or log why not and hang up."""
        try:
            patience = Patience(time.monotonic() + _HANDSHAKE_S, self._stop_fd)
            connection.setblocking(False)
            peer = welcome(connection, self._secret, self.rank, patience)
            if peer >= len(self._labels):
                raise HandshakeError(f"rank {peer} of {len(self._labels)}")
        except (TransportError, OSError) as error:
            connection.close()
            _log.warning("%s refused a connection from %s:%d: %s", self._me, *address, error)
            return
        with self._changed:
            self._arrived[peer] = connection
            self._changed.notify_all()

    def _engine(self, task: Task, payload: Bytes) -> Engine:
        program, layout = task.program, task.layout
        n_keys = len(layout.size)
        sends = np.bincount(program.peer[program.kind == SEND], minlength=len(self._labels))
        self._links[:, engine.HEAP_BASE] = (np.cumsum(sends) - sends) * layout.n_slices
        self._links[:, engine.HEAP_SIZE] = 0
        moves = np.zeros((5, program.n_moves + 1), dtype=np.int64)
        moves[engine.FOLLOWING] = program.following_ptr
        moves[:4, :-1] = program.kind, program.row, program.peer, program.needs
        keys = np.zeros((5, n_keys), dtype=np.int64)
        needs = np.tile(program.needs, layout.n_slices)
        keys[:4] = layout.start, layout.size, layout.shelf, needs
        call = self.generation * _WORD + self._sequence
        addresses = [array.ctypes.data for array in (payload, self._arena, self._scratch)]
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
        """Leave the streams so that later frames can still be told apart."""
        links = self._links
        links[:, engine.IN_EXPECTED] = 0
        links[links[:, engine.OUT_KEY] >= 0, engine.OUT_KEY] = engine.TAIL
        links[links[:, engine.IN_PARKED] == 0, engine.IN_MODE] = engine.DROP

    def _failure(self, status: int, peer: int, task: Task, timeout_s: float) -> TransportError:
        if status == engine.INTERRUPTED:
            self._clear_stop()
            self._broken = f"{self._me} was told to stop; begin a new generation with renew"
            return StoppedError(self._broken)
        error: TransportError
        if status == engine.TIMED_OUT:
            error = StalledError(f"{self._me} saw nothing move for {timeout_s:g} s")
        elif status == engine.LOST:
            error = PeerLostError(f"{self._labels[peer]} hung up on {self._me}", peer)
        elif status == engine.TOLD:
            error = TransportError(self._last_words(peer), peer)
        else:
            theirs = describe_fingerprint(int(self._links[peer, engine.IN_WORDS + engine.FINGERPRINT_WORD]))
            error = MismatchError(
                f"ranks disagree: {self._me} is in a {describe_fingerprint(task.fingerprint)}, but "
                f"{self._labels[peer]} in a {theirs}; call the same collectives in the same order "
                "with tensors of one size and type on every rank",
                peer,
            )
        self._broken = str(error)
        if self._tells:
            self._tell(self._broken)
        return error

    def _tell(self, text: str) -> None:
        """Say to every peer why this rank gives up; who does not listen is not waited for."""
        words = text.encode()[:_LONGEST_TEXT]
        header = struct.pack(
            "=qqqq", self.generation * _WORD + self._sequence, engine.GAVE_UP, len(words), 0
        )
        for peer, connection in self._sockets.items():
            if self._links[peer, engine.CLOSED]:
                continue
            try:
                connection.settimeout(_FAREWELL_S)
                connection.sendall(self._tail_of(peer) + header + words)
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                continue
            finally:
                connection.setblocking(False)

    def _tail_of(self, peer: int) -> bytes:
        """Return what completes the frame that is under way to a peer; its content is void."""
        if self._links[peer, engine.OUT_KEY] == engine.NONE:
            return b""
        done = int(self._links[peer, engine.OUT_DONE])
        words = self._links[peer, engine.OUT_WORDS : engine.OUT_WORDS + 4]
        frame = engine.HEADER_BYTES + int(words[engine.LENGTH_WORD])
        header: bytes = words.tobytes()[done:]
        self._links[peer, engine.OUT_KEY] = engine.NONE
        return header + bytes(frame - done - len(header))

    def _last_words(self, peer: int) -> str:
        """Read why a peer gave up."""
        length = min(int(self._links[peer, engine.IN_WORDS + engine.LENGTH_WORD]), _LONGEST_TEXT)
        connection = self._sockets[peer]
        words = b""
        try:
            connection.settimeout(_FAREWELL_S)
            while len(words) < length and (part := connection.recv(length - len(words))):
                words += part
        except OSError:
            pass
        return words.decode(errors="replace") or f"{self._labels[peer]} gave up"

    def _clear_stop(self) -> None:
        try:
            os.eventfd_read(self._stop_fd)
        except BlockingIOError:
            return


def _listening(bind: str, *, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind, 0))
        listener.listen(backlog + 8)
    except OSError as error:
        listener.close()
        raise InputError(f"cannot listen on {bind}: {error.strerror}") from None
    return listener


def _is_set(fd: int) -> bool:
    try:
        value = os.eventfd_read(fd)
    except BlockingIOError:
        return False
    os.eventfd_write(fd, value)
    return True
