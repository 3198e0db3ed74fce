"""MSCCL XML: what we write runs by MSCCL's rules, and what others write is proved or refused."""

import tracemalloc
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from meshmend import Mesh, plan
from meshmend.cli.main import run_line
from meshmend.errors import InputError, UnsupportedError, VerificationError
from meshmend.planning.formats.msccl_xml import MOST_BLOCKS, MOST_COUNT, MOST_STEPS, msccl_xml
from meshmend.planning.formats.xml_import import schedule_from_xml
from meshmend.planning.plan import planned
from meshmend.planning.target import Target
from meshmend.schedule.table import Collective
from meshmend.topology.text import parse_mesh
from msccl_interpreter import run_msccl

MESHES = [
    parse_mesh("4x4", fail=["2x2@0,2"]),
    parse_mesh("1x5"),
    parse_mesh("3x3", fail=["1,1"]),
    parse_mesh("2x2x2", fail=["0,0,0"]),
    parse_mesh("4x4", wrap="all", fail=["link:0,0-0,1"]),
]
ROW = parse_mesh("1x3")
Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("algorithm", ["trees", "rank-ring", "rings-nd"])
def test_a_plan_sums_in_whatever_order_the_runtime_runs_it(mesh: Mesh, algorithm: str) -> None:
    made = plan(mesh, algorithm)
    text = msccl_xml(made)

    for seed in range(3):
        held = run_msccl(text, seed)
        n_chunks = len(held[0])
        total = sum(3 * rank + 1 for rank in range(mesh.n_live))
        expected = total + mesh.n_live * 1000 * np.arange(n_chunks)
        assert all((each == expected).all() for each in held)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_rules_of_the_runtime_are_kept(mesh: Mesh) -> None:
    root = ElementTree.fromstring(msccl_xml(plan(mesh)))

    assert (root.get("coll"), root.get("ngpus")) == ("allreduce", str(mesh.n_live))
    for gpu in root:
        assert len(gpu) <= MOST_BLOCKS
        peers = [(tb.get("send"), tb.get("recv"), tb.get("chan")) for tb in gpu]
        assert len(set(peers)) == len(peers)  # a connection belongs to one thread block
        waited = {(step.get("depid"), step.get("deps")) for tb in gpu for step in tb}
        for tb in gpu:
            assert len(tb) <= MOST_STEPS
            for number, step in enumerate(tb):
                assert step.get("s") == str(number)
                assert int(step.get("cnt", "")) <= MOST_COUNT
                assert (step.get("hasdep") == "1") == ((tb.get("id"), str(number)) in waited)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("algorithm", ["trees", "rank-ring"])
def test_what_we_write_is_read_back_and_proved(mesh: Mesh, algorithm: str) -> None:
    made = plan(mesh, algorithm)
    again = planned(mesh, schedule_from_xml(msccl_xml(made), mesh), Target())

    assert again.proof.method == "exact"
    assert again.channel_loads == pytest.approx(made.channel_loads)


def ring(kinds: tuple[str, str, str, str] = ("s", "rrcs", "rrcs", "rcs")) -> str:
    """Return a ring over three ranks as MSCCL's own tools write one: one block, fused steps."""
    lines = ["<algo name='ring' coll='allreduce' ngpus='3' nchunksperloop='3' inplace='1'>"]
    for rank in range(3):
        lines.append(f"<gpu id='{rank}' i_chunks='3' o_chunks='3' s_chunks='0'>")
        lines.append(f"<tb id='0' send='{(rank + 1) % 3}' recv='{(rank - 1) % 3}' chan='0'>")
        for number, kind in enumerate((*kinds, "r")):
            chunk = (rank - number) % 3
            where = f"srcbuf='i' srcoff='{chunk}' dstbuf='o' dstoff='{chunk}' cnt='1'"
            lines.append(f"<step s='{number}' type='{kind}' {where} depid='-1' deps='-1'/>")
        lines.append("</tb></gpu>")
    return "".join([*lines, "</algo>"])


def test_a_ring_of_fused_steps_is_proved_on_a_mesh() -> None:
    found = planned(ROW, schedule_from_xml(ring(), ROW), Target())

    assert (found.schedule.algorithm, found.schedule.n_rows) == ("ring", 12)
    assert found.proof.method == "exact"


def gather(kinds: tuple[str, str, str] = ("s", "rcs", "r")) -> str:
    """Return an all-gather over a ring of three ranks."""
    lines = ["<algo name='ring' coll='allgather' ngpus='3' nchunksperloop='3' inplace='1'>"]
    for rank in range(3):
        lines.append(f"<gpu id='{rank}' i_chunks='0' o_chunks='3' s_chunks='0'>")
        lines.append(f"<tb id='0' send='{(rank + 1) % 3}' recv='{(rank - 1) % 3}' chan='0'>")
        for number, kind in enumerate(kinds):
            chunk = (rank - number) % 3
            where = f"srcbuf='o' srcoff='{chunk}' dstbuf='o' dstoff='{chunk}' cnt='1'"
            lines.append(f"<step s='{number}' type='{kind}' {where} depid='-1' deps='-1'/>")
        lines.append("</tb></gpu>")
    return "".join([*lines, "</algo>"])


def test_an_all_gather_is_proved_with_the_ranks_that_own_its_chunks() -> None:
    found = planned(ROW, schedule_from_xml(gather(), ROW), Target())

    assert found.schedule.collective is Collective.ALL_GATHER
    assert found.schedule.owners.tolist() == [0, 1, 2]
    assert found.proof.method == "exact"


def test_an_all_gather_in_which_a_rank_misses_a_chunk_is_found_out() -> None:
    text = gather(("s", "r", "nop"))

    with pytest.raises(VerificationError):
        planned(ROW, schedule_from_xml(text, ROW), Target())


def test_a_wrong_program_is_found_out(tmp_path: Path, capsys: Captured) -> None:
    with pytest.raises(VerificationError):
        planned(
            ROW,
            schedule_from_xml(ring(("s", "rcs", "rrcs", "rcs")), ROW),
            Target(),
        )
    file = tmp_path / "wrong.xml"
    file.write_text(ring(("s", "rcs", "rrcs", "rcs")))
    assert run_line(["import", str(file), "--mesh", "1x3"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("<algo", "<algo<", "needs to be XML"),
        ("allreduce", "alltoall", "or <algo coll='allgather'>, but got <algo coll='alltoall'>"),
        ("ngpus='3'", "ngpus='many'", "needs a whole number ngpus, but got 'many'"),
        ("ngpus='3'", "", "needs a whole number ngpus, but got None"),
        ("ngpus='3'", "ngpus='2'", "is for 2 ranks, but 1x3 has 3 connected live chips"),
        ("<gpu id='2'", "<gpu id='3'", "needs ranks from 0 to 2"),
        ("nchunksperloop='3'", "nchunksperloop='99999'", "needs from 1 to 65536 chunks, but got"),
        ("nchunksperloop='3'", "nchunksperloop='0'", "needs from 1 to 65536 chunks, but got 0"),
        ("type='rcs'", "type='cpy'", "cannot hold the step 'cpy'"),
        ("srcbuf='i'", "srcbuf='s'", "without scratch buffers"),
        ("dstoff='0'", "dstoff='2'", "each chunk stays in its place"),
        ("cnt='1'", "cnt='4'", "needs chunks from 0 to 2"),
        ("send='1'", "send='-1'", "needs a peer for its step"),
        ("type='r'", "type='nop'", "messages that nobody receives"),
        ("type='s'", "type='r'", "never ends: rank 0 waits for ever in step 0"),
        ("depid='-1' deps='-1'", "depid='7' deps='0'", "never ends"),
    ],
)
def test_what_a_table_cannot_hold_is_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        schedule_from_xml(ring().replace(old, new), ROW)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("4x4", "MSCCL XML is for 65535 ranks, but 4x4 has 16 connected live chips"),
        ("255x257", "MSCCL XML for 65535 ranks needs from 1 to 1024 chunks, but got 65535"),
    ],
)
def test_a_file_of_one_line_gets_no_gigabytes(mesh: str, said: str) -> None:
    line = "<algo coll='allgather' ngpus='65535' nchunksperloop='65535'/>"
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=said):
            schedule_from_xml(line, parse_mesh(mesh))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most_bytes < 1 << 27


def test_steps_of_many_chunks_are_counted_before_they_are_run() -> None:
    step = "<step s='0' type='s' srcbuf='i' srcoff='0' dstbuf='o' dstoff='0' cnt='65536'/>"
    text = (
        "<algo coll='allreduce' ngpus='2' nchunksperloop='65536'><gpu id='0'>"
        f"<tb id='0' send='1' recv='1' chan='0'>{step * 200}</tb></gpu></algo>"
    )

    with pytest.raises(InputError, match="at most 8388608 chunks in all, but got 13107200"):
        schedule_from_xml(text, parse_mesh("1x2"))


def test_ranks_that_exchange_a_chunk_at_once_are_refused() -> None:
    steps = "".join(
        f"<gpu id='{rank}'><tb id='0' send='{1 - rank}' recv='{1 - rank}' chan='0'>"
        "<step s='0' type='s' srcbuf='i' srcoff='0' dstbuf='i' dstoff='0' cnt='1'/>"
        "<step s='1' type='rrc' srcbuf='i' srcoff='0' dstbuf='i' dstoff='0' cnt='1'/></tb></gpu>"
        for rank in range(2)
    )
    with pytest.raises(InputError, match="exchange a chunk at the same time"):
        schedule_from_xml(
            f"<algo coll='allreduce' ngpus='2' nchunksperloop='1'>{steps}</algo>",
            parse_mesh("1x2"),
        )


def test_plans_that_the_runtime_cannot_hold_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="needs the plan of an allreduce"):
        msccl_xml(plan(parse_mesh("2x2"), collective="reduce-scatter"))
    with pytest.raises(UnsupportedError, match="at most 256 steps in a thread block"):
        msccl_xml(plan(parse_mesh("12x12"), "rank-ring"))
    with pytest.raises(UnsupportedError, match="needs 1089; plan for fewer chips"):
        msccl_xml(plan(parse_mesh("33x33"), "trees"))  # not 'plan with trees'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("export nowhere.json --to csv", "cannot read the plan nowhere.json"),
        ("export plan.json --to pdf", "--to needs one of msccl-xml, chakra-et, next-hop, csv"),
        ("export plan.json --to chakra-et", "--to chakra-et needs -o FOLDER"),
        ("export plan.json --to csv --slices 2", "--slices needs --to chakra-et"),
        ("export plan.json --to chakra-et -o x --slices 100000000", "need from 1 to 65536 slices"),
        ("export /dev/zero --to csv", "cannot read the plan /dev/zero: it is a device"),
        ("export plan.json --to csv --json", "--json needs -o"),
        ("import algo.xml --mesh 4x4", "is for 3 ranks, but 4x4 has 16 connected live chips"),
        ("import nowhere.xml --mesh 4x4", "cannot read the file nowhere.xml"),
        ("import bytes.xml --mesh 4x4", "cannot read bytes.xml: it is no text"),
    ],
)
def test_bad_input_ends_with_one_line(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    plan(parse_mesh("2x2")).save("plan.json")
    Path("algo.xml").write_text(ring())
    Path("bytes.xml").write_bytes(b"\x80")

    assert run_line(line.split()) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert said in message
