"""Chakra traces, next-hop tables, CSV and the JSON schema say what the plan says."""

import csv
import io
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import meshmend.planning.files
from meshmend import Mesh, plan
from meshmend.cli.main import run_line
from meshmend.errors import InputError
from meshmend.planning.formats.chakra_trace import write_chakra_traces
from meshmend.planning.formats.plan_tables import next_hop_tables, plan_csv
from meshmend.topology.text import parse_mesh

SCHEMA = Path(meshmend.planning.files.__file__).with_name("plan.schema.json")
MESHES = [
    parse_mesh("4x4", fail=["2x2@0,2"]),
    parse_mesh("1x3"),
    parse_mesh("2x2x2", fail=["0,0,0"]),
]
Field = descriptor_pb2.FieldDescriptorProto


def chakra_messages() -> tuple[Any, Any]:
    """Return the classes of Chakra's GlobalMetadata and Node, as far as traces of ours use them."""
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="Chakra", syntax="proto3")

    def add(name: str, fields: list[tuple[str, int, int, bool, str]]) -> None:
        message = file.message_type.add(name=name)
        for field, number, kind, repeated, of in fields:
            label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, type=kind, label=label)
            if of:
                added.type_name = of

    add(
        "Attribute",
        [
            ("name", 1, Field.TYPE_STRING, False, ""),
            ("int32_val", 7, Field.TYPE_INT32, False, ""),
            ("int64_val", 9, Field.TYPE_INT64, False, ""),
            ("bool_val", 27, Field.TYPE_BOOL, False, ""),
        ],
    )
    add("GlobalMetadata", [("version", 1, Field.TYPE_STRING, False, "")])
    add(
        "Node",
        [
            ("id", 1, Field.TYPE_UINT64, False, ""),
            ("name", 2, Field.TYPE_STRING, False, ""),
            ("type", 3, Field.TYPE_INT32, False, ""),
            ("data_deps", 5, Field.TYPE_UINT64, True, ""),
            ("attr", 10, Field.TYPE_MESSAGE, True, ".Chakra.Attribute"),
        ],
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = ("Chakra.GlobalMetadata", "Chakra.Node")
    found = [message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names]
    return found[0], found[1]


def messages_in(path: Path) -> list[bytes]:
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        size = shift = 0
        while True:
            byte, at = data[at], at + 1
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        found.append(data[at : at + size])
        at += size
    return found


def test_chakra_traces_of_too_many_rows_are_refused_in_one_slice_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sharded update of 64x64 has 33 million rows, whose traces took all memory."""
    monkeypatch.setattr("meshmend.planning.formats.chakra_trace._MOST_MESSAGES", 5)
    made = plan(Mesh((2, 2)), "ring-1d")

    with pytest.raises(InputError, match=r"at most 5 rows, but got \d+; take a smaller mesh"):
        write_chakra_traces(made, tmp_path / "et")
    assert not (tmp_path / "et").exists()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("slices", [1, 3])
def test_chakra_traces_run_to_their_end_and_move_the_whole_payload(
    mesh: Mesh, slices: int, tmp_path: Path
) -> None:
    made = plan(mesh, "trees", payload="9MB")
    head_class, node_class = chakra_messages()
    nodes: dict[tuple[int, int], Any] = {}
    for rank, path in enumerate(write_chakra_traces(made, tmp_path / "et", slices=slices)):
        assert path.name == f"meshmend.{rank}.et"
        head, *own = messages_in(path)
        assert head_class.FromString(head).version == "0.0.4"
        for node in map(node_class.FromString, own):
            nodes[rank, node.id] = node
    assert len(nodes) == 2 * made.schedule.n_rows * slices

    values = {
        key: {a.name: a.int64_val or a.int32_val for a in node.attr} for key, node in nodes.items()
    }
    sent = sum(values[key]["comm_size"] for key, node in nodes.items() if node.type == 5)
    whole = made.schedule.row_fractions().sum() * 9e6
    assert sent == pytest.approx(whole, rel=1e-3)
    done: set[tuple[int, int]] = set()
    tags: dict[tuple[int, ...], int] = defaultdict(int)
    while len(done) < len(nodes):
        before = len(done)
        for key, node in nodes.items():
            here = key[0]
            message = tuple(values[key][name] for name in ("comm_src", "comm_dst", "comm_tag"))
            assert here == message[0 if node.type == 5 else 1]
            if key in done or any((here, wait) not in done for wait in node.data_deps):
                continue
            if node.type == 5:
                tags[message] += 1
            elif tags[message] == 0:
                continue
            done.add(key)
        assert len(done) > before, "the traces stand still"
    assert set(tags.values()) == {1}


@pytest.mark.parametrize(
    ("mesh", "algorithm", "collective"),
    [
        (parse_mesh("6x6", fail=["2x2@2,2"]), "trees", "allreduce"),
        (parse_mesh("6x6", fail=["2x2@2,2"]), "rank-ring", "allreduce"),
        (parse_mesh("6x6", fail=["2,2"]), "direct", "allreduce"),
        (parse_mesh("6x5", wrap="1", fail=["2x1@1,3"]), "relays", "all-to-all"),
    ],
)
def test_following_next_hops_leads_every_message_to_its_target(
    mesh: Mesh, algorithm: str, collective: str
) -> None:
    """By what the file says alone, in as many hops and on the virtual channel that was proved."""
    made = plan(mesh, algorithm, collective=collective)
    tables = json.loads(json.dumps(next_hop_tables(made)))
    next_of = {
        (tuple(each["chip"]), hop["virtual_channel"], tuple(hop["target"])): tuple(hop["next"])
        for each in tables["chips"]
        for hop in each["next_hops"]
    }
    mesh, routes = made.placement.mesh, made.placement.routes

    n_sends = 0
    for each in tables["chips"]:
        for send in each["sends"]:
            here, target, channel = (
                tuple(each["chip"]),
                tuple(send["target"]),
                send["virtual_channel"],
            )
            pair = routes.pair_of(mesh.rank_of[here], mesh.rank_of[target])
            assert channel == routes.virtual_channel[pair]
            n_hops = 0
            while here != target:
                there = next_of[here, channel, target]
                assert mesh.rank_of[there] in mesh.neighbor_ranks[mesh.rank_of[here]]
                here, n_hops = there, n_hops + 1
            assert n_hops == routes.hops[pair]
            n_sends += 1
    assert n_sends == routes.n_pairs


def test_the_csv_has_a_line_for_every_row() -> None:
    made = plan(parse_mesh("4x4", fail=["2x2@0,2"]), "ft-two-d")
    rows = list(csv.DictReader(io.StringIO(plan_csv(made))))

    assert len(rows) == made.schedule.n_rows
    assert {row["operation"] for row in rows} == {"reduce", "copy"}
    parts = [float(row["payload_to"]) - float(row["payload_from"]) for row in rows]
    assert parts == pytest.approx(made.schedule.row_fractions())


def test_the_csv_says_on_which_virtual_channel_each_transfer_goes() -> None:
    made = plan(parse_mesh("3x3", wrap="all"), "direct")
    routes = made.placement.routes

    for row in csv.DictReader(io.StringIO(plan_csv(made))):
        source, target = int(row["source_rank"]), int(row["target_rank"])
        if source == target:
            assert (row["hops"], row["virtual_channel"]) == ("0", "")
            continue
        pair = routes.pair_of(source, target)
        of_pair = (routes.hops[pair], routes.virtual_channel[pair])
        assert (int(row["hops"]), int(row["virtual_channel"])) == of_pair


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_plan_files_follow_the_schema(mesh: Mesh, tmp_path: Path) -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for algorithm in ("auto", "rank-ring"):
        plan(mesh, algorithm).save(tmp_path / "plan.json")
        document = json.loads((tmp_path / "plan.json").read_text())

        jsonschema.validate(document, schema)
        assert set(document) <= set(schema["properties"])
        if "pipeline" in document:
            assert set(document["pipeline"]) <= set(schema["properties"]["pipeline"]["properties"])
        for name in schema["required"]:
            damaged = {key: value for key, value in document.items() if key != name}
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(damaged, schema)


def test_the_command_writes_every_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a plan.json"
    plan(parse_mesh("4x4", fail=["2x2@0,2"])).save(file)
    for kind in ("msccl-xml", "chakra-et", "next-hop", "csv"):
        goal = tmp_path / "out" / kind
        assert run_line(["export", str(file), "--to", kind, "-o", str(goal), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert len(document["written"]) == (12 if kind == "chakra-et" else 1)
        assert all(Path(path).stat().st_size for path in document["written"])
    assert run_line(["export", str(file), "--to", "csv"]) == 0
    assert capsys.readouterr().out == (tmp_path / "out" / "csv").read_text()
    assert (
        run_line(
            ["import", str(tmp_path / "out" / "msccl-xml"), "--mesh", "4x4", "--fail", "2x2@0,2"]
        )
        == 0
    )
    assert "every contribution once" in capsys.readouterr().out
