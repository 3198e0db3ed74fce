"""Connections between ranks whose ends are interrupted while they connect."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from meshmend.errors import PeerLostError
from meshmend.transport.handshake import ConnectRequest, Deadline, dial
from meshmend.transport.peer_connections import PeerConnections, has_ended
from waiting import HANG_S, until

SECRET = b"known to all of us"
EPOCH = 5


@pytest.fixture
def callee() -> Iterator[PeerConnections]:
    """Rank 1, which waits for the calls of rank 0."""
    stop_fd = os.eventfd(0, os.EFD_NONBLOCK)
    with closing(
        PeerConnections(1, ["rank 0", "rank 1"], SECRET, bind="127.0.0.1", stop_fd=stop_fd)
    ) as connections:
        yield connections
    os.close(stop_fd)


def test_a_call_that_hung_up_is_not_chosen_and_the_next_one_in_its_epoch_is(
    callee: PeerConnections,
) -> None:
    """Rank 0 is interrupted while it connects, and calls again: no connection may be lost by it."""
    dead = _call(callee, generation=7)
    until(lambda: not callee.choose_old(0, EPOCH))  # the call has come
    dead.close()
    calls = []

    def call_again() -> None:
        time.sleep(0.2)  # rank 1 is in the new generation first
        calls.append(_call(callee, generation=8))

    caller = threading.Thread(target=call_again)
    caller.start()
    chosen = callee.connection(
        0, ("127.0.0.1", 1), time.monotonic() + HANG_S, epoch=EPOCH, generation=8
    )
    caller.join()

    with closing(chosen), closing(calls[0]) as caller_end:
        caller_end.sendall(b"?")
        assert chosen.recv(1) == b"?"
        assert not has_ended(caller_end)


def test_a_rank_that_hung_up_and_does_not_call_again_is_lost(callee: PeerConnections) -> None:
    dead = _call(callee, generation=7)
    until(lambda: not callee.choose_old(0, EPOCH))
    dead.close()

    with pytest.raises(PeerLostError, match="did not connect"):
        callee.connection(0, ("127.0.0.1", 1), time.monotonic() + 0.3, epoch=EPOCH, generation=8)


def _call(callee: PeerConnections, *, generation: int) -> socket.socket:
    deadline = Deadline(time.monotonic() + HANG_S)
    return dial(callee.address, SECRET, ConnectRequest(0, 1, EPOCH, generation), deadline)


@pytest.fixture
def waiting() -> Iterator[PeerConnections]:
    """Rank 1 of a group without a coordinator, which looks for those who do not call."""
    labels, stop_fd = ["rank 0", "rank 1"], os.eventfd(0, os.EFD_NONBLOCK)
    with closing(
        PeerConnections(
            1, labels, SECRET, bind="127.0.0.1", stop_fd=stop_fd, looks_for_callers=True
        )
    ) as connections:
        yield connections
    os.close(stop_fd)


def test_a_caller_that_died_before_it_called_is_missed_long_before_the_deadline(
    waiting: PeerConnections,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()

    with pytest.raises(PeerLostError, match="rank 0 did not connect to rank 1, and is gone"):
        waiting.connection(0, address, time.monotonic() + HANG_S)


def test_a_caller_that_takes_its_time_sees_nothing_of_those_who_look_for_it(
    callee: PeerConnections,
    waiting: PeerConnections,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("meshmend.transport.peer_connections._LOOK_EVERY_S", 0.02)

    with pytest.raises(PeerLostError, match="rank 0 did not connect to rank 1 in time"):
        waiting.connection(0, callee.address, time.monotonic() + 1.5)

    assert not caplog.records
