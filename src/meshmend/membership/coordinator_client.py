"""A worker's connection to its coordinator: a thread that sends, receives and reconnects.

The main thread sets its status and reads the news. It never waits for the coordinator while it has
a step to do and a lease to do it. When the thread receives a change, it calls `on_change`, which
ends whatever the main thread waits for.
"""

import math
import os
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from logging import getLogger
from typing import Final

from meshmend.errors import (
    ChannelError,
    HandshakeError,
    MessageError,
    StoppedError,
    TransportError,
)
from meshmend.membership.client import MembershipClient, News, WorkerIdentity
from meshmend.membership.events import Event
from meshmend.membership.job import JobFingerprint
from meshmend.membership.messages import (
    COORDINATOR,
    AskStatus,
    Message,
    Refused,
    Status,
    StatusAnswer,
    Traffic,
    Welcome,
    received_messages,
    send_message,
)
from meshmend.membership.worker_status import WorkerStatusKeeper
from meshmend.topology.failures import Chip
from meshmend.transport.channel import Channel
from meshmend.transport.codec import shown
from meshmend.transport.event_fd import clear, event_of
from meshmend.transport.handshake import ConnectRequest, Deadline, dial
from meshmend.transport.listener import Address
from meshmend.transport.liveness import LinkWatch, Silence
from meshmend.transport.pacing import Backoff

_log = getLogger(__name__)

_IDLE_S: Final = 1.0  # between two checks while the worker has not joined
_LONGEST_WAIT_S: Final = 5.0  # between two requests for a chip that has another worker
_HANDSHAKE_S: Final = 5.0
_TRAFFIC_S: Final = 5.0  # between two messages that count the bytes sent
_FLUSH_S: Final = 2.0  # to send what is queued
_QUIET_S: Final = 15.0  # without word from the coordinator, until the user is told; a try takes 6 s


def _now() -> float:
    """Return the time by a clock that also runs while this machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class CoordinatorClient:
    """Keeps one worker connected to its coordinator; any thread may call any method.

    `on_status` is called with every status that the worker sets.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        *,
        on_status: Callable[[Status], None] = lambda status: None,
    ) -> None:
        self._identity = identity
        self._on_status = on_status
        self._client = MembershipClient(identity, _now)
        self._keeper = WorkerStatusKeeper(identity, self._client, time.monotonic())
        self._changed = threading.Condition()
        self._wake_fd = event_of(self)
        self._joined_at = 0.0
        self._taken_since: float | None = None
        self._taken_backoff = Backoff(identity.seat, longest_s=_LONGEST_WAIT_S)
        self._is_closed = False
        self._traffic: Callable[[], Mapping[Chip, int]] = dict
        self._traffic_at = 0.0  # when it was last sent
        self._backoff = Backoff(identity.seat)
        self._silence = Silence(time.monotonic())
        self._is_unheard = False  # and the user was told so
        self._thread = threading.Thread(target=self._work, name="meshmend-client", daemon=True)
        self._thread.start()

    def join(
        self,
        address: Address,
        status: Status,
        *,
        on_change: Callable[[], None],
        on_sever: Callable[[Chip], None],
    ) -> None:
        """Ask the coordinator to admit this worker, whose peers connect to `address`."""
        self._on_status(status)
        with self._changed:
            self._joined_at = time.monotonic()
            self._client.join(address, status, on_change=on_change, on_sever=on_sever)
        self._wake()

    @property
    def has_joined(self) -> bool:
        """Whether this worker has asked to be admitted."""
        return self._joined_at > 0

    def set_fingerprint(self, fingerprint: JobFingerprint) -> None:
        """Set the fingerprint for the hello; all workers of a job must have the same one."""
        self._client.fingerprint = fingerprint

    def set_traffic(self, traffic: Callable[[], Mapping[Chip, int]]) -> None:
        """Set what counts the bytes that this worker has sent; the client's thread calls it."""
        self._traffic = traffic

    def report(self, event: Event) -> None:
        """Send an event to the observers; it may be lost."""
        self._client.report(event)
        self._wake()

    def flush(self) -> None:
        """Wait until all reports are sent; give up soon if the coordinator is away."""
        with self._changed:
            self._changed.wait_for(lambda: not self._client.has_reports, _FLUSH_S)

    def tell(self, status: Status) -> None:
        """Send this status to the coordinator; a restarted coordinator gets it in the hello."""
        self._on_status(status)
        with self._changed:
            self._client.tell(status)
        self._keeper.follow(status, time.monotonic())
        self._wake()

    def mark(self, generation: int, step: int) -> None:
        """Set the position of this worker's loop for the next heartbeat."""
        self._client.mark(generation, step)
        self._keeper.move(step, time.monotonic())

    def note(self, status: Status) -> None:
        """Set the status for the next hello without sending it now."""
        self._on_status(status)
        with self._changed:
            self._client.status = status
        self._keeper.follow(status, time.monotonic())

    def answer(self, question: AskStatus) -> Message:
        """Return the answer to someone who asks this worker for the status of its job."""
        job = self._identity.job
        if question.job is not None and question.job != job:
            return Refused(
                f"it asks for job {shown(question.job)}, but this worker is of job {job!r}"
            )
        status = self._keeper.status(time.monotonic(), is_brief=question.is_brief)
        return StatusAnswer(status)

    @property
    def status(self) -> Status:
        """The status that was set last."""
        return self._client.status

    @property
    def news(self) -> News:
        """What this worker has learned from the coordinator's latest messages."""
        return self._client.news

    def await_news(self, is_enough: Callable[[News], bool]) -> News:
        """Return the news as soon as `is_enough` accepts them.

        Raises:
            RefusedError, TurnedAwayError: the coordinator does not want this worker.
            JobFailedError: the job cannot go on.
        """
        logged = ""
        with self._changed:
            while True:
                news = self._client.news
                news.check()
                if is_enough(news):
                    return news
                if news.wait != logged:
                    logged = news.wait
                    _log.info("chip %s waits: %s", self._identity.chip, logged)
                self._changed.wait()

    def await_change(self, has_changed: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the news make `has_changed` true, `timeout_s` at most; return whether it is.

        It looks whenever there are news. Unlike a look every few milliseconds, that leaves the
        processors to those who bring them.
        """
        with self._changed:
            return self._changed.wait_for(has_changed, timeout_s)

    def await_lease(self, generation: int) -> None:
        """Return as soon as this worker may step in a generation; usually at once.

        Raises:
            StoppedError: the coordinator has something else for it than to step.
        """
        if self._client.has_lease(generation):
            return
        chip, is_logged = self._identity.chip, False
        with self._changed:
            while not self._client.has_lease(generation):
                if self._client.is_behind(generation):
                    raise StoppedError(f"chip {chip} was told to stop")
                if not is_logged:
                    is_logged = True
                    _log.warning("chip %s has no word from its coordinator: it stops", chip)
                self._changed.wait()
        if is_logged:
            _log.warning("chip %s has word from its coordinator again: it goes on", chip)

    def close(self) -> None:
        """Send what is queued, then end the thread."""
        self._is_closed = True
        self._wake()
        self._thread.join(_FLUSH_S)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _work(self) -> None:
        """Keep a connection to the coordinator until the client is closed."""
        chip = self._identity.chip
        while not self._is_closed:
            if not self._client.wants_connection:
                self._listen(has_heard=True)  # it expects no word
                self._pause_until(time.monotonic() + _IDLE_S)
                continue
            again_at = time.monotonic() + self._backoff.wait_s()
            try:
                channel = self._connect()
            except HandshakeError as error:
                self._end_refused(str(error))
                continue
            except TransportError as error:
                _log.debug("chip %s cannot reach its coordinator: %s", chip, error)
                self._listen(why=str(error))
                self._give_up_calling()
                self._pause_until(again_at)
                continue
            try:
                self._exchange_messages(channel)
            except (ChannelError, MessageError) as error:
                _log.debug("chip %s lost its coordinator: %s", chip, error)
            finally:
                channel.close()
                self._keeper.disconnected(time.monotonic())
            if self._client.taken:
                wait_s = self._wait_for_chip()
            else:
                self._taken_since, wait_s = None, self._backoff.wait_s()
            self._pause_until(time.monotonic() + wait_s)

    @property
    def _calls_for_s(self) -> float:
        """How long this worker calls a coordinator that gives no word."""
        timing = self._identity.timing
        return timing.join_timeout_s if self._client.is_new else timing.alone_s

    def _give_up_calling(self) -> None:
        """End a worker that has had no word from its coordinator for too long."""
        chip, (host, port) = self._identity.chip, self._identity.coordinator
        now, within_s = time.monotonic(), self._calls_for_s
        if not self._client.is_new:
            if self._silence.is_too_long(now, within_s, has_heard=False):
                self._end_refused(
                    f"chip {chip} has had no word from its coordinator at {host}:{port} for "
                    f"{within_s:g} s: the job has ended without it, or its coordinator is gone"
                )
        elif now - self._joined_at > within_s:
            self._end_refused(
                f"chip {chip} found no coordinator at {host}:{port} within "
                f"{within_s:g} s: the job is over, or was never started"
            )

    def _listen(self, *, has_heard: bool = False, why: str = "") -> None:
        """Tell the user once that the coordinator gives no word, and once that it does again."""
        chip, (host, port) = self._identity.chip, self._identity.coordinator
        quiet_s = max(_QUIET_S, self._client.heartbeat_timeout_s)
        is_quiet = self._silence.is_too_long(time.monotonic(), quiet_s, has_heard=has_heard)
        if has_heard and self._is_unheard and self._client.wants_connection:
            _log.warning("chip %s has word from its coordinator again", chip)
        elif is_quiet and not self._is_unheard:
            _log.warning(
                "chip %s has had no word from its coordinator at %s:%d for %g s, and gives up "
                "after %g s: %s",
                chip,
                host,
                port,
                quiet_s,
                self._calls_for_s,
                why,
            )
        self._is_unheard = not has_heard and (is_quiet or self._is_unheard)

    def _wait_for_chip(self) -> float:
        """Return how long to wait before asking for the chip again.

        A new worker that has waited for `wait_for_chip_s` is ended.
        """
        taken, within_s = self._client.taken, self._identity.timing.wait_for_chip_s
        now = time.monotonic()
        if self._taken_since is None:
            self._taken_since = now
            _log.warning("%s; waiting %g s for that worker to leave", taken, within_s)
        waited_s = now - self._taken_since
        if self._client.is_new and waited_s >= within_s:
            self._end_refused(f"{taken}, still there after {within_s:g} s; stop one of the two")
        # A worker that holds a state asks for ever: the other workers may need that state.
        left_s = within_s - waited_s if self._client.is_new else _LONGEST_WAIT_S
        return min(self._taken_backoff.wait_s(), max(0.0, left_s))

    def _end_refused(self, why: str) -> None:
        self._client.set_news(News(end=Refused(why)))
        with self._changed:
            self._changed.notify_all()

    def _pause_until(self, moment: float) -> None:
        """Wait; return early if the worker joins, is rejected or is closed meanwhile."""
        is_wanted = self._client.wants_connection
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ)
            while not self._is_closed and self._client.wants_connection == is_wanted:
                if not selector.select(max(0.0, moment - time.monotonic())):
                    return
                clear(self._wake_fd)

    def _connect(self) -> Channel:
        identity, link_timeout_s = self._identity, self._identity.timing.link_timeout_s
        deadline = Deadline(time.monotonic() + _HANDSHAKE_S, link_timeout_s=link_timeout_s)
        request = ConnectRequest(identity.seat, COORDINATOR)
        return Channel(dial(identity.coordinator, identity.secret, request, deadline))

    def _exchange_messages(self, channel: Channel) -> None:
        """Send the hello, then pass messages in both directions until the connection ends."""
        with self._changed:
            hello = self._client.hello()
        send_message(channel, hello)
        watch = LinkWatch(self._identity.timing.link_timeout_s)
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ)
            selector.register(channel, selectors.EVENT_READ)
            while True:
                is_full = channel.has_unsent
                want = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_full else 0)
                selector.modify(channel, want)
                beats_in_s = math.inf if is_full else self._client.beats_in_s
                selector.select(min(beats_in_s, watch.interval_s))
                clear(self._wake_fd)
                channel.flush()
                if not all(self._handle(message) for message in received_messages(channel)):
                    return
                self._listen(why="it is connected, but says nothing")
                if channel.is_dead(watch, time.monotonic()):
                    raise ChannelError(
                        f"the kernel of its host did not answer for {watch.timeout_s:g} s"
                    )
                self._send_pending(channel)
                if self._is_closed and not channel.has_unsent:
                    return

    def _send_pending(self, channel: Channel) -> None:
        with self._changed:
            status = self._client.next_status()
        if status is not None:
            send_message(channel, status)
        has_reported = False
        while not channel.has_unsent and (report := self._client.next_report()) is not None:
            send_message(channel, report)
            has_reported = True  # so the loop has moved
        with self._changed:
            self._changed.notify_all()  # who waits until reports are sent
        if channel.has_unsent:
            return
        if (beat := self._client.next_heartbeat(is_wanted=has_reported)) is not None:
            send_message(channel, beat)
            self._send_traffic(channel)

    def _send_traffic(self, channel: Channel) -> None:
        """Send how many bytes this worker has sent to the others, now and then."""
        now = time.monotonic()
        if now - self._traffic_at < _TRAFFIC_S:
            return
        self._traffic_at = now
        if sent := self._traffic():
            send_message(channel, Traffic(tuple(sorted(sent.items()))))

    def _handle(self, message: Message) -> bool:
        """Handle one message; return whether to keep the connection."""
        self._listen(has_heard=True)
        keeps_connection = self._client.received(message)
        if not self._client.taken:
            self._taken_since = None
            self._taken_backoff.reset()
        if isinstance(message, Welcome):
            self._backoff.reset()
            self._keeper.connected()
        with self._changed:
            self._changed.notify_all()
        return keeps_connection
