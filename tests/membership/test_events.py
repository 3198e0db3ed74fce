"""Events as values and as lines of `events.jsonl`: what is read back, and what is refused."""

import io
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from codec_values import JSON, damaged, values
from meshmend.errors import InputError
from meshmend.membership.events import (
    VERSION,
    ChipCoordinates,
    CoordinatorState,
    Event,
    FaultHappened,
    FaultRecovered,
    GenerationBegan,
    RunStarted,
    SampleCounts,
    StateRestored,
    StepFinished,
    TimedEvent,
    event_line,
    read_events,
)
from meshmend.membership.faults.fault import FaultKind
from meshmend.transport.codec import Count, Finite, Real, Seconds, tag_of

START = TimedEvent(0.0, RunStarted(mesh="4x4", steps=10, batch=64))
LINE = event_line(START)
DOCS = Path(__file__).parents[2] / "docs" / "events.md"


def changed(**fields: Any) -> list[str]:
    """Lines whose second is a step with these fields instead of its own."""
    step = json.loads(event_line(TimedEvent(1.5, StepFinished(1, 1, 4, 0.5, 64))))
    return [LINE, json.dumps({**step, **fields})]


@given(values(Event), st.integers(0, 10**9))
def test_every_event_is_read_back_from_its_line(event: Event, t_ms: int) -> None:
    timed = TimedEvent(t_ms / 1000, event)

    line = event_line(timed)

    assert read_events([LINE, line]) == (START, timed)
    assert line.endswith("}\n")
    assert line.count("\n") == 1


@given(values(Event), st.data())
def test_a_damaged_event_is_refused_or_read(event: Event, data: st.DataObject) -> None:
    document = data.draw(damaged(json.loads(event_line(TimedEvent(1.0, event)))))

    with suppress(InputError):
        assert len(read_events([LINE, json.dumps(document), LINE])) == 3


@given(JSON)
def test_a_line_that_is_no_event_is_refused(document: object) -> None:
    with pytest.raises(InputError, match=r"^events.jsonl, line 2: an event is not valid"):
        read_events([LINE, json.dumps(document)])


@given(values(Event), st.data())
def test_a_line_that_is_torn_is_left_out_at_the_end_and_refused_elsewhere(
    event: Event, data: st.DataObject
) -> None:
    line = event_line(TimedEvent(1.0, event)).strip()
    torn = line[: data.draw(st.integers(1, len(line) - 1))]

    assert read_events([LINE, torn]) == (START,)
    with pytest.raises(InputError, match="needs one JSON object a line, but line 2 is"):
        read_events([LINE, torn, LINE])


@given(st.binary(max_size=40), st.integers(0, 2 * len(LINE)))
def test_a_file_with_any_bytes_inside_is_refused_or_read(data: bytes, at: int) -> None:
    whole = (2 * LINE).encode()
    stream = io.TextIOWrapper(io.BytesIO(whole[:at] + data + whole[at:]), encoding="utf-8")

    with suppress(InputError):
        assert read_events(stream)[0].event.__class__ is RunStarted


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "begin with a start event, but got no event at all"),
        (["\n", " \n"], "begin with a start event, but got no event at all"),
        (["nonsense", LINE], "one JSON object a line, but line 1 is 'nonsense'"),
        (["[" * 100_000, LINE], "one JSON object a line, but line 1 is"),
        (["[1]"], "line 1: an event is not valid: Expected `object`, got `array`"),
        (["{}"], "line 1: an event is not valid: Object missing required field `event`"),
        (changed()[1:], "begin with a start event, but got 'step'"),
        (changed(t=-1), "line 2: an event needs t, seconds of zero or more, but got -1"),
        (changed(t=None), "an event needs t, seconds of zero or more, but got None"),
        (changed(t=math.inf), "an event needs t, seconds of zero or more, but got inf"),
        (changed(t=math.nan), "an event needs t, seconds of zero or more, but got nan"),
        (changed(t=10**400), "an event needs t, seconds of zero or more, but got 10000"),
        (changed(t=True), "an event needs t, seconds of zero or more, but got True"),
        (changed(event="eclipse"), "not valid: Invalid value 'eclipse' - at `$.event`"),
        (changed(moon=1), "line 2: an event is not valid: Object contains unknown field `moon`"),
        (changed(samples=True), "Expected `int`, got `bool` - at `$.samples`"),
        (changed(samples=-1), "Expected `int` >= 0 - at `$.samples`"),
        (changed(loss="low"), "Expected `float | null`, got `str` - at `$.loss`"),
        ([LINE.replace(f'"version":{VERSION}', '"version":99')],
         f"reads events of version {VERSION}, but line 1 is of version 99; read it with the"),
        ([LINE.replace('"steps":10', '"steps":"many"')], "`int`, got `str` - at `$.steps`"),
        ([LINE.replace('"mesh":"4x4",', "")], "Object missing required field `mesh`"),
        ([LINE.replace('"fail":[]', '"fail":"0,0"')], "Expected `array`, got `str` - at `$.fail`"),
        ([LINE, '{"event":"arrived","t":1,"chip":[-1,0]}'],
         "Expected `int` >= 0 - at `$.chip[0]`"),
        ([LINE, '{"event":"fault","t":1,"fault":"x","kind":"burn"}'],
         "Invalid enum value 'burn' - at `$.kind`"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_with_its_line(lines: list[str], words: str) -> None:
    with pytest.raises(
        InputError,
        match=re.escape(words),
    ):
        read_events(lines)


def test_bytes_that_are_no_text_are_refused() -> None:
    stream = io.TextIOWrapper(io.BytesIO(LINE.encode() + b"\xff\n"), encoding="utf-8")

    with pytest.raises(InputError, match="needs to be text in UTF-8"):
        read_events(stream)


def test_a_loss_may_be_no_number() -> None:
    lines = [LINE, event_line(TimedEvent(1.0, StepFinished(1, 1, 4, math.nan, 64)))]

    event = read_events(lines)[1].event

    assert isinstance(event, StepFinished)
    assert event.loss is not None
    assert math.isnan(event.loss)


def test_lines_have_the_keys_that_scripts_rely_on() -> None:
    began = GenerationBegan(2, ((0, 0), (0, 1)), 10, cut=("link:1,0-1,1",), why="it hung up")
    kill = FaultHappened("kill 1,1", 10, FaultKind.KILL, ((1, 1),))

    assert json.loads(event_line(TimedEvent(1.23456, began))) == {
        "event": "generation", "t": 1.2346, "number": 2, "chips": [[0, 0], [0, 1]], "step": 10,
        "waiting": [], "cut": ["link:1,0-1,1"], "why": "it hung up",
    }  # fmt: skip
    assert json.loads(event_line(TimedEvent(1, kill))) == {
        "event": "fault", "t": 1, "fault": "kill 1,1", "at_step": 10, "kind": "kill",
        "chips": [[1, 1]],
    }  # fmt: skip


def test_a_file_from_before_versions_is_read() -> None:
    old = {"event": "start", "t": 0, "mesh": "4x4", "steps": 10, "batch": 64}
    fault = {"event": "fault", "t": 1, "fault": "kill 1,1", "at_step": 3}

    assert len(read_events([json.dumps(old), json.dumps(fault)])) == 2


WORDS: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "whole number",
    Count: "count",
    Seconds: "seconds",
    CoordinatorState: "lost or back",
    tuple[str, ...]: "texts",
    tuple[ChipCoordinates, ...]: "chips",
    tuple[Count, ...]: "list of counts",
    tuple[tuple[Count, str], ...]: "list of pairs",
    tuple[FaultRecovered, ...]: "list of recoveries",
    tuple[StateRestored, ...]: "list of restores",
    Mapping[str, Real]: "object",
    Count | None: "count or null",
    tuple[Count, Count] | None: "pair of counts or null",
    Seconds | None: "seconds or null",
    Real | None: "any number or null",
    bool | None: "true or false or null",
    FaultKind | None: "kind of fault or null",
    SampleCounts | None: "object or null",
    Finite: "number",
    Finite | str | None: "number or text or null",
    Annotated[int, Meta(ge=VERSION, le=VERSION)]: str(VERSION),
}


def test_the_table_of_the_docs_has_exactly_the_kinds_and_fields_with_their_types() -> None:
    rows = [row.split("|") for row in DOCS.read_text().splitlines() if row.startswith("| `")]
    table = {
        row[1].strip(" `"): re.findall(r"`(\w+)` ([^,(]+?)(?: \([^)]*\))?(?:,|$)", row[3].strip())
        for row in rows
    }

    assert table == {
        str(kind.__struct_config__.tag): [
            (field, "chip" if field == "chip" else WORDS[hint])  # its type is a list of counts
            for field, hint in get_type_hints(kind, include_extras=True).items()
        ]
        for kind in get_args(Event)
    }


def test_the_docs_name_all_kinds_of_faults() -> None:
    sentence = re.search(r"\*\*kind of fault\*\* is one of ([^(]*)", DOCS.read_text())

    assert sentence is not None
    assert re.findall(r"`(\w+)`", sentence[1]) == list(FaultKind)


def test_the_example_of_the_docs_is_a_run() -> None:
    example = [line for line in DOCS.read_text().splitlines() if line.startswith("    {")]

    kinds = [tag_of(timed.event) for timed in read_events(example)]

    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert {"generation", "step", "fault", "recovered"} <= set(kinds)
