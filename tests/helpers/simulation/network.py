"""A network of hosts: connections that keep order, take time, and break in every way we know.

A connection is two `End`s. What one end sends arrives at the other in order and after a delay of
its own, so messages of two connections overtake each other. A path may be blocked in one direction
for a while: what was sent meanwhile arrives later, or never if the block outlasts the link timeout;
then both ends find the connection lost, each at a time of its own. An end whose process dies is
closed by its kernel; one whose host dies says nothing at all.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from simulation.event_loop import EventLoop, Process

HANDSHAKE_S = 0.6
NEVER = float("inf")


class End:
    """One end of a connection, in a process."""

    def __init__(self, network: "Network", owner: Process, on_ready: Callable[[], None]) -> None:
        self._network = network
        self.owner = owner
        self.on_ready = on_ready
        self.peer: End = self
        self.inbox: deque[Any] = deque()
        self.is_open = True
        self.is_lost = False  # the other end has closed, or cannot be reached
        self.arrives_at = 0.0
        self.held: deque[Any] = deque()  # what a blocked path keeps
        self.n_resets = 0  # of what was on its way to this end

    def send(self, item: Any) -> None:
        """Send something; nobody learns of it if the connection is lost."""
        if self.is_open and not self.is_lost:
            self._network.ship(self, item)

    def close(self) -> None:
        """Hang up: the other end finds out after all that was sent."""
        if self.is_open:
            self.is_open = False
            self._network.ship(self, None)

    def reset(self) -> None:
        """Break the connection: what is on its way in either direction is gone."""
        self.peer.n_resets += 1
        self.n_resets += 1
        self.held.clear()
        self.peer.held.clear()
        self.lose()
        self._network.ship(self, None)

    def vanish(self) -> None:
        """Say nothing any more, as a host without power: the other end finds out by itself."""
        self.is_open = False
        self.n_resets += 1
        self.peer.n_resets += 1
        self._network.lose_later(self.peer)

    def lose(self) -> None:
        """Find out that the connection is of no use any more."""
        if not self.is_lost:
            self.is_lost = True
            self.on_ready()


class Network:
    """All connections, the listeners, and which paths are blocked until when."""

    def __init__(self, events: EventLoop, link_timeout_s: float) -> None:
        self._events = events
        self._random = events.random
        self.link_timeout_s = link_timeout_s
        self.slow_until = 0.0
        self._blocked: dict[tuple[int, int], float] = {}
        self._listeners: dict[tuple[int, int], Callable[[End, Any], None]] = {}
        self._owners: dict[tuple[int, int], Process] = {}
        self._ends: list[End] = []

    def listen(self, process: Process, port: int, accept: Callable[[End, Any], None]) -> None:
        """Have a process called at a port of its host."""
        self._listeners[process.host, port] = accept
        self._owners[process.host, port] = process

    def blocked_until(self, source: int, target: int) -> float:
        """Return until when nothing gets from one host to another; 0 if the path is free."""
        until = self._blocked.get((source, target), 0.0)
        return until if until > self._events.now else 0.0

    def block(self, paths: Iterable[tuple[int, int]], until: float) -> None:
        """Drop all that goes from one host to another on each of these paths, until a time."""
        self._ends = [end for end in self._ends if end.is_open and not end.is_lost]
        between: dict[tuple[int, int], list[End]] = {}  # by hosts, the lower one first
        if until - self._events.now > self.link_timeout_s:
            for end in self._ends:
                one, other = end.owner.host, end.peer.owner.host
                between.setdefault((min(one, other), max(one, other)), []).append(end)
        for path in paths:
            self._blocked[path] = max(until, self._blocked.get(path, 0.0))
            for end in between.get((min(path), max(path)), ()):
                self.lose_later(end)

    def unblock_all(self) -> None:
        """Heal every path."""
        self._blocked.clear()

    def lose_later(self, end: End) -> None:
        """Have an end find out within its link timeout that it is heard no more."""
        if self.link_timeout_s < NEVER:
            self._events.after(self.link_timeout_s * self._random.uniform(1.0, 1.2), end.lose)

    def ends_of(self, process: Process) -> list[End]:
        """Return the ends that a process has open."""
        return [end for end in self._ends if end.owner is process and end.is_open]

    def ship(self, source: End, item: Any) -> None:
        """Put something on its way; None is the end of the stream."""
        target, now = source.peer, self._events.now
        target.arrives_at = max(target.arrives_at, now + self._delay_s())
        n_resets = target.n_resets
        if item is None:
            self._events.at(target.arrives_at, lambda: self._arrive(target, None, target.n_resets))
        else:
            self._events.at(target.arrives_at, partial(self._arrive, target, item, n_resets))

    def dial(
        self,
        process: Process,
        address: tuple[int, int],
        request: Any,
        *,
        on_ready: Callable[[], None],
        on_result: Callable[[End | None], None],
    ) -> None:
        """Call an address; the result is an end, or None if nobody answers in time."""
        is_answered = [False]

        def answer(end: End | None) -> None:
            if is_answered[0] or not process.is_alive:
                if end is not None:
                    end.close()
                return
            is_answered[0] = True
            process.soon(lambda: on_result(end))

        self._events.after(HANDSHAKE_S, lambda: answer(None))
        self._events.after(
            self._delay_s(), lambda: self._ring(process, address, request, on_ready, answer)
        )

    def _ring(
        self,
        caller: Process,
        address: tuple[int, int],
        request: Any,
        on_ready: Callable[[], None],
        answer: Callable[[End | None], None],
    ) -> None:
        host = address[0]
        if self.blocked_until(caller.host, host) or self.blocked_until(host, caller.host):
            return  # nobody hears it: the caller gives up by itself
        owner = self._owners.get(address)
        if owner is None or not owner.is_alive:
            self._events.after(self._delay_s(), lambda: answer(None))
            return

        def accept() -> None:
            mine = End(self, caller, on_ready)
            theirs = End(self, owner, lambda: None)
            mine.peer, theirs.peer = theirs, mine
            self._ends += [mine, theirs]
            self._listeners[address](theirs, request)
            self._events.after(self._delay_s(), lambda: answer(mine))

        owner.soon(accept)

    def _delay_s(self) -> float:
        delay_s = 0.0005 + 0.003 * self._random.random()
        if self.slow_until > self._events.now:
            delay_s += 0.2 * self._random.random()
        return delay_s

    def _arrive(self, target: End, item: Any, n_resets: int) -> None:
        if n_resets != target.n_resets or target.is_lost:
            return
        until = self.blocked_until(target.peer.owner.host, target.owner.host)
        if until or target.held:
            if not target.held:
                self._events.at(until + self._delay_s(), lambda: self._release(target))
            target.held.append(item)
        else:
            self._hand_over(target, item)

    def _release(self, target: End) -> None:
        until = self.blocked_until(target.peer.owner.host, target.owner.host)
        if until:
            self._events.at(until + self._delay_s(), lambda: self._release(target))
            return
        while target.held and not target.is_lost:
            self._hand_over(target, target.held.popleft())

    def _hand_over(self, target: End, item: Any) -> None:
        if not target.is_open:
            return
        if item is None:
            target.lose()
        else:
            target.inbox.append(item)
            target.on_ready()
