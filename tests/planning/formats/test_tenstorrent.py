"""Descriptions of Tenstorrent's machines become meshes, with what is dead or has lost cables."""

import json
from pathlib import Path

import pytest

from meshmend.cli.main import run_line
from meshmend.errors import InputError
from meshmend.planning.formats.tenstorrent import graph_of_mesh, mesh_of_graph, mesh_of_system
from meshmend.topology.failures import Link
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh

Captured = pytest.CaptureFixture[str]


def described(mesh: Mesh, *, cables: int = 4) -> str:
    """Return the physical system descriptor of a mesh, written as discovery finds it.

    Chips have numbers that say nothing of their places. Each cable is there from both ends.
    """
    number = {chip: 1000 + 7 * rank % 97 for rank, chip in enumerate(mesh.live)}
    lines = ["# a machine", "system_graph {", "asic_connectivity_graph {", 'host_name: "one"']
    for chip in sorted(mesh.live, key=number.__getitem__):
        lines.append(f"asic_topologies {{ asic_id: {number[chip]} topology {{")
        ports = mesh.neighbor_ranks[mesh.rank_of[chip]].tolist()
        for port, rank in enumerate(ports):
            if rank < 0:
                continue
            other = mesh.live[rank]
            n_cables = round(cables * mesh.speed_of(Link.between(chip, other)))
            lines.append(f"asic_connections {{ dst_asic_id: {number[other]}")
            for cable in range(n_cables):
                here, there = 4 * port + cable, 4 * (port ^ 1) + cable
                ends = f"src_chan: {here}, dst_chan: {there}; is_local: true"
                lines.append(f"eth_connections {{ {ends} }}")
            lines.append("}")
        lines.append("} }")
    return "\n".join([*lines, "}", "}", "target_device_type: 0"])


@pytest.mark.parametrize(
    ("shape", "wrap", "fail", "slow"),
    [
        ("8x4", "all", (), ()),
        ("8x4", "all", ("2x2@2,0",), ()),
        ("8x4", "none", ("3,1", "link:0,0-0,1"), ("link:6,2-7,2=0.75", "link:0,2-0,3=0.5")),
        ("2x2", "none", (), ("link:0,0-0,1=0.25",)),
        ("1x2", "none", (), ()),
    ],
)
def test_a_machine_is_the_mesh_that_it_lies_on(
    shape: str, wrap: str, fail: tuple[str, ...], slow: tuple[str, ...]
) -> None:
    """Another way to lie there is as good: numbers of chips, links and cables are what counts."""
    real = parse_mesh(shape, wrap=wrap, fail=fail, slow=slow)
    wanted = parse_mesh(shape, wrap=wrap)

    found, places = mesh_of_system(described(real), wanted)

    assert (found.shape, found.wrap, found.n_live) == (real.shape, real.wrap, real.n_live)
    assert sorted(found.link_speeds.tolist()) == sorted(real.link_speeds.tolist())
    assert len(places) == real.n_live
    assert sorted(places.values()) == list(found.live)
    number = {chip: 1000 + 7 * rank % 97 for rank, chip in enumerate(real.live)}
    for chip in real.live:
        joined = {places[number[other]] for other in real.neighbors(chip)}
        assert joined == set(found.neighbors(places[number[chip]]))


@pytest.mark.parametrize(
    ("shape", "wrap"), [("8x4", "all"), ("8x4", "none"), ("8x4", "0"), ("1x2", "none")]
)
def test_a_mesh_graph_says_what_it_was_written_from(shape: str, wrap: str) -> None:
    mesh = parse_mesh(shape, wrap=wrap)

    assert mesh_of_graph(graph_of_mesh(mesh)) == mesh


def test_a_mesh_graph_may_be_written_in_other_ways() -> None:
    text = """# none of these matter
    mesh_descriptors: < name: "A", arch: BLACKHOLE
      device_topology { dims: 4 dims: 2 types: RING } channels { count: 2 policy: RELAXED } >
    pinnings { physical_asic_position { tray_id: 1 } }
    top_level_instance { mesh { mesh_descriptor: "A" mesh_id: 0 } }"""

    assert str(mesh_of_graph(text)) == "4x2 wrap 0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs mesh_descriptors"),
        ("mesh_descriptors {", "a message without '}' at its end"),
        ('mesh_descriptors { name "A" }', "no value of name at line 1"),
        ("\n@", "no protobuf text: '@' at line 2"),
        ("{ }", "'{' instead of the name of a field"),
        ("a: [ 1, 2", "a list without end"),
        ("a {" * 50, "more than 32 messages"),
        ('mesh_descriptors { name: "A" }', "device_topology"),
        ('mesh_descriptors { name: "A" device_topology { dims: [ 2, x ] } }', "whole numbers"),
        (
            "mesh_descriptors { device_topology { dims: [ 2 ] dim_types: [ TREE ] } }",
            "LINE or RING",
        ),
        ('mesh_descriptors { name: "A" } mesh_descriptors { name: "B" }', "has 2; leave one"),
    ],
)
def test_what_is_no_mesh_graph_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mesh_of_graph(text)


@pytest.mark.parametrize(
    ("real", "wanted", "message"),
    [
        ("4x4", "2x4", "16 chips, but 2x4 has 8 places"),
        ("2x4", "1x8", "try another --mesh or --wrap"),
        ("3x3", "8x2", "try another --mesh or --wrap"),
    ],
)
def test_a_machine_that_does_not_lie_on_the_mesh_is_refused(
    real: str, wanted: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        mesh_of_system(described(parse_mesh(real)), parse_mesh(wanted))


def test_a_machine_in_two_parts_is_refused() -> None:
    parts = Mesh((1, 5)).without("0,2")

    with pytest.raises(InputError, match="2 are with chip 1000"):
        mesh_of_system(described(parts), Mesh((1, 5)))


def test_a_failed_mesh_has_no_mesh_graph() -> None:
    with pytest.raises(InputError, match="4x4 less 1,1 has failures"):
        graph_of_mesh(Mesh((4, 4)).without("1,1"))


def test_import_prints_options_for_other_commands(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "system.textproto"
    file.write_text(described(parse_mesh("8x4", wrap="all", fail=["0,0"])))
    line = f"import {file} --from tt-physical-system --mesh 8x4 --wrap all --json"

    assert run_line(line.split()) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["live"] == 31
    options = dict(zip(facts["options"][::2], facts["options"][1::2], strict=True))
    assert (
        parse_mesh(options["--mesh"], wrap=options["--wrap"], fail=[options["--fail"]]).n_live == 31
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--from tt-mesh-graph --mesh 2x2", "leave out --mesh and --wrap"),
        ("--from tt-physical-system", "needs --mesh"),
        ("--from nope --mesh 2x2", "one of xml, tt-mesh-graph, tt-physical-system"),
        ("--from tt-mesh-graph -o out", "a machine is no plan"),
        ("--from tt-mesh-graph", "needs mesh_descriptors"),
        ("--from tt-physical-system --mesh 2x2", "needs system_graph"),
    ],
)
def test_bad_input_is_one_line(line: str, message: str, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "file.textproto"
    file.write_text("# nothing\n")

    assert run_line(["import", str(file), *line.split()]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert message in said


def test_export_writes_a_mesh_graph(tmp_path: Path, capsys: Captured) -> None:
    plan = tmp_path / "plan.json"
    assert run_line(f"plan --mesh 2x4 --algorithm ring-1d -o {plan}".split()) == 0
    capsys.readouterr()

    assert run_line(f"export {plan} --to tt-mesh-graph".split()) == 0
    assert mesh_of_graph(capsys.readouterr().out) == Mesh((2, 4))
