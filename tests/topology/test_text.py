"""Meshes as text: what is written reads back, and what cannot be read is refused by name."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import TopologyError
from meshmend.topology.failures import (
    Block,
    Failure,
    Link,
    SlowLink,
    parse_failure,
    parse_shape,
    parse_slow,
)
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_words, parse_mesh, parse_wrap
from strategies import broken_meshes


def read_back(mesh: Mesh) -> Mesh:
    words = mesh_words(mesh)
    slow = words.get("slow", ())
    return parse_mesh(words["shape"], wrap=words["wrap"], fail=words["fail"], slow=slow)


@given(broken_meshes())
def test_the_words_of_a_mesh_describe_that_mesh(mesh: Mesh) -> None:
    assert read_back(mesh) == mesh


@given(broken_meshes(), st.data())
def test_the_words_of_a_mesh_with_slow_links_describe_it(mesh: Mesh, data: st.DataObject) -> None:
    slow = [SlowLink(link, data.draw(st.floats(0.001, 1))) for link in some_links(mesh, data)]

    assert read_back(mesh.slowed(*slow)) == mesh.slowed(*slow)


def some_links(mesh: Mesh, data: st.DataObject) -> list[Link]:
    links = [Link(mesh.live[a], mesh.live[b]) for a, b in mesh.links.tolist()]
    return data.draw(st.lists(st.sampled_from(links), unique=True)) if links else []


@given(broken_meshes())
def test_each_failure_reads_back_as_itself(mesh: Mesh) -> None:
    for failure in mesh.failures():
        assert parse_failure(str(failure)) == failure


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("4x2@6,8", Block((4, 2), (6, 8))),
        ("3,4", Block((1, 1), (3, 4))),
        (" 3 , 4 ", Block((1, 1), (3, 4))),
        ("7", Block((1,), (7,))),
        ("2@3", Block((2,), (3,))),
        ("link:3,4-3,5", Link((3, 4), (3, 5))),
        ("link:3,5-3,4", Link((3, 4), (3, 5))),
        ("board:3,4", Block((2, 2), (2, 4))),
        ("host:3,4", Block((4, 2), (0, 4))),
        ("1x1x2@0,0,1", Block((1, 1, 2), (0, 0, 1))),
    ],
)
def test_each_form_of_a_failure_is_read(text: str, failure: Failure) -> None:
    assert parse_failure(text) == failure


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a",
        "a,b",
        "3,",
        ",3",
        "-1,2",
        "3;4",
        "1.5,2",
        "2x2",
        "2x2@",
        "@3,4",
        "0x2@0,0",
        "2xa@0,0",
        "2x2@0,0@1,1",
        "link:",
        "link:3,4",
        "link:3,4-",
        "link:3,4-3,5-3,6",
        "board:",
        "board:a",
        "1e3,0",
        "9" * 5000 + ",0",
        "2x" + "9" * 5000 + "@0,0",
    ],
)
def test_a_failure_that_cannot_be_read_is_refused_with_the_ways_to_write_one(text: str) -> None:
    with pytest.raises(TopologyError, match=r"--fail cannot read .*; write 4x2@6,8 \(block\)"):
        parse_failure(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rack:0,0", r"a region needs to be a board or host, but got 'rack'"),
        ("2@3,4", "the block 2 has 1 and its start 3,4 has 2"),
        ("link:3,4-3,4", "two different chips"),
        ("board:3", "two axes or more"),
    ],
)
def test_a_failure_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_failure(text)


@given(st.text(max_size=12) | st.from_regex(r"[0-9x@,:\-a-z]{0,12}", fullmatch=True))
def test_any_text_is_a_failure_or_refused(text: str) -> None:
    try:
        failure = parse_failure(text)
    except TopologyError:
        return
    assert parse_failure(str(failure)) == failure


@given(st.text(max_size=8) | st.from_regex(r"[0-9x,]{0,8}", fullmatch=True), st.text(max_size=4))
def test_any_text_is_a_mesh_or_refused(text: str, wrap: str) -> None:
    try:
        mesh = parse_mesh(text, wrap=wrap)
    except TopologyError:
        return
    assert read_back(mesh) == mesh


@pytest.mark.parametrize("text", ["", "0x4", "axb", "4x", "x4", "4 x 4", "-4x4", "4,4", "4x4x0"])
def test_a_mesh_that_cannot_be_read_is_refused(text: str) -> None:
    refusal = f"--mesh needs positive extents joined by x, such as 16x32, but got {text!r}"

    with pytest.raises(TopologyError, match=re.escape(refusal)):
        parse_mesh(text)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("text", "wrap"),
    [
        ("none", (False, False, False)),
        ("all", (True, True, True)),
        (" ALL ", (True, True, True)),
        ("0", (True, False, False)),
        ("2,0", (True, False, True)),
        ("1,1", (False, True, False)),
    ],
)
def test_each_form_of_wrap_is_read(text: str, wrap: tuple[bool, ...]) -> None:
    assert parse_wrap(text, 3) == wrap


@pytest.mark.parametrize("text", ["", "x", "3", "-1", "0,", "0 1", "0,3", "nonex", "9" * 5000])
def test_a_wrap_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="--wrap needs none, all, or axes from 0 to 2"):
        parse_wrap(text, 3)


@pytest.mark.parametrize(
    "text", ["", "0.25", "link:0,0-0,1", "0,0-0,1=0.25", "link:0,0-0,1=fast", "link:0,0=0.5"]
)
def test_a_slow_link_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match=f"--slow cannot read {re.escape(repr(text))}; write"):
        parse_slow(text)


@pytest.mark.parametrize("speed", ["0", "-1", "1.5", "nan", "inf", "0.0001"])
def test_a_speed_that_no_link_has_is_refused(speed: str) -> None:
    with pytest.raises(TopologyError, match=r"link:0,0-0,1 needs a speed from 0.001 to 1, but got"):
        parse_slow(f"link:0,0-0,1={speed}")
