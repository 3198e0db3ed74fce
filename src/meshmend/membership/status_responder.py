"""Answers those who ask a worker for the status of its job.

Its thread lives only while someone asks, so a job that nobody looks at pays nothing. The worker's
main thread never waits for it. Askers that do not read, and askers beyond the limit, are cut off.
"""

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from logging import getLogger
from typing import Final

from meshmend.errors import ChannelError, MessageError
from meshmend.membership.messages import (
    AskStatus,
    Message,
    Refused,
    received_messages,
    send_message,
)
from meshmend.transport.channel import Channel
from meshmend.transport.event_fd import clear, event_of

_log = getLogger(__name__)

_MOST_ASKERS: Final = 32
_PATIENCE_S: Final = 2.0  # for the question to come, and for the answer to be read
_LONGEST_BYTES: Final = 1 << 12  # of a question


@dataclass
class _Asker:
    channel: Channel
    deadline: float
    is_answered: bool = False


class StatusResponder:
    """Sends `answer(question)` to each asker, once; `answer` runs in the responder's thread."""

    def __init__(self, answer: Callable[[AskStatus], Message]) -> None:
        self._answer = answer
        self._new: deque[socket.socket] = deque()
        self._lock = threading.Lock()
        self._is_running = False
        self._wake_fd = event_of(self)

    def take(self, connection: socket.socket) -> None:
        """Take the connection of an asker that has proved the secret; never blocks."""
        with self._lock:
            self._new.append(connection)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="meshmend-status", daemon=True).start()
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        askers: list[_Asker] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ)
            while True:
                self._admit(askers, selector)
                for key, _ in selector.select(_PATIENCE_S / 4):
                    if key.data is None:
                        clear(self._wake_fd)
                    elif key.data in askers and not self._serve(key.data, selector):
                        self._drop(key.data, askers, selector)
                now = time.monotonic()
                for asker in [each for each in askers if each.deadline <= now]:
                    self._drop(asker, askers, selector)
                with self._lock:
                    if not askers and not self._new:
                        self._is_running = False
                        return

    def _admit(self, askers: list[_Asker], selector: selectors.BaseSelector) -> None:
        while self._new:
            channel = Channel(self._new.popleft(), longest_bytes=_LONGEST_BYTES)
            if len(askers) >= _MOST_ASKERS:
                self._drop(askers[0], askers, selector)
            askers.append(_Asker(channel, time.monotonic() + _PATIENCE_S))
            selector.register(channel, selectors.EVENT_READ, askers[-1])

    def _serve(self, asker: _Asker, selector: selectors.BaseSelector) -> bool:
        """Read the question or send more of the answer; return whether the asker stays."""
        try:
            if asker.is_answered:
                asker.channel.flush()
                return asker.channel.has_unsent
            for question in received_messages(asker.channel):
                answer: Message = Refused("a worker answers who asks for the status, nothing else")
                if isinstance(question, AskStatus):
                    answer = self._answer(question)
                send_message(asker.channel, answer)
                asker.is_answered = True
                selector.modify(asker.channel, selectors.EVENT_WRITE, asker)
                return asker.channel.has_unsent
        except (ChannelError, MessageError, OSError) as error:
            _log.debug("an asker was cut off: %s", error)
            return False
        except Exception:  # a question must not end the thread that answers the others
            _log.exception("the status of the job cannot be told")
            return False
        return True

    def _drop(self, asker: _Asker, askers: list[_Asker], selector: selectors.BaseSelector) -> None:
        askers.remove(asker)
        selector.unregister(asker.channel)
        asker.channel.close()
