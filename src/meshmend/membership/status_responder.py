"""Answers those who ask a worker for the status of its job.

Each asker has a thread while it asks, so a job that nobody looks at pays nothing. The worker's main
thread never waits for it. Askers that do not read, and askers beyond the limit, are cut off.
"""

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from logging import getLogger
from typing import Final

from meshmend.errors import ChannelError, MessageError
from meshmend.membership.messages import (
    AskStatus,
    Message,
    Refused,
    messages_before,
    send_message,
)
from meshmend.transport.channel import Channel

_log = getLogger(__name__)

_MOST_ASKERS: Final = 32
_PATIENCE_S: Final = 2.0  # for the question to come, and for the answer to be read
_LONGEST_BYTES: Final = 1 << 12  # of a question


class StatusResponder:
    """Sends `answer(question)` to each asker, once; `answer` runs in the thread of the asker."""

    def __init__(self, answer: Callable[[AskStatus], Message]) -> None:
        self._answer = answer
        self._askers: list[socket.socket] = []  # the longest-waiting first
        self._lock = threading.Lock()

    def take(self, connection: socket.socket) -> None:
        """Take the connection of an asker that has proved the secret; never blocks."""
        with self._lock:
            if len(self._askers) >= _MOST_ASKERS:
                with suppress(OSError):
                    self._askers.pop(0).shutdown(socket.SHUT_RDWR)  # its thread then ends
            self._askers.append(connection)
        threading.Thread(
            target=self._serve, args=(connection,), name="meshmend-status", daemon=True
        ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            channel = Channel(connection, longest_bytes=_LONGEST_BYTES)
            self._converse(channel, time.monotonic() + _PATIENCE_S)
        except (ChannelError, MessageError, OSError) as error:
            _log.debug("an asker was cut off: %s", error)
        except Exception:  # who looks at the worker's standard error sees why
            _log.exception("the status of the job cannot be told")
        finally:
            with self._lock, suppress(ValueError):
                self._askers.remove(connection)
            connection.close()

    def _converse(self, channel: Channel, deadline: float) -> None:
        """Read the question and send the answer, as far as both go until the deadline."""
        for question in messages_before(channel, deadline):
            answer: Message = Refused("a worker answers who asks for the status, nothing else")
            if isinstance(question, AskStatus):
                answer = self._answer(question)
            send_message(channel, answer)
            while channel.has_unsent and channel.is_ready(select.POLLOUT, deadline):
                channel.flush()
            return
