"""An observer's connection to the coordinator: receives every event, sends a few requests."""

import time
from collections.abc import Callable
from typing import Final

from meshmend.errors import ChannelError, MessageError, TransportError
from meshmend.launch.children import Children
from meshmend.membership.coordinator_server import COORDINATOR, OBSERVER
from meshmend.membership.events import Event
from meshmend.membership.message_channel import MessageChannel
from meshmend.membership.messages import Message, Observe, Observed
from meshmend.net.channel import Channel
from meshmend.net.handshake import ConnectRequest, Deadline, dial
from meshmend.net.listener import Address
from meshmend.net.liveness import Silence

_PATIENCE_S: Final = 0.5


class Observer:
    """Hears a coordinator while there is one; what is said meanwhile is kept until there is."""

    def __init__(
        self, job: str, address: Address, secret: bytes, hear: Callable[[float, Event], None]
    ) -> None:
        self._job = job
        self._address = address
        self._secret = secret
        self._hear = hear
        self._channel: MessageChannel | None = None
        self._unsaid: list[Message] = []
        self._silence = Silence(time.monotonic())
        self._has_heard = False

    @property
    def is_connected(self) -> bool:
        """Whether there is a line to the coordinator."""
        return self._channel is not None

    def is_silent(self, timeout_s: float) -> bool:
        """Whether the coordinator gave no sign of life for so long; to be asked all the time."""
        has_heard, self._has_heard = self._has_heard, False
        return self._silence.is_too_long(time.monotonic(), timeout_s, has_heard=has_heard)

    def say(self, message: Message) -> None:
        """Say something as soon as somebody listens."""
        self._unsaid.append(message)

    def attend(self, children: Children) -> None:
        """Call the coordinator if there is no line, and say what is to be said."""
        if self._channel is None:
            self._call(children)
        while self._unsaid and self._channel is not None:
            try:
                self._channel.send(self._unsaid[0])
                self._unsaid.pop(0)
            except ChannelError:
                self.drop(children)

    def drop(self, children: Children) -> None:
        """Hang up, if there is a line."""
        if self._channel is not None:
            children.unwatch(self._channel.fileno())
            self._channel.close()
            self._channel = None

    def _call(self, children: Children) -> None:
        deadline = Deadline(time.monotonic() + _PATIENCE_S)
        try:
            request = ConnectRequest(OBSERVER, COORDINATOR)
            channel = MessageChannel(Channel(dial(self._address, self._secret, request, deadline)))
            channel.send(Observe(self._job))
        except (TransportError, ChannelError):
            return  # it will be back
        self._channel = channel
        self._has_heard = True
        children.watch(channel.fileno(), lambda: self._listen(children))

    def _listen(self, children: Children) -> None:
        assert self._channel is not None
        try:
            for message in self._channel.receive():
                self._has_heard = True
                if isinstance(message, Observed):
                    self._hear(message.clock, message.event)
        except (ChannelError, MessageError):
            self.drop(children)
