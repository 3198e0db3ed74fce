"""Frames over a proved connection: bytes, each frame after its length.

Knows nothing of what the bytes mean. Never blocks: what cannot be sent yet is kept, and what has
come is handed out whole.
"""

import socket
import struct
from typing import Final

from meshmend.errors import ChannelError
from meshmend.net.liveness import LinkWatch

_LENGTH: Final = struct.Struct(">I")
LONGEST_BYTES: Final = 1 << 24
MOST_UNSENT_BYTES: Final = 2 * LONGEST_BYTES
_READ_BYTES: Final = 1 << 16


class Channel:
    """One proved connection as a stream of frames in both directions.

    `longest_bytes` is the longest frame that is taken. Of what the other end does not read, at most
    `MOST_UNSENT_BYTES` are kept.
    """

    def __init__(self, connection: socket.socket, *, longest_bytes: int = LONGEST_BYTES) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._longest_bytes = longest_bytes
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._connection.fileno()

    @property
    def is_full(self) -> bool:
        """Whether something still waits to be sent."""
        return bool(self._unsent)

    def send(self, frame: bytes) -> None:
        """Send a frame, or as much of it as the connection takes; `flush` sends the rest.

        Raises:
            ChannelError: the other end has closed.
        """
        self._unsent += _LENGTH.pack(len(frame)) + frame
        self.flush()

    def flush(self) -> None:
        """Send what is left.

        Raises:
            ChannelError: the other end has closed, or takes nothing any more.
        """
        while self._unsent:
            try:
                del self._unsent[: self._connection.send(self._unsent)]
            except BlockingIOError:
                break
            except OSError as error:
                raise ChannelError(f"the other end hung up: {error.strerror}") from None
        if len(self._unsent) > MOST_UNSENT_BYTES:
            raise ChannelError("the other end does not read what it is sent")

    def receive(self) -> list[bytes]:
        """Return the frames that have come whole; call again while there is something to read.

        Takes a limited part of what has come: an end that sends without pause holds up nobody.

        Raises:
            ChannelError: the other end has closed, or sent a length that no frame has.
        """
        try:
            part = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:  # a reset
            part = b""
        if not part:
            raise ChannelError("the other end hung up")
        self._received += part
        return self._whole()

    def is_dead(self, watch: LinkWatch, now: float) -> bool:
        """Look once more whether the kernel at the other end does not answer any more."""
        return watch.is_dead(self._connection, now)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _whole(self) -> list[bytes]:
        frames = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > self._longest_bytes:
                raise ChannelError(f"a message of {length} bytes is too long")
            if len(self._received) < _LENGTH.size + length:
                break
            frames.append(bytes(self._received[_LENGTH.size : _LENGTH.size + length]))
            del self._received[: _LENGTH.size + length]
        return frames
