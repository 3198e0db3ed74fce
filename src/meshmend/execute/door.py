"""Where connections come from: a listener that lets in who knows the secret, and dialling out.

A rank dials those above it and waits for those below. Every caller is heard in a thread of its
own, so that a silent stranger holds up nobody; who fails to prove the secret is logged and cut.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from logging import getLogger
from typing import Final

from meshmend.errors import InputError
from meshmend.execute.handshake import Patience, dial, welcome
from meshmend.execute.transport import (
    HandshakeError,
    PeerLostError,
    StoppedError,
    TransportError,
)

Address = tuple[str, int]

_log = getLogger(__name__)
_HANDSHAKE_S: Final = 5.0


class Door:
    """One rank's way to get proved connections to others; `stop_fd` ends all waiting."""

    def __init__(
        self, rank: int, labels: Sequence[str], secret: bytes, *, bind: str, stop_fd: int
    ) -> None:
        self._rank = rank
        self._labels = labels
        self._secret = secret
        self._stop_fd = stop_fd
        self._arrived: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._listener = _listening(bind, backlog=len(labels) + 8)
        self.address: Address = self._listener.getsockname()[:2]
        threading.Thread(target=self._welcome_all, name="meshmend-door", daemon=True).start()

    def connection(self, peer: int, address: Address, deadline: float) -> socket.socket:
        """Return a new proved connection to a rank.

        Raises:
            PeerLostError: it cannot be reached in time. HandshakeError: the secrets differ.
            StoppedError: told to stop.
        """
        if peer < self._rank:
            return self._caller(peer, deadline)
        patience = Patience(deadline, self._stop_fd)
        try:
            return dial(address, self._secret, (self._rank, peer), patience)
        except TransportError as error:
            message = f"{self._me} cannot reach {self._labels[peer]}: {error}"
            raise type(error)(message, peer) from None

    def wake(self) -> None:
        """Have everyone who waits look at `stop_fd`."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stop listening and hang up on who was let in but not asked for; again does nothing."""
        if self._listener.fileno() < 0:
            return
        # A blocked accept returns only when the listener is shut down, not when it is closed.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._arrived.values():
            connection.close()

    @property
    def _me(self) -> str:
        return self._labels[self._rank]

    def _caller(self, peer: int, deadline: float) -> socket.socket:
        """Wait until a rank below this one has called and been let in."""
        with self._changed:
            while peer not in self._arrived:
                if is_set(self._stop_fd):
                    raise StoppedError(f"{self._me} was told to stop waiting for a connection")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise PeerLostError(
                        f"{self._me} waited in vain for {self._labels[peer]} to connect", peer
                    )
            return self._arrived.pop(peer)

    def _welcome_all(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(
                target=self._welcome_one, args=(connection, address), daemon=True
            ).start()

    def _welcome_one(self, connection: socket.socket, address: Address) -> None:
        """Let one caller in, or log why not and hang up."""
        try:
            connection.setblocking(False)
            patience = Patience(time.monotonic() + _HANDSHAKE_S)
            peer = welcome(connection, self._secret, self._rank, patience)
            if peer >= len(self._labels):
                raise HandshakeError(f"it claims to be rank {peer} of {len(self._labels)}")
        except (TransportError, OSError) as error:
            connection.close()
            _log.warning("%s refused a connection from %s:%d: %s", self._me, *address, error)
            return
        with self._changed:
            if old := self._arrived.get(peer):
                old.close()
            self._arrived[peer] = connection
            self._changed.notify_all()


def is_set(event_fd: int) -> bool:
    """Whether an event descriptor can be read; it stays so."""
    try:
        value = os.eventfd_read(event_fd)
    except BlockingIOError:
        return False
    os.eventfd_write(event_fd, value)
    return True


def clear(event_fd: int) -> None:
    """Take back what was written to an event descriptor."""
    try:
        os.eventfd_read(event_fd)
    except BlockingIOError:
        return


def _listening(bind: str, *, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((bind, 0))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise InputError(f"cannot listen on {bind}: {error.strerror}") from None
    return listener
