"""Connections between ranks whose ends are interrupted while they connect."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from meshmend.errors import PeerLostError
from meshmend.transport.handshake import ConnectRequest, Deadline, dial, local_name
from meshmend.transport.listener import Listener, listening, listening_locally
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


def test_processes_of_one_host_connect_without_tcp_and_others_over_it(
    callee: PeerConnections,
) -> None:
    """Under another name of this host nobody listens locally, as if it were another host."""
    request, until_then = ConnectRequest(0, 1, EPOCH, 1), Deadline(time.monotonic() + HANG_S)

    with closing(dial(callee.address, SECRET, request, until_then)) as inside:
        assert inside.family == socket.AF_UNIX
    with closing(dial(("localhost", callee.address[1]), SECRET, request, until_then)) as outside:
        assert outside.family == socket.AF_INET


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_a_local_name_that_another_user_has_taken_is_left_alone_and_the_port_serves() -> None:
    listener, calls = listening("127.0.0.1"), []
    address = listener.getsockname()
    taking = (
        "import os, socket, sys; os.seteuid(65534); taken = socket.socket(socket.AF_UNIX); "
        "taken.bind(chr(0) + sys.argv[1]); taken.listen(); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", taking, local_name(address)[1:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert listening_locally(address) is None
        with closing(
            Listener(listener, SECRET, 1, name="rank 1", admit=lambda *call: calls.append(call))
        ):
            request = ConnectRequest(0, 1, EPOCH, 1)
            mine = dial(address, SECRET, request, Deadline(time.monotonic() + HANG_S))
            until(lambda: calls)
            with closing(mine), closing(calls[0][0]):
                assert mine.family == socket.AF_INET
        other.communicate()
