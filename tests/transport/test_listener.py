"""A listener holds out against callers that do not know the secret, however many they are."""

import itertools
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import HandshakeError, TransportError
from meshmend.transport import handshake
from meshmend.transport.handshake import ConnectRequest, Deadline, ListenerHandshake, dial
from meshmend.transport.listener import Address, Listener, listening
from testbeds import require_testbed

SECRET = b"known to all of us"
ME = 7
HANG_S = 120.0  # ends a test that hangs; nothing else depends on it

SERVER = f"""
import os, sys, time
from meshmend.transport.listener import Listener, listening
def admit(connection, request):
    print("admitted", request.caller, flush=True)
listener = Listener(listening("127.0.0.1"), {SECRET!r}, {ME}, name="me", admit=admit)
print(listener.address[1], flush=True)
sys.stdin.read()
"""


def call(address: Address, caller: int = 1, secret: bytes = SECRET) -> socket.socket:
    deadline = Deadline(time.monotonic() + HANG_S)
    return dial(address, secret, ConnectRequest(caller, ME), deadline)


@contextmanager
def strangers(address: Address, n_callers: int) -> Iterator[None]:
    """Have so many connections that say nothing; those that are cut off count too."""
    callers = []
    try:
        for _ in range(n_callers):
            with suppress(OSError):
                callers.append(socket.create_connection(address, timeout=HANG_S))
        yield
    finally:
        for caller in callers:
            caller.close()


@contextmanager
def served_with_descriptors(limit: int) -> Iterator[tuple[Address, "subprocess.Popen[str]"]]:
    """A listener in a process that may have so many open files."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    assert process.stdout is not None
    try:
        yield ("127.0.0.1", int(process.stdout.readline())), process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("limit", [64, 256, 512])
def test_more_strangers_than_descriptors_do_not_keep_a_friend_out(limit: int) -> None:
    with served_with_descriptors(limit) as (address, process):
        assert process.stdout is not None
        with strangers(address, limit + 100):
            friend = call(address, 3)

            assert process.stdout.readline() == "admitted 3\n"
            friend.close()
        again = call(address, 4)
        assert process.stdout.readline() == "admitted 4\n"
        again.close()


def test_a_friend_is_let_in_while_strangers_keep_calling() -> None:
    admitted: list[int] = []

    def admit(connection: socket.socket, request: ConnectRequest) -> None:
        admitted.append(request.caller)
        connection.close()

    listener = Listener(listening("127.0.0.1"), SECRET, ME, name="me", admit=admit)
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            with strangers(listener.address, 50):
                pass

    flooding = threading.Thread(target=flood)
    flooding.start()
    for caller in range(5):
        while caller not in admitted:  # as a worker does, it calls again when it was cut off
            with suppress(TransportError):
                call(listener.address, caller).close()
    is_over.set()
    flooding.join()
    listener.close()

    assert set(admitted) == set(range(5))


def test_a_flood_of_refusals_is_logged_in_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener(
        listening("127.0.0.1"), SECRET, ME, name="me", admit=lambda connection, request: None
    )
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), strangers(listener.address, 600):
        pass
    took_s = time.monotonic() - began
    listener.close()

    assert 0 < len(caplog.records) <= 10 * (took_s + 2)


@given(st.lists(st.integers(1, 40), min_size=1))
def test_bytes_may_come_in_any_pieces(sizes: list[int]) -> None:
    listening_end = ListenerHandshake(SECRET, ME)
    request = ConnectRequest(3, ME, 5, 8)
    hello = handshake._HELLO.pack(handshake._MAGIC, 3, ME, 5, 8, b"n" * 32)

    answer = fed(listening_end, hello, sizes)
    assert (len(answer), listening_end.request) == (64, None)
    last = fed(listening_end, handshake._proof(SECRET, b"dialler", hello, answer[:32]), sizes)

    assert (last, listening_end.request) == (handshake._WELCOME, request)
    assert listening_end.n_wanted == 0


def fed(listening_end: ListenerHandshake, data: bytes, sizes: list[int]) -> bytes:
    """Feed bytes in pieces of these sizes, over and over; return all that is answered."""
    answer = b""
    for size in itertools.cycle(sizes):
        answer += listening_end.feed(data[:size])
        data = data[size:]
        if not data:
            return answer
    raise AssertionError("sizes are endless")


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        (b"GET / HTTP/1.1\r\n" + b"x" * 70, "its first bytes are b'GET / HTTP'"),
        (b"\0" * 86, "this is not a meshmend handshake"),
    ],
)
def test_a_stranger_is_refused_by_its_first_bytes(sent: bytes, match: str) -> None:
    listening_end = ListenerHandshake(SECRET, ME)

    with pytest.raises(HandshakeError, match=match):
        listening_end.feed(sent[: listening_end.n_wanted])


def test_closing_twice_does_nothing_and_frees_the_port() -> None:
    listener = Listener(
        listening("127.0.0.1"), SECRET, ME, name="me", admit=lambda connection, request: None
    )
    listener.close()
    listener.close()

    listening(*listener.address).close()


CALL_ONESELF = f"""
from pathlib import Path
import time
from meshmend.errors import PeerLostError
from meshmend.transport.handshake import ConnectRequest, Deadline, dial
Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40000")
try:
    dial(("127.0.0.1", 40000), {SECRET!r}, ConnectRequest(1, {ME}), Deadline(time.monotonic() + 60))
except PeerLostError as error:
    print(error)
"""


def test_a_caller_to_whom_the_kernel_gives_the_port_that_it_calls_finds_nobody() -> None:
    """It took its own hello for that of a listener of another version, which ends a worker."""
    require_testbed()
    alone = [
        "unshare",
        "--map-root-user",
        "--net",
        "sh",
        "-c",
        'ip link set lo up; exec "$@"',
        "sh",
    ]

    line = [*alone, sys.executable, "-c", CALL_ONESELF]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=HANG_S)

    assert ran.stdout == "cannot connect to 127.0.0.1:40000: nobody listens there\n", ran.stderr


def test_an_end_of_another_version_is_refused_in_one_line_at_both_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted: list[ConnectRequest] = []
    listener = Listener(
        listening("127.0.0.1"), SECRET, ME, name="me", admit=lambda _, each: admitted.append(each)
    )
    hello = handshake._HELLO.pack(b"meshmend/9", 1, ME, 0, 0, bytes(32))
    with caplog.at_level(logging.WARNING), socket.create_connection(listener.address) as caller:
        caller.sendall(hello)
        answer = caller.recv(64, socket.MSG_WAITALL)
        assert caller.recv(1) == b""
    listener.close()
    assert "the other end speaks 'meshmend/9', this process 'meshmend/5'; install" in caplog.text
    assert admitted == []

    def answer_twice(other: socket.socket) -> None:
        for _ in range(2):
            connection, _ = other.accept()
            with connection:
                connection.sendall(answer)
                connection.recv(1000)

    monkeypatch.setattr(handshake, "_MAGIC", b"meshmend/5")
    with listening("127.0.0.1") as other:
        thread = threading.Thread(target=answer_twice, args=(other,), daemon=True)
        thread.start()
        with pytest.raises(HandshakeError, match="other end speaks 'meshmend/5', this process"):
            call(other.getsockname())
        thread.join(HANG_S)
