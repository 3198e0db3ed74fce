"""Control messages over a channel: typed values in, typed values out."""

from meshmend.membership.messages import Message, decode_message, encode_message
from meshmend.transport.channel import Channel, packed_frame
from meshmend.transport.liveness import LinkWatch


def packed_message(message: Message) -> bytes:
    """Return a message as the bytes that cross a connection."""
    return packed_frame(encode_message(message))


class MessageChannel:
    """A channel whose frames are control messages. Never blocks."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._channel.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes are still waiting to be sent."""
        return self._channel.has_unsent

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as the connection takes; `flush` sends the rest.

        Raises:
            ChannelError: the other end has closed, or takes nothing any more.
        """
        self.send_packed(packed_message(message))

    def send_packed(self, packed: bytes) -> None:
        """Send what `packed_message` returned; a message for many is packed once.

        Raises:
            ChannelError: the other end has closed, or takes nothing any more.
        """
        self._channel.send_packed(packed)

    def flush(self) -> None:
        """Send the bytes that are still waiting.

        Raises:
            ChannelError: the other end has closed, or takes nothing any more.
        """
        self._channel.flush()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived completely.

        Raises:
            ChannelError: the other end has closed.
            MessageError: the other end sent something that is not a message.
        """
        return [decode_message(frame) for frame in self._channel.receive()]

    def is_dead(self, watch: LinkWatch, now: float) -> bool:
        """Check again whether the kernel at the other end has stopped answering."""
        return self._channel.is_dead(watch, now)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
