"""Answers those who ask a worker for the status of its job.

Each asker has a thread for as long as it asks, so a job that nobody looks at pays nothing. The
worker's main thread never waits for them. Askers that do not read, and askers beyond the limit, are
cut off.
"""

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from logging import getLogger
from typing import Final

from meshmend.errors import ChannelError, MessageError
from meshmend.membership.messages import AskStatus, Message, Refused, send_message
from meshmend.membership.status_client import messages_until
from meshmend.transport.channel import Channel

_log = getLogger(__name__)

_MOST_ASKERS: Final = 32
_PATIENCE_S: Final = 2.0  # for the question to come, and for the answer to be read
_LONGEST_BYTES: Final = 1 << 12  # of a question


class StatusResponder:
    """Sends `answer(question)` to each asker, once; `answer` runs in the asker's thread."""

    def __init__(self, answer: Callable[[AskStatus], Message]) -> None:
        self._answer = answer
        self._places = threading.Semaphore(_MOST_ASKERS)

    def take(self, connection: socket.socket) -> None:
        """Take the connection of an asker that has proved the secret; never blocks."""
        if not self._places.acquire(blocking=False):
            connection.close()
            return
        serve = threading.Thread(
            target=self._serve, args=(connection,), name="meshmend-status", daemon=True
        )
        serve.start()

    def _serve(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        try:
            with closing(Channel(connection, longest_bytes=_LONGEST_BYTES)) as channel:
                question = next(messages_until(channel, deadline), None)
                if question is not None:
                    self._reply(channel, question, deadline)
        except (ChannelError, MessageError, OSError) as error:
            _log.debug("an asker was cut off: %s", error)
        except Exception:
            _log.exception("the status of the job cannot be told")
        finally:
            self._places.release()

    def _reply(self, channel: Channel, question: Message, deadline: float) -> None:
        answer: Message = Refused("a worker answers who asks for the status, nothing else")
        if isinstance(question, AskStatus):
            answer = self._answer(question)
        send_message(channel, answer)
        poll = select.poll()
        poll.register(channel, select.POLLOUT)
        while channel.has_unsent and (left_s := deadline - time.monotonic()) > 0:
            poll.poll(left_s * 1e3)
            channel.flush()
