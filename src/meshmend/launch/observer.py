"""The launcher's connection to the coordinator: it receives every event and sends requests."""

import time
from collections.abc import Callable
from typing import Final

from meshmend.errors import ChannelError, MessageError, TransportError
from meshmend.launch.supervisor import Supervisor
from meshmend.membership.events import Event
from meshmend.membership.messages import (
    COORDINATOR,
    OBSERVER,
    CutLink,
    MendLink,
    Message,
    Observe,
    Observed,
    received_messages,
    send_message,
)
from meshmend.topology.failures import Link
from meshmend.transport.channel import Channel
from meshmend.transport.handshake import ConnectRequest, Deadline, dial
from meshmend.transport.listener import Address
from meshmend.transport.liveness import Silence

_CONNECT_TIMEOUT_S: Final = 0.5


class Observer:
    """Passes the coordinator's events to `on_event`, and sends messages to the coordinator.

    The supervisor's loop reads what comes. While the coordinator cannot be reached, messages wait
    in a queue. A coordinator that is new is told again which links were cut and mended: the one
    before it may have died before it read that.
    """

    def __init__(
        self,
        job: str,
        address: Address,
        secret: bytes,
        on_event: Callable[[float, Event], None],
        supervisor: Supervisor,
    ) -> None:
        self._supervisor = supervisor
        self._job = job
        self._address = address
        self._secret = secret
        self._on_event = on_event
        self._channel: Channel | None = None
        self._queued: list[Message] = []
        self._links: dict[Link, CutLink | MendLink] = {}  # what was said of each last
        self._silence = Silence(time.monotonic())
        self._has_heard = False

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to the coordinator."""
        return self._channel is not None

    def is_silent(self, timeout_s: float) -> bool:
        """Whether nothing came from the coordinator for so long; only right if called often."""
        has_heard, self._has_heard = self._has_heard, False
        return self._silence.is_too_long(time.monotonic(), timeout_s, has_heard=has_heard)

    def send(self, message: Message) -> None:
        """Queue a message, which `connect_and_send` sends."""
        self._queued.append(message)
        if isinstance(message, CutLink | MendLink):
            self._links[message.link] = message

    def connect_and_send(self) -> None:
        """Connect to the coordinator if needed, and send the queued messages."""
        if self._channel is None:
            self._connect()
        while self._queued and self._channel is not None:
            try:
                send_message(self._channel, self._queued[0])
                self._queued.pop(0)
            except ChannelError:
                self.disconnect()

    def disconnect(self) -> None:
        """Close the connection, if there is one."""
        if self._channel is not None:
            self._supervisor.unwatch(self._channel.fileno())
            self._channel.close()
            self._channel = None

    def _connect(self) -> None:
        deadline = Deadline(time.monotonic() + _CONNECT_TIMEOUT_S)
        try:
            request = ConnectRequest(OBSERVER, COORDINATOR)
            channel = Channel(dial(self._address, self._secret, request, deadline))
            send_message(channel, Observe(self._job))
        except (TransportError, ChannelError):
            return  # the next `connect_and_send` tries again
        others = [each for each in self._queued if not isinstance(each, CutLink | MendLink)]
        self._queued = [*self._links.values(), *others]
        self._channel = channel
        self._has_heard = True
        self._supervisor.watch(channel.fileno(), self._receive)

    def _receive(self) -> None:
        assert self._channel is not None
        try:
            for message in received_messages(self._channel):
                self._has_heard = True
                if isinstance(message, Observed):
                    self._on_event(message.clock, message.event)
        except (ChannelError, MessageError):
            self.disconnect()
