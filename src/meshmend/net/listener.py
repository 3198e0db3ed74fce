"""A listener that lets in who knows the secret.

Every caller is heard in a thread of its own, so that a silent stranger holds up nobody; who fails
to prove the secret is logged and cut. What a caller wants is the business of who is told of it.
"""

import socket
import threading
import time
from collections.abc import Callable
from logging import getLogger
from typing import Annotated, Final

from meshmend.errors import InputError, TransportError
from meshmend.net.codec import Within
from meshmend.net.handshake import ConnectRequest, Deadline, welcome

Port = Annotated[int, Within(0, 65535)]
Address = tuple[str, Port]

_log = getLogger(__name__)
_HANDSHAKE_S: Final = 5.0


class Listener:
    """Calls `admit(connection, request)` in a thread for every caller that proved the secret.

    `admit` may refuse with a HandshakeError. `name` is how the log calls this end, `rank` the
    number under which it is called.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        rank: int,
        *,
        name: str,
        admit: Callable[[socket.socket, ConnectRequest], None],
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._rank = rank
        self._name = name
        self._admit = admit
        self.address: Address = listener.getsockname()[:2]
        threading.Thread(target=self._receive_all, name="meshmend-door", daemon=True).start()

    def close(self) -> None:
        """Stop listening; again does nothing."""
        if self._listener.fileno() < 0:
            return
        # A blocked accept returns only when the listener is shut down, not when it is closed.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _receive_all(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(
                target=self._receive_one, args=(connection, address), daemon=True
            ).start()

    def _receive_one(self, connection: socket.socket, address: Address) -> None:
        """Let one caller in, or log why not and hang up."""
        try:
            connection.setblocking(False)
            deadline = Deadline(time.monotonic() + _HANDSHAKE_S)
            request = welcome(connection, self._secret, self._rank, deadline)
            self._admit(connection, request)
        except (TransportError, OSError) as error:
            connection.close()
            _log.warning("%s refused a connection from %s:%d: %s", self._name, *address, error)


def listening(bind: str, port: int = 0, *, backlog: int = 128) -> socket.socket:
    """Return a socket that listens on an address; port 0 takes one that is free.

    Raises:
        InputError: it cannot be listened on.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind, port))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        where = f"{bind}:{port}" if port else bind
        raise InputError(f"cannot listen on {where}: {error.strerror}") from None
    return listener
