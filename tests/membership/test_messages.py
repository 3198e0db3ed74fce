"""Control messages: every kind survives its frame, and any damage gives one clear error."""

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from codec_values import JSON, damaged, values
from meshmend.errors import MessageError
from meshmend.membership.events import WorkerArrived
from meshmend.membership.messages import (
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

ANY = values(Message)
VERSION_BYTE = bytes([VERSION])


@given(ANY)
def test_every_message_survives_its_frame(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


@given(ANY, st.data())
def test_a_damaged_message_is_refused_or_read(message: Message, data: st.DataObject) -> None:
    document = data.draw(damaged(msgpack.decode(encode_message(message)[1:])))

    with suppress(MessageError):
        assert isinstance(decode_message(VERSION_BYTE + msgpack.encode(document)), Message)


@given(ANY, st.data())
def test_a_frame_cut_short_is_refused(message: Message, data: st.DataObject) -> None:
    frame = encode_message(message)

    with pytest.raises(MessageError, match=r"is not valid|speaks version"):
        decode_message(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(ANY, st.data())
def test_a_frame_with_a_wrong_byte_is_refused_or_read(
    message: Message, data: st.DataObject
) -> None:
    frame = bytearray(encode_message(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))

    with suppress(MessageError):
        assert isinstance(decode_message(bytes(frame)), Message)


@given(st.binary() | JSON.map(msgpack.encode))
def test_any_other_bytes_are_refused(frame: bytes) -> None:
    for each in (frame, VERSION_BYTE + frame):
        with pytest.raises(MessageError):
            decode_message(each)


def changed(message: Message, **fields: object) -> bytes:
    """Return the frame of a message with some fields replaced; None leaves one out."""
    document = {**msgpack.decode(encode_message(message)[1:]), **fields}
    kept = {name: value for name, value in document.items() if value is not None}
    return VERSION_BYTE + msgpack.encode(kept)


OBSERVED = Observed(1.0, WorkerArrived((0, 1)))


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", f"this end speaks version {VERSION} of the protocol, but got b''"),
        (b'{"v":7,"kind":"over"}', "but got b'{.*; install the same meshmend on all hosts"),
        (VERSION_BYTE, "a message is not valid: Input data was truncated"),
        (VERSION_BYTE + b"\x91" * 100_000, "not valid: Expected `object`, got `array`"),
        (changed(Over(), other=1), "not valid: Object contains unknown field `other`"),
        (changed(Over(), kind="overture"), "not valid: Invalid value 'overture' - at `$.kind`"),
        (changed(Over(), kind=None), "not valid: Object missing required field `kind`"),
        (changed(Heartbeat(1, 2), step=None), "Object missing required field `step`"),
        (changed(Heartbeat(1, 2), step=-2), "Expected `int` >= 0 - at `$.step`"),
        (changed(Heartbeat(1, 2), step=1 << 53), "Expected `int` <= 9007.* - at `$.step`"),
        (changed(Heartbeat(1, 2), step=2.5), "Expected `int`, got `float` - at `$.step`"),
        (changed(Heartbeat(1, 2), step=True), "Expected `int`, got `bool` - at `$.step`"),
        (changed(Heartbeat(1, 2), sent=math.inf), "Expected `float` <= .* - at `$.sent`"),
        (changed(Heartbeat(1, 2), sent=math.nan), "Expected `float` .* - at `$.sent`"),
        (changed(Go(1, 2, ((0, 1),)), holders=["0,1"]), "Expected `array`, got `str` - at `$.hol"),
        (changed(CutLink(Link((0, 0), (0, 1))), link={"first": [1], "second": [0]}),
         "not valid: Link needs two different chips in order"),
        (changed(OBSERVED, event={"event": "departed"}), "Invalid value 'departed' - at `$.event"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_frame_is_named(frame: bytes, words: str) -> None:
    with pytest.raises(MessageError, match=words.replace("$.", r"\$\.")):
        decode_message(frame)


def test_a_list_that_claims_to_be_long_takes_no_memory_for_it() -> None:
    claims = msgpack.encode({"kind": "go", "generation": 1, "step": 2, "holders": []})

    with pytest.raises(MessageError, match="truncated"):
        decode_message(VERSION_BYTE + claims[:-1] + b"\xdd\xff\xff\xff\xff")
