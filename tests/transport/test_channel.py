"""Frames on a proved connection: whole or not at all."""

import socket
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import ChannelError
from meshmend.transport.channel import LONGEST_BYTES, MOST_UNSENT_BYTES, Channel

FRAMES = st.binary(max_size=200)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    near, far = pair()
    channel = Channel(near)
    yield channel, far
    channel.close()
    far.close()


def framed(body: bytes) -> bytes:
    return head_of(len(body)) + struct.pack(">I", zlib.crc32(body)) + body


def head_of(length: int) -> bytes:
    packed = struct.pack(">I", length)
    return packed + struct.pack(">I", zlib.crc32(packed))


def received(channel: Channel, n_messages: int, *, within_s: float = 5.0) -> list[bytes]:
    """Return so many messages, or what has come in time."""
    messages: list[bytes] = []
    deadline = time.monotonic() + within_s
    while len(messages) < n_messages and time.monotonic() < deadline:
        messages += channel.receive()
    return messages


@settings(max_examples=30)
@given(st.lists(FRAMES, max_size=5), st.lists(st.integers(0, 400), max_size=8))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(
    messages: list[bytes], cuts: list[int]
) -> None:
    near, far = pair()
    stream = b"".join(framed(message) for message in messages)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    came: list[bytes] = []

    channel = Channel(near)
    for start, stop in pairwise(places):
        far.sendall(stream[start:stop])
        came += channel.receive()
    came += received(channel, len(messages) - len(came))

    assert came == messages
    channel.close()
    far.close()


def test_what_one_channel_sends_the_other_receives() -> None:
    near, far = pair()
    one, other = Channel(near), Channel(far)

    one.send(b"a frame")

    assert received(other, 1) == [b"a frame"]
    one.close()
    other.close()


def test_a_long_message_is_kept_until_the_other_end_reads() -> None:
    near, far = pair()
    one, other = Channel(near), Channel(far)
    frame = b"x" * (LONGEST_BYTES - 100)

    one.send(frame)
    assert one.has_unsent
    came: list[bytes] = []
    while not came:
        one.flush()
        came = other.receive()

    assert came == [frame]
    assert not one.has_unsent
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame was damaged on its way: its length"),
        (head_of(LONGEST_BYTES + 1) + bytes(4), "announced 16777217"),
    ],
)
def test_a_length_that_no_frame_has_is_refused(
    ends: tuple[Channel, socket.socket], sent: bytes, match: str
) -> None:
    channel, far = ends
    far.sendall(sent)

    with pytest.raises(ChannelError, match=match):
        received(channel, 1)


def test_what_came_before_the_end_is_handed_out_before_the_end_is_told(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, far = ends
    far.sendall(framed(b"last") + b"\x00\x00")
    far.close()

    assert received(channel, 1) == [b"last"]
    with pytest.raises(ChannelError, match="closed the connection"):
        received(channel, 1)


def test_an_end_that_never_stops_sending_is_read_in_parts(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, far = ends
    far.setblocking(False)
    frames = framed(b"and on") * 10_000

    def send() -> None:
        with suppress(BlockingIOError):
            far.send(frames)

    send()
    first = channel.receive()

    assert 0 < len(first) < 10_000


def test_who_does_not_read_is_hung_up_on_before_memory_is_full(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, _ = ends

    def send_for_ever() -> Any:
        while True:
            channel.send(b"x" * 1_000_000)

    with pytest.raises(ChannelError, match="does not read what it is sent"):
        send_for_ever()
    assert len(channel._unsent) <= MOST_UNSENT_BYTES + 1_000_004


def test_an_end_may_take_shorter_frames_only() -> None:
    near, far = pair()
    channel = Channel(near, longest_bytes=100)
    far.sendall(framed(b"x" * 100) + framed(b"x" * 101))

    with pytest.raises(
        ChannelError, match="needs 100 bytes at most, but the other end announced 101"
    ):
        received(channel, 2)
    channel.close()
    far.close()


def test_nobody_is_sent_to_who_has_gone(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    far.close()

    def send_for_ever() -> Any:
        while True:
            channel.send(b"x" * 1000)

    with pytest.raises(ChannelError, match="closed the connection"):
        send_for_ever()


def test_who_never_reads_is_given_up(ends: tuple[Channel, socket.socket]) -> None:
    channel, _ = ends
    frame = b"x" * (LONGEST_BYTES - 100)

    def send_much() -> None:
        for _ in range(4):
            channel.send(frame)

    with pytest.raises(ChannelError, match="does not read"):
        send_much()


def test_last_words_are_heard_although_the_end_was_a_reset(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, far = ends
    channel.send(b"a heartbeat")  # never read: closing resets the connection
    far.sendall(framed(b"turned away"))
    far.close()
    time.sleep(0.05)

    assert received(channel, 1) == [b"turned away"]


def test_a_frame_with_a_flipped_bit_ends_the_connection_at_once() -> None:
    frame = framed(b"a message")
    for bit in range(8 * len(frame)):
        near, far = pair()
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        far.sendall(damaged)
        channel = Channel(near)

        with pytest.raises(ChannelError, match="damaged on its way"):
            received(channel, 1)
        channel.close()
        far.close()
