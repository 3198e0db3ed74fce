"""Values that cross a wire or go into a file: read back equal, or refused with the field's name."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, field

from codec_values import JSON, damaged, values
from meshmend.errors import MessageError
from meshmend.topology.failures import Link
from meshmend.transport.codec import Count, Finite, Real, Seconds, Value, plain, tag_of, value_of


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(Value, frozen=True):
    name: str
    size: Count = 0


class Everything(Value, frozen=True, tag_field="kind", tag="everything"):
    """Every type of field that our values have."""

    flag: bool
    count: Count
    whole: int
    share: Annotated[float, Meta(ge=0.0, le=1.0)]
    time_s: Seconds
    finite: Finite
    loss: Real | None
    text: str
    either: Finite | str | None
    colour: Colour
    link: Link
    inner: Inner
    pair: tuple[str, Count]
    many: tuple[Inner, ...] = ()
    links: frozenset[Link] = frozenset()
    figures: Mapping[str, Real] = field(default_factory=dict)


class Nothing(Value, frozen=True, tag_field="kind", tag="nothing"):
    """A kind without fields."""


Thing = Everything | Nothing

RIGHT: dict[str, Any] = {
    "kind": "everything", "flag": True, "count": 1, "whole": -3, "share": 0.5, "time_s": 2.5,
    "finite": 1e300, "loss": None, "text": "words", "either": "or", "colour": "red",
    "link": {"first": [0, 0], "second": [0, 1]}, "inner": {"name": "inside"},
    "pair": ["port", 7000],
}  # fmt: skip


def read(document: object) -> Any:
    return value_of(document, Thing, "a thing")


@given(values(Thing))
def test_what_is_written_is_read_back_equal(value: object) -> None:
    written = json.loads(json.dumps(plain(value)))

    assert read(written) == value
    assert json.loads(json.dumps(plain(read(written)))) == written


@given(values(Thing), st.data())
def test_damage_is_refused_or_does_no_harm(value: object, data: st.DataObject) -> None:
    document = data.draw(damaged(json.loads(json.dumps(plain(value)))))

    with suppress(MessageError):
        assert isinstance(read(document), Thing)


@given(JSON)
def test_anything_else_is_refused(document: object) -> None:
    with pytest.raises(MessageError, match=r"^a thing is not valid: "):
        read(document)


@pytest.mark.parametrize("name", [each for each in RIGHT if each != "kind"])
def test_every_field_is_needed_and_checked(name: str) -> None:
    read(RIGHT)

    without = {key: value for key, value in RIGHT.items() if key != name}
    with pytest.raises(MessageError, match=f"missing required field `{name}`"):
        read(without)
    with pytest.raises(MessageError, match=rf"at `\$\.{name}`"):
        read({**RIGHT, name: {"odd": []}})


def test_a_field_with_a_default_may_be_absent() -> None:
    value = read(RIGHT)

    assert (value.many, value.links, value.figures) == ((), frozenset(), {})


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"}, {"kind": 7}, {"colours": 1}, {"flag": 1}, {"count": 1.5},
        {"count": True}, {"count": -1}, {"count": 1 << 53}, {"count": "1"}, {"share": 1.5},
        {"share": math.nan}, {"time_s": -0.1}, {"time_s": math.inf}, {"time_s": math.nan},
        {"time_s": 10**400}, {"finite": math.inf}, {"finite": math.nan}, {"finite": "1"},
        {"text": None}, {"either": []}, {"either": math.inf}, {"colour": "green"},
        {"link": "0,0"}, {"link": {"first": [0, 1], "second": [0, 0]}}, {"inner": {"name": 1}},
        {"inner": {"name": "a", "odd": 1}}, {"inner": []}, {"pair": ["port"]}, {"many": {}},
        {"many": [{}]}, {"figures": {"loss": "x"}},
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match=r"^a thing is not valid: \w+"):
        read({**RIGHT, **change})


def test_a_loss_may_be_infinite_or_no_number() -> None:
    assert math.isnan(read({**RIGHT, "loss": math.nan}).loss)
    assert read({**RIGHT, "loss": math.inf}).loss == math.inf


def test_what_is_nested_deeper_than_the_stack_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]

    with pytest.raises(MessageError, match=r"Expected `str`, got `array` - at `\$\.text`"):
        read({**RIGHT, "text": deep})


def test_kinds_have_names() -> None:
    assert tag_of(Nothing()) == "nothing"
