"""Where connections between ranks come from: callers that were let in, and dialling out.

A rank dials those above it and waits for those below. A connection has an epoch: both ends name
the same one, so that a call which was meant for an earlier one is never taken for it.
"""

import socket
import threading
import time
from collections.abc import Sequence

from meshmend.errors import HandshakeError, PeerLostError, StoppedError, TransportError
from meshmend.net.event_fd import is_set
from meshmend.net.handshake import ConnectRequest, Deadline, dial
from meshmend.net.listener import Address, Listener, listening


class PeerConnections:
    """One rank's way to get proved connections to others; `stop_fd` ends all waiting."""

    def __init__(
        self,
        rank: int,
        labels: Sequence[str],
        secret: bytes,
        *,
        bind: str,
        stop_fd: int,
        link_timeout_s: float = 0.0,
    ) -> None:
        self._rank = rank
        self._labels = labels
        self._secret = secret
        self._stop_fd = stop_fd
        self._link_timeout_s = link_timeout_s
        self._arrived: dict[int, tuple[int, socket.socket]] = {}
        self._changed = threading.Condition()
        listener = listening(bind)
        self._listener = Listener(listener, secret, rank, name=self._me, admit=self._admit)
        self.address: Address = self._listener.address

    def connection(
        self, peer: int, address: Address, deadline: float, *, epoch: int = 0
    ) -> socket.socket:
        """Return a new proved connection to a rank, of an epoch.

        Raises:
            PeerLostError: it cannot be reached in time. HandshakeError: the secrets differ.
            StoppedError: told to stop.
        """
        if peer < self._rank:
            return self._caller(peer, deadline, epoch)
        until = Deadline(deadline, self._stop_fd, self._link_timeout_s)
        try:
            return dial(address, self._secret, ConnectRequest(self._rank, peer, epoch), until)
        except TransportError as error:
            message = f"{self._me} cannot reach {self._labels[peer]}: {error}"
            raise type(error)(message, peer) from None

    def is_called_by(self, peer: int, epoch: int) -> bool:
        """Whether a rank has called in an epoch, and nobody has asked for that call yet."""
        with self._changed:
            return self._arrived.get(peer, (-1, None))[0] == epoch

    def wake(self) -> None:
        """Have all waiting threads look at `stop_fd`."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Close the listener and connections that nobody asked for; again does nothing."""
        self._listener.close()
        with self._changed:
            for _, connection in self._arrived.values():
                connection.close()
            self._arrived.clear()

    @property
    def _me(self) -> str:
        return self._labels[self._rank]

    def _caller(self, peer: int, deadline: float, epoch: int) -> socket.socket:
        """Wait until a rank below this one has called and been let in."""
        with self._changed:
            while self._arrived.get(peer, (-1, None))[0] != epoch:
                if is_set(self._stop_fd):
                    raise StoppedError(f"{self._me} was told to stop waiting for a connection")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise PeerLostError(
                        f"{self._me} waited in vain for {self._labels[peer]} to connect", peer
                    )
            return self._arrived.pop(peer)[1]

    def _admit(self, connection: socket.socket, request: ConnectRequest) -> None:
        """Keep a caller until it is asked for; a call of an older epoch is out of date."""
        if request.caller >= len(self._labels):
            raise HandshakeError(f"it claims to be rank {request.caller} of {len(self._labels)}")
        with self._changed:
            epoch, old = self._arrived.get(request.caller, (-1, None))
            if request.epoch < epoch:
                connection.close()
                return
            if old is not None:
                old.close()
            self._arrived[request.caller] = request.epoch, connection
            self._changed.notify_all()


def has_ended(connection: socket.socket) -> bool:
    """Whether the other end has hung up and nothing that it sent before is left to read."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
