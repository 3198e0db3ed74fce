"""A worker's side of the protocol: when it sends heartbeats, and that all it says arrives."""

import socket

import pytest

from meshmend.membership.client import MembershipClient, WorkerIdentity
from meshmend.membership.coordinator_client import CoordinatorClient
from meshmend.membership.events import WriteFailed
from meshmend.membership.messages import (
    Alive,
    Heartbeat,
    Message,
    Report,
    Status,
    Welcome,
    received_messages,
)
from meshmend.transport.channel import Channel
from waiting import until

IDENTITY = WorkerIdentity("job", (2, 2), (0, 1), 1, ("127.0.0.1", 1), b"")
N_REPORTS = 900  # more bytes than a connection takes at once, and fewer than a client keeps


class Clock:
    """A clock that stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def joined(clock: Clock) -> MembershipClient:
    """Return a client that has said hello, was admitted, and has sent its first heartbeat."""
    client = MembershipClient(IDENTITY, clock)
    client.join(("h", 7), Status(), on_change=lambda: None, on_sever=lambda chip: None)
    client.hello()
    client.received(Welcome(heartbeat_timeout_s=8.0, lease_s=60.0))
    assert client.next_heartbeat() is not None
    return client


def test_a_status_needs_no_heartbeat_beside_it_and_one_comes_when_it_is_due() -> None:
    clock = Clock()
    client = joined(clock)

    clock.now = 1.0
    client.tell(Status(1, True))
    assert client.next_status() is not None
    assert client.next_heartbeat() is None
    assert client.beats_in_s == pytest.approx(1.0)

    clock.now = 2.0
    client.mark(1, 5)
    assert client.next_heartbeat() == Heartbeat(1, 5, 2.0)
    assert client.next_heartbeat() is None


def test_who_is_asked_whether_it_lives_answers_at_once_and_so_does_whoever_says_hello() -> None:
    clock = Clock()
    client = joined(clock)

    client.received(Alive())
    assert client.beats_in_s == 0
    assert client.next_heartbeat() is not None
    assert client.next_heartbeat() is None

    client.hello()  # to another coordinator, which does not know where the loop is
    assert client.next_heartbeat() is not None


def test_a_step_that_is_reported_is_in_a_heartbeat_too() -> None:
    client = joined(Clock())
    client.mark(3, 8)

    assert client.next_heartbeat(is_wanted=True) == Heartbeat(3, 8, 0.0)


def test_what_a_connection_does_not_take_at_once_is_sent_when_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread waited for ever: nothing sent the rest unless there was a new status."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ours = socket.create_connection(server.getsockname())
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        theirs, _ = server.accept()
    channel = Channel(ours)
    monkeypatch.setattr(CoordinatorClient, "_connect", lambda client: channel)
    client = CoordinatorClient(IDENTITY)
    for number in range(N_REPORTS):
        client.report(WriteFailed((0, 1), "a part", f"{number} {'x' * 100}"))
    client.join(("h", 7), Status(), on_change=lambda: None, on_sever=lambda chip: None)
    until(lambda: channel.has_unsent)

    heard: list[Message] = []
    other = Channel(theirs)

    def has_all() -> bool:
        heard.extend(received_messages(other))
        return sum(isinstance(each, Report) for each in heard) == N_REPORTS

    until(has_all)
    client.close()
    other.close()
