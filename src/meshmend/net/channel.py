"""Messages between the coordinator and those who know it: JSON objects, each after its length.

Knows proved connections and nothing of what the messages mean. Never blocks: what cannot be sent
yet is kept, and what has come is handed out whole. Nothing is unpickled.
"""

import json
import socket
import struct
from typing import Any, Final

from meshmend.errors import ChannelError

Message = dict[str, Any]

_LENGTH: Final = struct.Struct(">I")
LONGEST_BYTES: Final = 1 << 24
_READ_BYTES: Final = 1 << 16


class Channel:
    """One proved connection as a stream of messages in both directions."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._came = bytearray()
        self._goes = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._connection.fileno()

    @property
    def is_full(self) -> bool:
        """Whether something still waits to be sent."""
        return bool(self._goes)

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as the connection takes; `flush` sends the rest.

        Raises:
            ChannelError: the other end has closed.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        self._goes += _LENGTH.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Send what is left.

        Raises:
            ChannelError: the other end has closed, or takes nothing any more.
        """
        while self._goes:
            try:
                del self._goes[: self._connection.send(self._goes)]
            except BlockingIOError:
                break
            except OSError as error:
                raise ChannelError(f"the other end hung up: {error.strerror}") from None
        if len(self._goes) > 2 * LONGEST_BYTES:
            raise ChannelError("the other end does not read what it is sent")

    def receive(self) -> list[Message]:
        """Return the messages that have come whole.

        Raises:
            ChannelError: the other end has closed, or sent what is no message.
        """
        while True:
            try:
                part = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:  # a reset: what came before it still counts
                part = b""
            if not part:
                if messages := self._whole():
                    return messages  # the next call says that it has closed
                raise ChannelError("the other end hung up")
            self._came += part
        return self._whole()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _whole(self) -> list[Message]:
        messages = []
        while len(self._came) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._came)
            if length > LONGEST_BYTES:
                raise ChannelError(f"a message of {length} bytes is too long")
            if len(self._came) < _LENGTH.size + length:
                break
            body = bytes(self._came[_LENGTH.size : _LENGTH.size + length])
            del self._came[: _LENGTH.size + length]
            try:
                message = json.loads(body)
            except (ValueError, RecursionError):
                raise ChannelError(f"no message: {body[:40]!r}") from None
            if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                raise ChannelError(f"no message: {body[:40]!r}")
            messages.append(message)
        return messages
