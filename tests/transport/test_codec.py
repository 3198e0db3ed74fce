"""One codec: what it writes it reads back, and what is wrong in any field it refuses."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec_values import JSON, damaged, values
from meshmend.errors import MessageError
from meshmend.topology.failures import Link, parse_link
from meshmend.transport.codec import Codec, Count, Real, Seconds, Within


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    name: str
    size: Count = 0


@dataclass(frozen=True)
class Everything:
    """Every type of field that a codec knows."""

    flag: bool
    count: Count
    whole: int
    share: Annotated[float, Within(0, 1)]
    time_s: Seconds
    finite: float
    loss: Real | None
    text: str
    either: float | str | None
    colour: Colour
    link: Link
    inner: Inner
    pair: tuple[str, Count]
    many: tuple[Inner, ...] = ()
    links: frozenset[Link] = frozenset()
    figures: Mapping[str, Real] = field(default_factory=dict)


@dataclass(frozen=True)
class Nothing:
    """A kind without fields."""


@dataclass(frozen=True)
class Wrapper:
    content: Inner


CODEC = Codec("a thing", {"everything": Everything, "nothing": Nothing}, texts={Link: parse_link})
INNER = Codec("an inner thing", {"inner": Inner})
WRAPPER = Codec("a wrapper", {"wrapper": Wrapper}, nested={Inner: INNER})

RIGHT: dict[str, Any] = {
    "kind": "everything", "flag": True, "count": 1, "whole": -3, "share": 0.5, "time_s": 2.5,
    "finite": 1e300, "loss": None, "text": "words", "either": "or", "colour": "red",
    "link": "link:0,0-0,1", "inner": {"name": "inside"}, "pair": ["port", 7000],
}  # fmt: skip


@given(values(CODEC))
def test_what_is_written_is_read_back_equal(value: object) -> None:
    written = json.loads(json.dumps(CODEC.encode(value)))

    assert CODEC.decode(written) == value
    assert CODEC.encode(CODEC.decode(written)) == written


@given(values(CODEC), st.data())
def test_damage_is_refused_or_does_no_harm(value: object, data: st.DataObject) -> None:
    document = data.draw(damaged(json.loads(json.dumps(CODEC.encode(value)))))

    with suppress(MessageError):
        assert isinstance(CODEC.decode(document), Everything | Nothing)


@given(JSON)
def test_anything_else_is_refused(document: object) -> None:
    with pytest.raises(MessageError, match=r"^a thing needs"):
        CODEC.decode(document)


@pytest.mark.parametrize("name", [each for each in RIGHT if each != "kind"])
def test_every_field_is_needed_and_checked(name: str) -> None:
    CODEC.decode(RIGHT)

    without = {key: value for key, value in RIGHT.items() if key != name}
    with pytest.raises(MessageError, match=f"needs a value under '{name}', but got None"):
        CODEC.decode(without)
    with pytest.raises(MessageError, match=f"under '{name}(.odd)?', but got"):
        CODEC.decode({**RIGHT, name: {"odd": []}})


def test_a_field_with_a_default_may_be_absent() -> None:
    value = CODEC.decode(RIGHT)

    assert (value.many, value.links, value.figures) == ((), frozenset(), {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "other"}, "a thing needs a kind among everything, nothing, but got 'other'"),
        ({"kind": 7}, "a thing needs an object with a text under 'kind', but got"),
        ({"colours": 1}, "a thing 'everything' needs nothing under 'colours', but got 1"),
        ({"flag": 1}, "needs true or false under 'flag', but got 1"),
        ({"count": 1.0}, "needs a whole number under 'count', but got 1.0"),
        ({"count": True}, "needs a whole number under 'count', but got True"),
        ({"count": -1}, "needs a whole number of 0 or more under 'count', but got -1"),
        ({"count": 1 << 53}, "needs a whole number of 0 or more under 'count', but got 9007"),
        ({"share": 1.5}, "needs a number from 0 to 1 under 'share', but got 1.5"),
        ({"share": math.nan}, "needs a number from 0 to 1 under 'share', but got nan"),
        ({"time_s": -0.1}, "needs a number of 0 or more under 'time_s', but got -0.1"),
        ({"time_s": math.inf}, "needs a number of 0 or more under 'time_s', but got inf"),
        ({"time_s": 10**400}, "needs a number under 'time_s', but got 1000"),
        ({"finite": math.inf}, "needs a finite number under 'finite', but got inf"),
        ({"finite": "1"}, "needs a number under 'finite', but got '1'"),
        ({"text": None}, "needs a text under 'text', but got None"),
        ({"either": []}, r"needs a number or a text under 'either', but got \[\]"),
        ({"colour": "green"}, "needs one of red, blue under 'colour', but got 'green'"),
        ({"link": "0,0"}, "needs the text of a link under 'link', but got '0,0'"),
        ({"inner": {"name": 1}}, "needs a text under 'inner.name', but got 1"),
        ({"inner": []}, r"needs an object under 'inner', but got \[\]"),
        ({"pair": ["port"]}, r"needs a list of 2 under 'pair', but got \['port'\]"),
        ({"many": {}}, "needs a list under 'many', but got {}"),
        ({"many": [{}]}, "needs a value under 'many.name', but got None"),
        ({"figures": {"loss": "x"}}, "needs a number under 'figures', but got 'x'"),
        ({"text": ["long"] * 99}, r"but got \[.{59}\.\.\.$"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(MessageError, match=words):
        CODEC.decode({**RIGHT, **change})


def test_a_loss_may_be_infinite_or_no_number() -> None:
    assert math.isnan(CODEC.decode({**RIGHT, "loss": math.nan}).loss)
    assert CODEC.decode({**RIGHT, "loss": math.inf}).loss == math.inf


def test_what_is_nested_deeper_than_the_stack_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]

    with pytest.raises(MessageError, match=r"needs a text under 'text', but got \[\[\[\["):
        CODEC.decode({**RIGHT, "text": deep})


def test_a_nested_codec_names_the_kind_inside() -> None:
    written = WRAPPER.encode(Wrapper(Inner("a", 3)))

    assert written == {"kind": "wrapper", "content": {"kind": "inner", "name": "a", "size": 3}}
    assert WRAPPER.decode(written) == Wrapper(Inner("a", 3))
    with pytest.raises(
        MessageError, match=r"^an inner thing needs a kind among inner, but got 'outer'"
    ):
        WRAPPER.decode({"kind": "wrapper", "content": {"kind": "outer"}})


def test_kinds_have_names() -> None:
    assert dict(INNER.kinds) == {"inner": Inner}
    assert INNER.name_of(Inner("a")) == "inner"
