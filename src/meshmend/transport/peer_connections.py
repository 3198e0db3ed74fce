"""Makes the connections between ranks: dials some peers, and accepts calls from the others.

A rank dials the ranks above it and waits for calls from those below. Each connection has an epoch,
which both ends name. So a late call of an earlier epoch is never used for the present one.

A rank that was interrupted while it connected calls again in the same epoch. If the other end has
already chosen the old connection for the caller's generation, it may have sent over that one, so
the call is closed. Then each end finds out as soon as it needs the other.

Nobody calls for a rank that died before it did. Where no coordinator tells of that, a rank that
waits for a call looks now and then whether the caller still listens (`looks_for_callers`).
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from meshmend.errors import HandshakeError, PeerLostError, StoppedError, TransportError
from meshmend.transport.event_fd import is_set
from meshmend.transport.handshake import ANYONE, ConnectRequest, Deadline, check_listens, dial
from meshmend.transport.listener import Address, Listener, listening_for_peers, listening_locally

_LOOK_EVERY_S: Final = 1.0  # whether a rank that does not call is still there


class PeerConnections:
    """Makes authenticated connections of one rank to others; `stop_fd` ends all waiting.

    A peer on another address may send `window_bytes` ahead.
    """

    def __init__(
        self,
        rank: int,
        labels: Sequence[str],
        secret: bytes,
        *,
        bind: str,
        stop_fd: int,
        window_bytes: int = 0,
        link_timeout_s: float = 0.0,
        looks_for_callers: bool = False,
    ) -> None:
        self._rank = rank
        self._labels = labels
        self._secret = secret
        self._window_bytes = window_bytes
        self._stop_fd = stop_fd
        self._link_timeout_s = link_timeout_s
        self._looks_for_callers = looks_for_callers
        self._calls: dict[int, tuple[int, socket.socket]] = {}
        self._chosen_in: dict[int, int] = {}  # the last generation with a connection, by rank
        self._changed = threading.Condition()
        # Gets the calls of those who call anyone; must not block. None refuses them.
        self.on_asker: Callable[[socket.socket], None] | None = None
        self.asked_epoch = 0  # calls of another one were meant for who had this address before
        listener = listening_for_peers(bind, window_bytes=window_bytes)
        self._listener = Listener(
            listener,
            secret,
            rank,
            name=self._me,
            admit=self._admit,
            beside=listening_locally(listener.getsockname()),
        )
        self.address: Address = self._listener.address

    def connection(
        self,
        peer: int,
        address: Address,
        deadline: float,
        *,
        epoch: int = 0,
        generation: int = 0,
    ) -> socket.socket:
        """Return a new authenticated connection to a rank in an epoch, for a generation.

        Raises:
            PeerLostError: the rank cannot be reached before the deadline.
            HandshakeError: the secrets differ.
            StoppedError: `stop_fd` was set.
        """
        until = Deadline(deadline, self._stop_fd, self._link_timeout_s)
        if peer < self._rank:
            return self._await_call(peer, address, until, epoch, generation)
        request = ConnectRequest(self._rank, peer, epoch, generation)
        try:
            return dial(address, self._secret, request, until, window_bytes=self._window_bytes)
        except TransportError as error:
            message = f"{self._me} cannot reach {self._labels[peer]}: {error}"
            raise type(error)(message, peer) from None

    def choose_old(self, peer: int, epoch: int, generation: int = 0) -> bool:
        """Choose an open connection for a generation, unless its rank has called anew in its epoch.

        If it has, return False: `connection` returns the new one.
        """
        with self._changed:
            if self._calls.get(peer, (-1, None))[0] == epoch:
                return False
            self._chosen_in[peer] = generation
            return True

    def wake(self) -> None:
        """Make all waiting threads check `stop_fd`."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Close the listener and the unused calls; a second call does nothing."""
        self._listener.close()
        with self._changed:
            for _, connection in self._calls.values():
                connection.close()
            self._calls.clear()

    @property
    def _me(self) -> str:
        return self._labels[self._rank]

    def _await_call(
        self, peer: int, address: Address, until: Deadline, epoch: int, generation: int
    ) -> socket.socket:
        """Wait for the call of a lower rank, and return its connection."""
        who, every_s = self._labels[peer], _LOOK_EVERY_S if self._looks_for_callers else inf
        while True:
            look_at = min(until.at, time.monotonic() + every_s)
            if (call := self._call_of(peer, look_at, epoch, generation)) is not None:
                return call
            if time.monotonic() >= until.at:
                raise PeerLostError(f"{who} did not connect to {self._me} in time", peer)
            try:
                check_listens(address, until)
            except PeerLostError as error:
                raise PeerLostError(
                    f"{who} did not connect to {self._me}, and is gone: {error}", peer
                ) from None

    def _call_of(
        self, peer: int, deadline: float, epoch: int, generation: int
    ) -> socket.socket | None:
        """Wait for the call of a lower rank; return its connection, or None if it does not come."""
        with self._changed:
            self._chosen_in.pop(peer, None)
            while not self._has_called(peer, epoch):
                if is_set(self._stop_fd):
                    raise StoppedError(f"{self._me} was told to stop waiting for a connection")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return None
            self._chosen_in[peer] = generation
            return self._calls.pop(peer)[1]

    def _has_called(self, peer: int, epoch: int) -> bool:
        """Whether a rank has called in an epoch, and has not hung up since.

        One that hung up was interrupted while it connected, and calls again in that epoch. If its
        first call were chosen, the second would be closed as late, and a sound link count as cut.
        """
        called_in, connection = self._calls.get(peer, (-1, None))
        if connection is None or called_in != epoch:
            return False
        if has_ended(connection):
            connection.close()
            del self._calls[peer]
            return False
        return True

    def _admit(self, connection: socket.socket, request: ConnectRequest) -> None:
        """Keep a call until `connection` returns it; close one of an older epoch, or too late."""
        if request.wanted == ANYONE:
            if self.on_asker is None:
                raise HandshakeError(f"{self._me} answers no questions")
            if request.epoch == self.asked_epoch:
                self.on_asker(connection)
            else:
                connection.close()
            return
        if request.caller >= len(self._labels):
            raise HandshakeError(f"it claims to be rank {request.caller} of {len(self._labels)}")
        with self._changed:
            epoch, old = self._calls.get(request.caller, (-1, None))
            is_late = 0 < request.generation <= self._chosen_in.get(request.caller, -1)
            if request.epoch < epoch or is_late:
                connection.close()
                return
            if old is not None:
                old.close()
            self._calls[request.caller] = request.epoch, connection
            self._changed.notify_all()


def has_ended(connection: socket.socket) -> bool:
    """Whether the other end has closed and all that it sent was read."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
