"""Charts: scales, ticks, and names that do not touch."""

import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import InputError
from meshmend.pages.draw.chart import Axis, Series, chart_svg, spread, ticks_around
from meshmend.pages.draw.svg import clipped, heat, lighter, line_path, number, text_width, wrapped

LOG = Axis("payload")
LINEAR = Axis("ratio", log=False)
positive = st.floats(1e-12, 1e15)


def texts(svg: str) -> list[str]:
    return [part.text or "" for part in ET.fromstring(svg).iter() if part.tag.endswith("text")]


@given(
    st.lists(
        st.lists(st.tuples(positive, positive), min_size=1, max_size=8), min_size=1, max_size=9
    ),
    st.booleans(),
    st.booleans(),
)
def test_every_curve_is_drawn_inside_the_axes(
    curves: list[list[tuple[float, float]]], log_x: bool, log_y: bool
) -> None:
    own = [
        Series(f"c{i}", [x for x, _ in points], [y for _, y in points])
        for i, points in enumerate(curves)
    ]

    svg = chart_svg(own, x=Axis("x", log_x), y=Axis("y", log_y))

    root = ET.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    lines = [part.get("d", "") for part in root.iter() if part.get("class") == "curve"]
    assert len(lines) == len(curves)
    for line in lines:
        for point in line.removeprefix("M").split("L"):
            x, y = map(float, point.split())
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_decades_are_ticks_and_are_written_by_the_caller() -> None:
    curve = Series("c", [1e3, 1e9], [1.0, 3.0])

    svg = chart_svg([curve], x=Axis("payload", write=lambda v: f"{v / 1e3:g} KB"), y=LOG)

    for words in ("1 KB", "10 KB", "1000 KB", "1e+06 KB", "1", "2", "5", "c", "payload"):
        assert words in texts(svg)


def test_the_ninth_curve_is_told_from_the_first_of_the_same_colour() -> None:
    curves = [Series(f"curve {number}", [1, 2], [1, 2]) for number in range(9)]

    parts = list(ET.fromstring(chart_svg(curves, x=LOG, y=LINEAR)).iter())

    first, *_, ninth = [part for part in parts if part.get("class") == "curve"]
    assert first.get("stroke") == ninth.get("stroke")
    assert first.get("stroke-dasharray") is None
    assert ninth.get("stroke-dasharray") is not None
    *_, its_last_point = [part for part in parts if part.get("class") == "point"]
    assert its_last_point.get("stroke") == ninth.get("stroke")


def test_a_dashed_series_is_dashed_and_has_no_dots() -> None:
    svg = chart_svg([Series("limit", [1, 2], [1, 1], dashed=True)], x=LOG, y=LINEAR)

    assert 'stroke-dasharray="7 4"' in svg
    assert 'class="point"' not in svg


@given(st.floats(-1e3, 1e3), st.floats(1e-2, 1e6))
def test_ticks_lie_around_the_range_in_three_to_eight_steps(low: float, span: float) -> None:
    ticks = ticks_around(low, low + span)

    slack = 1e-6 * (abs(low) + span)
    assert 3 <= len(ticks) - 1 <= 8
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + span - slack


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_spread_keeps_the_order_and_the_gap(places: list[float]) -> None:
    moved = spread(places, gap=8, low=0, high=100)

    order = sorted(range(len(places)), key=lambda i: (places[i], i))
    for one, other in pairwise(order):
        assert moved[other] - moved[one] >= 8 - 1e-9
    assert min(moved) >= -1e-9
    assert max(moved) <= 100 + 1e-9


def test_spread_leaves_places_alone_that_are_apart() -> None:
    assert spread([50.0, 10.0, 90.0], gap=8, low=0, high=100) == [50.0, 10.0, 90.0]


@pytest.mark.parametrize(
    ("x", "y", "match"),
    [
        ([], [], "'c' needs as many x as y and at least one, but got 0 and 0"),
        ([1, 2], [1], "'c' needs as many x as y and at least one, but got 2 and 1"),
        ([1, math.inf], [1, 1], "'c' needs finite numbers"),
        ([0, 1], [1, 1], "logarithmic axis 'payload' needs positive values, but got 0"),
    ],
)
def test_points_that_cannot_be_drawn_are_refused(
    x: list[float], y: list[float], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        chart_svg([Series("c", x, y)], x=LOG, y=LINEAR)


def test_a_chart_without_curves_is_refused() -> None:
    with pytest.raises(InputError, match="at least one series"):
        chart_svg([], x=LOG, y=LINEAR)


def test_numbers_are_short() -> None:
    assert [number(v) for v in (1.0, 0.5, -0.001, 12.345, 100.0)] == [
        "1",
        "0.5",
        "0",
        "12.35",
        "100",
    ]


def test_a_closed_line_rounds_every_corner() -> None:
    data = line_path([(0, 0), (10, 0), (10, 10), (0, 10)], radius=2, closed=True)

    assert data.count("Q") == 4
    assert data.endswith("Z")


@given(st.text("ab ", max_size=60), st.floats(20, 300))
def test_wrapped_and_clipped_text_fits_where_words_do(words: str, width: float) -> None:
    lines = wrapped(words, width, 10)

    assert " ".join(lines).split() == words.split()
    for line in lines:
        assert " " not in line or text_width(line, 10) <= width
    assert text_width(clipped(words, width, 10), 10) <= max(width, text_width("…", 10))


@given(st.floats(0, 1), st.floats(0, 1))
def test_heat_darkens_steadily(one: float, other: float) -> None:
    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((one, other))
    assert light(heat(high)) <= light(heat(low)) + 1.0  # a level is lost to rounding
    assert light(lighter(heat(low), high)) >= light(heat(low)) - 1.0
