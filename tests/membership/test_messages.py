"""Control messages: every kind survives its frame, and any damage gives one clear error."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec_values import JSON, damaged, values
from meshmend.errors import MessageError
from meshmend.membership.events import EVENTS, Event, WorkerArrived
from meshmend.membership.messages import (
    MESSAGES,
    VERSION,
    CutLink,
    Go,
    Heartbeat,
    Message,
    Observed,
    Over,
    decode_message,
    encode_message,
)
from meshmend.topology.failures import Link

ANY = values(MESSAGES, {Event: EVENTS})


@given(ANY)
def test_every_message_survives_its_frame(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


@given(ANY, st.data())
def test_a_damaged_message_is_refused_or_read(message: Message, data: st.DataObject) -> None:
    document = data.draw(damaged(json.loads(encode_message(message))))

    with suppress(MessageError):
        assert isinstance(decode_message(json.dumps(document).encode()), Message)


@given(ANY, st.data())
def test_a_frame_cut_short_is_refused(message: Message, data: st.DataObject) -> None:
    frame = encode_message(message)

    with pytest.raises(MessageError, match="a frame needs a JSON object"):
        decode_message(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(ANY, st.data())
def test_a_frame_with_a_wrong_byte_is_refused_or_read(
    message: Message, data: st.DataObject
) -> None:
    frame = bytearray(encode_message(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))

    with suppress(MessageError):
        assert isinstance(decode_message(bytes(frame)), Message)


@given(st.binary() | JSON.map(lambda document: json.dumps(document).encode()))
def test_any_other_bytes_are_refused(frame: bytes) -> None:
    with pytest.raises(MessageError):
        decode_message(frame)


def frame_of(message: Message, old: str, new: str) -> bytes:
    text = encode_message(message).decode()
    assert old in text
    return text.replace(old, new).encode()


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "a frame needs a JSON object, but got b''"),
        (b"\xff", "a frame needs a JSON object"),
        (b"[" * 100_000, "a frame needs a JSON object"),
        (b"[1]", "of version None; install the same meshmend on all hosts"),
        (frame_of(Over(), f'"v":{VERSION}', '"v":2'),
         f"speaks version {VERSION} of the protocol, but got .* of version 2; install the same"),
        (frame_of(Over(), "over", "overture"), "a message needs a kind among hello, status"),
        (frame_of(Heartbeat(1, 2), '"step":2', '"stop":2'), "'heartbeat' needs nothing under 'st"),
        (frame_of(Heartbeat(1, 2), ',"step":2', ""), "needs a value under 'step', but got None"),
        (frame_of(Heartbeat(1, 2), '"step":2', '"step":-2'),
         "'heartbeat' needs a whole number of 0 or more under 'step', but got -2"),
        (frame_of(Go(1, 2, ((0, 1),)), "[0,1]", '"0,1"'), "'go' needs a list under 'holders'"),
        (frame_of(CutLink(Link((0, 0), (0, 1))), "link:0,0-0,1", "0,0"),
         "'cut' needs the text of a link under 'link', but got '0,0'"),
        (frame_of(Observed(1.0, WorkerArrived((0, 1))), "arrived", "departed"),
         "an event needs a kind among start, arrived,.* but got 'departed'"),
        (frame_of(Observed(1.0, WorkerArrived((0, 1))), '"clock":1.0', '"clock":Infinity'),
         "'observed' needs a number of 0 or more under 'clock', but got inf"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_frame_is_named(frame: bytes, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        decode_message(frame)
