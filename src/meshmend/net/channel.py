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
_READ_BYTES: Final = 1 << 16


class Channel:
    """One proved connection as a stream of frames in both directions."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
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
        if len(self._unsent) > 2 * LONGEST_BYTES:
            raise ChannelError("the other end does not read what it is sent")

    def receive(self) -> list[bytes]:
        """Return the frames that have come whole.

        Raises:
            ChannelError: the other end has closed, or sent a length that no frame has.
        """
        while True:
            try:
                part = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:  # a reset: what came before it still counts
                part = b""
            if not part:
                if frames := self._whole():
                    return frames  # the next call says that it has closed
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
            if length > LONGEST_BYTES:
                raise ChannelError(f"a message of {length} bytes is too long")
            if len(self._received) < _LENGTH.size + length:
                break
            frames.append(bytes(self._received[_LENGTH.size : _LENGTH.size + length]))
            del self._received[: _LENGTH.size + length]
        return frames
