"""A worker's line to the coordinator: a thread that reports, listens, and calls again when cut off.

The main thread says what has changed and asks what is wanted; it never waits for the coordinator
while it has a step to do. What the thread hears of a change it passes on by `on_change`, which
ends whatever the main thread waits for.
"""

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from logging import getLogger
from typing import Any, Final

from meshmend.errors import (
    ChannelError,
    HandshakeError,
    RefusedError,
    TransportError,
    TurnedAwayError,
)
from meshmend.membership.coordinator import COORDINATOR
from meshmend.membership.generation import Generation, generation_from
from meshmend.membership.membership import FRESH, Go, Status
from meshmend.membership.stragglers import LoopPosition
from meshmend.net.channel import Channel, Message
from meshmend.net.event_fd import clear
from meshmend.net.handshake import ConnectRequest, Deadline, dial
from meshmend.net.listener import Address
from meshmend.topology.failures import Chip

_log = getLogger(__name__)

_CALL_AGAIN_S: Final = 0.1
_HANDSHAKE_S: Final = 5.0
_FIRST_PULSE_S: Final = 0.5  # until the coordinator says how often
_MOST_REPORTS: Final = 1000


@dataclass(frozen=True)
class WorkerIdentity:
    """Which chip of which job a worker is, where it listens, and where the coordinator does."""

    job: str
    shape: tuple[int, ...]
    chip: Chip
    seat: int
    coordinator: Address
    secret: bytes


@dataclass(frozen=True)
class News:
    """What the coordinator has said last."""

    generation: Generation | None = None
    go: Go | None = None
    wait: str = ""
    turned_away: str = ""
    refused: str = ""
    is_over: bool = False


class Member:
    """One worker as its coordinator knows it."""

    def __init__(self, post: WorkerIdentity) -> None:
        self._post = post
        self._changed = threading.Condition()
        self._news = News()
        self._status = Status()
        self._address: Address | None = None
        self._on_change: Callable[[], None] = lambda: None
        self._on_sever: Callable[[Chip], None] = lambda chip: None
        self._reports: deque[Message] = deque(maxlen=_MOST_REPORTS)
        self._must_report = False
        self._turn: LoopPosition = (0, 0)
        self._silence_s = 4 * _FIRST_PULSE_S
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="meshmend-member", daemon=True)
        self._thread.start()

    def join(
        self,
        address: Address,
        status: Status,
        *,
        on_change: Callable[[], None],
        on_sever: Callable[[Chip], None],
    ) -> None:
        """Offer this worker, which listens at an address, to the coordinator."""
        with self._changed:
            self._address, self._status = address, status
            self._on_change, self._on_sever = on_change, on_sever
            self._news = News()
        self._wake()

    def report(self, **facts: Any) -> None:
        """Tell who watches the job of a step that was done; may be lost."""
        self._reports.append({"kind": "done", "facts": facts})
        self._wake()

    def tell(self, status: Status) -> None:
        """Say how this worker stands; said again to a coordinator that was started again."""
        with self._changed:
            self._status = status
            self._must_report = True
        self._wake()

    def mark(self, generation: int, step: int) -> None:
        """Keep which turn this worker's loop has reached; the next heartbeat tells."""
        self._turn = (generation, step)

    def note(self, status: Status) -> None:
        """Keep how this worker stands for when the coordinator asks, without a word."""
        with self._changed:
            self._status = status

    @property
    def status(self) -> Status:
        """What was told last."""
        return self._status

    @property
    def news(self) -> News:
        """What the coordinator has said last."""
        return self._news

    def await_news(self, is_enough: Callable[[News], bool]) -> News:
        """Return the news as soon as they are enough.

        Raises:
            TurnedAwayError, RefusedError: as their names say.
        """
        said = ""
        with self._changed:
            while True:
                news = self._news
                if news.refused:
                    raise RefusedError(news.refused)
                if news.turned_away:
                    raise TurnedAwayError(news.turned_away)
                if is_enough(news):
                    return news
                if news.wait != said:
                    said = news.wait
                    _log.info("chip %s waits: %s", self._post.chip, said)
                self._changed.wait()

    def close(self) -> None:
        """Say no more; what was told is sent first."""
        self._is_closed = True
        self._wake()
        self._thread.join(2.0)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _work(self) -> None:
        """Keep a line to the coordinator for as long as this worker lives."""
        while not self._is_closed:
            if self._address is None or self._news.turned_away or self._news.refused:
                self._pause(_CALL_AGAIN_S)
                continue
            try:
                channel = self._call()
            except HandshakeError as error:
                self._hear(replace(self._news, refused=str(error)))
                continue
            except TransportError as error:
                _log.debug("chip %s cannot reach its coordinator: %s", self._post.chip, error)
                self._pause(_CALL_AGAIN_S)
                continue
            try:
                self._talk(channel)
            except ChannelError as error:
                _log.debug("chip %s lost its coordinator: %s", self._post.chip, error)
            finally:
                channel.close()
            self._pause(_CALL_AGAIN_S / 2)

    def _pause(self, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ)
            if selector.select(seconds):
                clear(self._wake_fd)

    def _call(self) -> Channel:
        post = self._post
        deadline = Deadline(time.monotonic() + _HANDSHAKE_S)
        request = ConnectRequest(post.seat, COORDINATOR)
        return Channel(dial(post.coordinator, post.secret, request, deadline))

    def _talk(self, channel: Channel) -> None:
        """Greet, then pass on what is said in both directions until the line breaks."""
        with self._changed:
            generation = self._news.generation if self._status.state_version != FRESH else None
            heard = self._news.generation.number if self._news.generation else 0
            hello = {
                "kind": "hello",
                "job": self._post.job,
                "shape": self._post.shape,
                "chip": self._post.chip,
                "address": self._address,
                "memory": generation.as_json() if generation else None,
                **asdict(self._status),
                "generation": max(self._status.generation, heard),
            }
        channel.send(hello)
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ)
            selector.register(channel, selectors.EVENT_READ)
            while not (self._news.turned_away or self._news.refused):
                want = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.is_full else 0)
                selector.modify(channel, want)
                selector.select(self._silence_s / 4)
                clear(self._wake_fd)
                for message in channel.receive():
                    if not self._take(message):
                        return
                self._say(channel)
                if self._is_closed and not channel.is_full:
                    return

    def _say(self, channel: Channel) -> None:
        with self._changed:
            must_report, self._must_report = self._must_report, False
            status = asdict(self._status)
        if must_report:
            channel.send({"kind": "status", **status})
        while self._reports and not channel.is_full:
            channel.send(self._reports.popleft())
        if not channel.is_full:
            channel.send({"kind": "beat", "turn": self._turn})

    def _take(self, message: Message) -> bool:
        """Take in one message; return whether to go on."""
        kind = message["kind"]
        if kind == "welcome":
            self._silence_s = float(message["heartbeat_timeout_s"])
        elif kind == "generation":
            generation = generation_from(message["generation"])
            self._hear(News(generation=generation))
        elif kind == "go":
            holders = tuple(tuple(chip) for chip in message["holders"])
            go = Go(message["generation"], message["step"], holders)
            self._hear(replace(self._news, go=go, wait=""), is_change=False)
        elif kind == "wait":
            # A member that has to wait must stop: whoever it waits for went on without it.
            self._hear(replace(self._news, wait=message["why"]))
        elif kind == "turned away":
            self._hear(replace(self._news, turned_away=message["why"]))
        elif kind == "refused":
            self._hear(replace(self._news, refused=message["why"]))
        elif kind == "over":
            self._hear(replace(self._news, is_over=True))
        elif kind == "sever":
            self._on_sever(tuple(message["chip"]))
        return bool(kind != "later")

    def _hear(self, news: News, *, is_change: bool = True) -> None:
        # First the interruption, then the news: who has read them is never interrupted by them.
        if is_change:
            self._on_change()
        with self._changed:
            self._news = news
            self._changed.notify_all()
