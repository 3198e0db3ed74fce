"""Messages on a proved connection: whole or not at all."""

import json
import select
import socket
import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import ChannelError
from meshmend.net.channel import LONGEST_BYTES, Channel, Message
from waiting import until

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
MESSAGES = st.dictionaries(st.text(min_size=1, max_size=5), VALUES, max_size=3).map(
    lambda more: {**more, "kind": "word"}
)


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
    return struct.pack(">I", len(body)) + body


def received(channel: Channel, n_messages: int) -> list[Message]:
    """Return the next messages, at least so many."""
    messages: list[Message] = []

    def are_enough() -> bool:
        if len(messages) < n_messages:
            messages.extend(channel.receive())
        return len(messages) >= n_messages

    until(are_enough)
    return messages


@settings(max_examples=30)
@given(st.lists(MESSAGES, max_size=5), st.lists(st.integers(0, 400), max_size=8))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(
    messages: list[Message], cuts: list[int]
) -> None:
    near, far = pair()
    stream = b"".join(framed(json.dumps(message).encode()) for message in messages)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    came: list[Message] = []

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

    one.send({"kind": "word", "chip": (0, 1)})

    assert received(other, 1) == [{"kind": "word", "chip": [0, 1]}]
    one.close()
    other.close()


def test_a_long_message_is_kept_until_the_other_end_reads() -> None:
    near, far = pair()
    one, other = Channel(near), Channel(far)
    text = "x" * (LONGEST_BYTES - 100)

    one.send({"kind": "word", "text": text})
    assert one.is_full
    came: list[Message] = []
    while not came:
        one.flush()
        came = other.receive()

    assert came == [{"kind": "word", "text": text}]
    assert not one.is_full
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "bytes is too long"),
        (struct.pack(">I", LONGEST_BYTES + 1), "16777217 bytes is too long"),
        (framed(b"\xff\xfe"), "no message"),
        (framed(b""), "no message"),
        (framed(b"[1, 2]"), "no message"),
        (framed(b'{"chip": 1}'), "no message"),
        (framed(b'{"kind": 7}'), "no message"),
    ],
)
def test_what_is_no_message_is_refused(
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
    far.sendall(framed(b'{"kind": "last"}') + b"\x00\x00")
    far.close()

    assert received(channel, 1) == [{"kind": "last"}]
    with pytest.raises(ChannelError, match="hung up"):
        received(channel, 1)


def test_nobody_is_sent_to_who_has_gone(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    far.close()

    def send_for_ever() -> Any:
        while True:
            channel.send({"kind": "word", "text": "x" * 1000})

    with pytest.raises(ChannelError, match="hung up"):
        send_for_ever()


def test_who_never_reads_is_given_up(ends: tuple[Channel, socket.socket]) -> None:
    channel, _ = ends
    text = "x" * (LONGEST_BYTES - 100)

    def send_much() -> None:
        for _ in range(4):
            channel.send({"kind": "word", "text": text})

    with pytest.raises(ChannelError, match="does not read"):
        send_much()


def test_last_words_are_heard_although_the_end_was_a_reset(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, far = ends
    channel.send({"kind": "beat"})  # never read: closing resets the connection
    far.sendall(framed(b'{"kind": "turned away"}'))
    far.close()
    reset = select.poll()
    reset.register(channel, 0)  # tells errors only
    until(lambda: reset.poll(0))

    assert received(channel, 1) == [{"kind": "turned away"}]


def test_nesting_without_end_is_no_message(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    far.sendall(framed(b"[" * 100_000))

    with pytest.raises(ChannelError, match="no message"):
        received(channel, 1)
