"""Plan files: what is written reads back equal; what is damaged is refused in one line."""

import copy
import json
import os
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshmend.errors import InputError, PlanFileError, VerificationError
from meshmend.planning.files import (
    PlanFile,
    encode_plan,
    plan_document,
    read_plan,
    write_plan,
)
from meshmend.planning.plan import load_plan, plan
from meshmend.planning.target import Target
from meshmend.planning.tree_formula import Pipeline
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.table import SUMS, Collective, Schedule
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from strategies import broken_meshes, tables

HOLE = Mesh((4, 4)).without("2x2@0,2")
COLUMNS = ("src", "dst", "lo", "hi", "op", "owners", "cuts")


def document() -> dict[str, Any]:
    return plan_document(HOLE, ALGORITHMS["ft-two-d"].build(HOLE, Collective.ALLREDUCE))


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def check_equal(one: Schedule, other: Schedule) -> None:
    for name in COLUMNS:
        was, now = getattr(one, name), getattr(other, name)
        assert was.dtype == now.dtype
        assert np.array_equal(was, now)
    for name in ("algorithm", "collective", "n_ranks", "phases"):
        assert getattr(one, name) == getattr(other, name)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(broken_meshes(), st.sampled_from(list(SUMS)))
def test_a_plan_reads_back_as_it_was_written(
    tmp_path: Path, mesh: Mesh, collective: Collective
) -> None:
    schedule = ALGORITHMS["rank-ring"].build(largest_part(mesh), collective)
    write_plan(tmp_path / "plan.json", mesh, schedule)
    own, read, *_ = read_plan(tmp_path / "plan.json")

    assert own == mesh
    check_equal(schedule, read)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_large_plan_is_written_in_a_few_times_the_memory_of_its_file() -> None:
    """A file of 700 MB took eight gigabytes."""
    mesh = Mesh((12, 12))
    file = PlanFile(mesh, ALGORITHMS["ring-1d"].build(mesh, Collective.REDUCE_SCATTER))

    tracemalloc.start()
    content = encode_plan(file)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert json.loads(content)["src"] == file.schedule.src.tolist()
    assert peak_bytes < 6 * len(content)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables())
def test_a_wrong_table_reads_back_as_it_was_written(tmp_path: Path, schedule: Schedule) -> None:
    write_plan(tmp_path / "plan.json", HOLE, schedule)

    check_equal(schedule, read_plan(tmp_path / "plan.json")[1])


@pytest.mark.parametrize("name", ["ring-1d", "ft-two-d", "rank-ring"])
@pytest.mark.parametrize("collective", list(SUMS))
def test_a_saved_plan_is_proved_anew(tmp_path: Path, name: str, collective: Collective) -> None:
    saved = plan(HOLE, name, collective=collective)
    saved.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json", mesh=HOLE)

    check_equal(saved.schedule, loaded.schedule)
    same = {key: value for key, value in saved.summary().items() if key != "seconds"}
    assert same == {key: value for key, value in loaded.summary().items() if key != "seconds"}
    assert "read" in loaded.seconds


def test_a_plan_for_a_mesh_in_pieces_reads_back(tmp_path: Path) -> None:
    mesh = Mesh((4, 4)).without("0,1", "1,0")
    plan(mesh, "rank-ring").save(tmp_path / "plan.json")

    assert load_plan(tmp_path / "plan.json").stranded == ((0, 0),)
    assert load_plan(str(tmp_path / "plan.json"), mesh=mesh).mesh == mesh


def test_a_file_stays_whole_until_the_new_one_is_there(tmp_path: Path) -> None:
    schedule = ALGORITHMS["rank-ring"].build(HOLE, Collective.ALLREDUCE)
    kept = tmp_path / "kept.json"
    link = tmp_path / "link.json"
    kept.write_text("old", encoding="utf-8")
    link.symlink_to(kept)
    write_plan(link, HOLE, schedule)

    assert link.is_symlink()
    check_equal(schedule, read_plan(kept)[1])


def test_a_pipe_takes_a_plan(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_plan(pipe, HOLE, ALGORITHMS["ft-two-d"].build(HOLE, Collective.ALLREDUCE))
        assert os.read(reader, 1 << 20).startswith(b'{"format":"meshmend-plan"')
    finally:
        os.close(reader)


@pytest.mark.parametrize("path", [".", "", "/", "no/such/folder/plan.json"])
def test_a_plan_that_cannot_be_written_is_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    schedule = ALGORITHMS["rank-ring"].build(HOLE, Collective.ALLREDUCE)

    with pytest.raises(PlanFileError, match=r"cannot write the plan to .*: "):
        write_plan(Path(path), HOLE, schedule)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a plan file: not JSON"),
        (b"{", "is not a plan file: not JSON"),
        (b"\x80\x02}q\x00.", "is not a plan file: not JSON"),
        (bytes(range(256)) * 8, "is not a plan file: not JSON"),
        (b"[" * 200_000, "is not a plan file: not JSON"),
        (b'{"a":' * 200_000, "is not a plan file: not JSON"),
        (b"1" * 10_000, "is not a plan file: not JSON"),
        (b"null", 'is not a plan file: it lacks "format"'),
        (b"[1, 2]", 'is not a plan file: it lacks "format"'),
        (b"{}", 'is not a plan file: it lacks "format"'),
        (b'{"format": "other"}', 'is not a plan file: it lacks "format"'),
        (b'{"format": "meshmend-plan"}', "has plan version None, but this meshmend reads 1"),
    ],
)
def test_what_is_no_plan_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "plan.json").write_bytes(content)

    with pytest.raises(PlanFileError, match=message) as caught:
        read_plan(tmp_path / "plan.json")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"cannot read the plan .*: No such file"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match=r"cannot read the plan .*: Is a directory"):
        read_plan(tmp_path)
    with pytest.raises(PlanFileError, match=r"cannot read the plan /dev/full: it is a device"):
        read_plan(Path("/dev/full"))  # whose zeros never end


def first(column: str, value: Any) -> dict[str, Any]:
    """The plan's column with another first entry."""
    return {column: [value, *document()[column][1:]]}


MESH = document()["mesh"]
DAMAGE: list[tuple[dict[str, Any], str]] = [
    ({"version": 4}, "has plan version 4, but this meshmend reads 1 to 3; plan again"),
    ({"version": 2}, "damaged: 'src_buffer' is missing"),
    ({"version": 2, "src_buffer": [0], "dst_buffer": [0]}, "buffer columns as long as the others"),
    ({"version": 2, "src_buffer": [256], "dst_buffer": [0]}, "src_buffer needs numbers from 0 to"),
    ({"version": "1"}, "has plan version '1'"),
    ({"ranks": 0}, "ranks need to be a positive number, but got 0"),
    ({"ranks": -3}, "ranks need to be a positive number, but got -3"),
    ({"ranks": 12.0}, "ranks need to be a positive number, but got 12.0"),
    ({"ranks": True}, "ranks need to be a positive number, but got True"),
    ({"ranks": None}, "ranks need to be a positive number"),
    ({"ranks": 2}, "needs an owner below 2"),
    ({"collective": "gossip"}, "gossip"),
    ({"collective": ["allreduce"]}, "is damaged"),
    ({"algorithm": None}, "algorithm needs to be a name, but got None"),
    ({"cuts": []}, "cuts need to be a list of two numbers or more"),
    ({"cuts": [0.0]}, "cuts need to be a list of two numbers or more"),
    ({"cuts": ["0", "1"]}, "cuts needs a list of numbers"),
    ({"cuts": None}, "cuts needs a list of numbers"),
    ({"cuts": [[0, 1]]}, "cuts needs a list of numbers"),
    (first("cuts", float("nan")), "cuts that rise from 0 to 1"),
    (first("src", 1.5), "src needs a list of whole numbers"),
    (first("src", 1.0), "src needs a list of whole numbers"),
    (first("dst", "1"), "dst needs a list of whole numbers"),
    (first("lo", None), "lo needs a list of whole numbers"),
    (first("hi", [1]), "is damaged"),
    (first("op", -1), "op needs numbers from 0 to 255"),
    (first("op", 256), "op needs numbers from 0 to 255"),
    (first("op", 2), "row 0 needs an op of 0"),
    (first("src", -1), "src needs numbers from 0 to 65535"),
    (first("src", 65536), "src needs numbers from 0 to 65535"),
    (first("src", 10**30), "src needs a list of whole numbers"),
    (first("src", 60000), "row 0 needs a source below 12"),
    (first("owners", -1), "owners needs numbers from 0"),
    (first("owners", 12), "needs an owner below 12"),
    ({"src": 5}, "src needs a list of whole numbers"),
    ({"src": {}}, "src needs a list of whole numbers"),
    ({"src": "abc"}, "src needs a list of whole numbers"),
    ({"src": [], "phases": []}, "columns of one length"),
    (
        {name: [document()[name]] for name in ("src", "dst", "lo", "hi", "op")},
        "needs a list of whole numbers",
    ),
    ({"phases": 3}, "is damaged"),
    ({"phases": [["a", 0]]}, "is damaged"),
    ({"phases": [["a", 0, 10**9]]}, "phase 'a' needs rows from 0 to"),
    ({"phases": [["a", -1, 3]]}, "phase 'a' needs rows from 0 to"),
    ({"phases": [["a", 3, 1]]}, "phase 'a' needs rows from 0 to"),
    ({"phases": [["a", 0.5, 1]]}, "a phase needs a name and two rows"),
    ({"phases": [[None, 0, 1]]}, "a phase needs a name and two rows"),
    ({"mesh": None}, "is damaged"),
    ({"mesh": []}, "is damaged"),
    ({"mesh": {}}, "'shape' is missing"),
    (
        {"mesh": MESH | {"shape": 4}},
        "shape, wrap, failures and slow links as text",
    ),
    (
        {"mesh": MESH | {"wrap": None}},
        "shape, wrap, failures and slow links as text",
    ),
    (
        {"mesh": MESH | {"fail": "0,0"}},
        "shape, wrap, failures and slow links as text",
    ),
    (
        {"mesh": MESH | {"fail": [5]}},
        "shape, wrap, failures and slow links as text",
    ),
    ({"mesh": MESH | {"shape": "0x4"}}, "--mesh needs positive extents"),
    ({"mesh": MESH | {"wrap": "7"}}, "--wrap needs"),
    ({"mesh": MESH | {"fail": ["9,9"]}}, "inside the mesh 4x4"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE)
def test_a_damaged_plan_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanFileError, match=message) as caught:
        read_plan(write(tmp_path / "plan.json", document() | change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", [key for key in document() if key not in {"format", "version"}])
def test_a_plan_that_lacks_a_key_is_refused_by_its_name(tmp_path: Path, key: str) -> None:
    damaged = document()
    del damaged[key]

    with pytest.raises(PlanFileError, match=f"is damaged: '{key}' is missing"):
        read_plan(write(tmp_path / "plan.json", damaged))


def test_a_plan_for_another_mesh_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "plan.json", document())
    full = write(tmp_path / "full.json", document() | {"mesh": MESH | {"fail": []}})

    with pytest.raises(PlanFileError, match="for the mesh 4x4 less 2x2@0,2, but got 4x4; plan ag"):
        load_plan(path, mesh=Mesh((4, 4)))
    with pytest.raises(PlanFileError, match="damaged: it has 12 ranks, but its mesh 4x4 has 16"):
        load_plan(full)


def test_a_plan_that_is_wrong_is_an_error_of_proof(tmp_path: Path) -> None:
    wrong = document()
    wrong["op"][0] = 1 - wrong["op"][0]

    with pytest.raises(VerificationError, match="is wrong: rank"):
        load_plan(write(tmp_path / "plan.json", wrong))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
GOOD = document()


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_to_a_plan_is_read_or_refused_never_a_crash(
    tmp_path: Path, data: st.DataObject
) -> None:
    changed = copy.deepcopy(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        where: Any = changed
        key: Any = data.draw(st.sampled_from(sorted(changed)))
        while isinstance(where[key], list | dict) and where[key] and data.draw(st.booleans()):
            where = where[key]
            inside = range(len(where)) if isinstance(where, list) else sorted(where)
            key = data.draw(st.sampled_from(inside))
        where[key] = data.draw(JSON)
    path = write(tmp_path / "plan.json", changed)

    try:
        load_plan(path)
    except (InputError, VerificationError) as error:
        assert "\n" not in str(error)  # noqa: PT017


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_file_with_broken_bytes_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(json.dumps(GOOD).encode())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[at:]
    else:
        content[at] = data.draw(st.integers(0, 255))
    (tmp_path / "plan.json").write_bytes(content)

    try:
        load_plan(tmp_path / "plan.json")
    except (InputError, VerificationError) as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_a_file_from_before_there_were_owners_is_read(tmp_path: Path) -> None:
    schedule = ALGORITHMS["ft-two-d"].build(HOLE, Collective.ALLREDUCE)
    write_plan(tmp_path / "plan.json", HOLE, schedule, Pipeline(7, 0.5), Target())
    earlier = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    del earlier["pipeline"]["stagger"], earlier["pipeline"]["leaves_last"]
    del earlier["target"]["fabric"]["update_bytes_per_s"]

    found = read_plan(write(tmp_path / "plan.json", earlier))

    assert (found.pipeline, found.target) == (Pipeline(7, 0.5), Target())


def test_a_pipeline_is_kept_and_a_damaged_one_refused(tmp_path: Path) -> None:
    schedule = ALGORITHMS["ft-two-d"].build(HOLE, Collective.ALLREDUCE)
    for pipeline in (Pipeline(7, 0.5), Pipeline(7, 0.5, 1.0, leaves_last=True)):
        write_plan(tmp_path / "plan.json", HOLE, schedule, pipeline)
        assert read_plan(tmp_path / "plan.json").pipeline == pipeline
    late = {"slices": 2, "skew": 0, "stagger": 2}
    words = {"slices": 2, "skew": 0, "leaves_last": "no"}
    for damaged in (
        late,
        words,
        {"slices": 0, "skew": 0},
        {"slices": 2, "skew": -1},
        {"slices": 2},
        3,
    ):
        with pytest.raises(PlanFileError, match="is damaged"):
            read_plan(write(tmp_path / "plan.json", document() | {"pipeline": damaged}))


@pytest.mark.parametrize("value", [1e308, 2**63, -1, True, None, "fast", [1]])
@pytest.mark.parametrize("figure", ["hop_latency_s", "link_bandwidth_bytes_per_s"])
def test_the_fabric_of_a_file_is_one_that_can_be_simulated_or_refused(
    figure: str, value: object, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    plan(Mesh((2, 2)), "ring-1d").save(path)
    document = json.loads(path.read_text())
    document["target"]["fabric"][figure] = value
    path.write_text(json.dumps(document))

    with suppress(PlanFileError):
        load_plan(path).predicted()
