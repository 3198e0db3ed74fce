"""ForestColl's trees: what that program wrote is proved and priced; wrong trees are refused."""

from itertools import pairwise
from pathlib import Path

import pytest

from meshmend.cli.main import run_line
from meshmend.errors import InputError
from meshmend.planning.formats.xml_import import schedule_from_xml
from meshmend.planning.plan import planned
from meshmend.planning.target import Target
from meshmend.schedule.table import Schedule
from meshmend.topology.text import parse_mesh

# Written by ForestColl itself (commit 3c13aee) for a graph with two edges for each live link.
AROUND_A_HOLE = (Path(__file__).parent / "forestcoll_4x4_less_2x2.xml").read_text()
HOLE = ("2x2@0,2",)
Captured = pytest.CaptureFixture[str]


def trees(*lines: str, chunks: int = 1) -> str:
    return f'<Algo nchunkspernode="{chunks}">{"".join(lines)}</Algo>'


def tree(root: str, *sends: str, chunks: int = 1) -> str:
    """Return a tree; a send is written `0>1`."""
    lines = []
    for send in sends:
        src, dst = send.split(">")
        lines.append(f'<send src="{src}" dst="{dst}" path="{src},{dst}"/>')
    return f'<tree root="{root}" index="0" nchunks="{chunks}" height="1">{"".join(lines)}</tree>'


LINE = trees(tree("0", "0>1", "1>2"), tree("1", "1>0", "1>2"), tree("2", "2>1", "1>0"))


def read(text: str, mesh: str, fail: tuple[str, ...] = ()) -> Schedule:
    return schedule_from_xml(text, parse_mesh(mesh, fail=list(fail)))


def test_what_forestcoll_wrote_for_a_mesh_with_a_hole_is_proved_and_follows_links() -> None:
    mesh = parse_mesh("4x4", fail=list(HOLE))
    found = planned(mesh, schedule_from_xml(AROUND_A_HOLE, mesh), Target())

    assert found.proof.method == "exact"
    assert found.placement.routes.max_hops == 1
    assert found.schedule.algorithm == "forestcoll"
    assert len(set(found.schedule.owners.tolist())) == 12


def test_three_trees_by_hand_load_each_link_as_counted_by_hand() -> None:
    found = planned(parse_mesh("1x3"), read(LINE, "1x3"), Target())

    # Every tree uses both links, each way once: up to its root or down from it.
    assert found.channel_loads.max() == pytest.approx(1.0)
    assert found.schedule.n_rows == 3 * 2 * 2


def test_a_tree_of_more_chunks_carries_more_of_the_payload() -> None:
    text = trees(
        tree("0", "0>1", chunks=3), tree("1", "1>0", chunks=1), tree("1", "1>0", chunks=2), chunks=3
    )

    assert read(text, "1x2").cuts.tolist() == pytest.approx([0, 3 / 6, 4 / 6, 1])


@pytest.mark.parametrize(
    "names",
    [
        [str(rank) for rank in range(12)],
        [f"({rank // 6}, 'GPU', {rank % 6})" for rank in range(12)],
        [f"gpu{rank:02}" for rank in range(12)],
        [f"(0, {rank})" for rank in range(12)],
    ],
    ids=str,
)
def test_nodes_are_chips_by_name_or_ranks_in_their_order(names: list[str]) -> None:
    chain = [f"{one}>{other}" for one, other in pairwise(names)]
    rest = [tree(root, *[f"{root}>{each}" for each in names if each != root]) for root in names[1:]]
    schedule = read(trees(tree(names[0], *chain), *rest), "1x12")

    first = schedule.lo == 0
    pairs = set(zip(schedule.src[first].tolist(), schedule.dst[first].tolist(), strict=True))
    assert pairs == {*pairwise(range(12)), *pairwise(range(11, -1, -1))}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("<Algo ", "<Tree ", "needs to be XML"),
        ('nchunkspernode="1"', "", "needs a whole number nchunkspernode, but got None"),
        ('nchunkspernode="1"', 'nchunkspernode="2"', "of 2 chunks from each node"),
        ('nchunks="1"', 'nchunks="0"', "needs from 1 to"),
        ('nchunks="1"', f'nchunks="{10**30}"', "needs from 1 to"),
        ('src="1"', "", "needs a node src, but got None"),
        ('root="0"', 'root="7"', "is for 4 nodes, but 1x3 has 3"),
        ('src="1" dst="2"', 'src="0" dst="1"', "has two to 1"),
        ('src="0" dst="1"', 'src="2" dst="1"', "do not span"),
        ('root="2"', 'root="1"', "the trees of chip"),
    ],
)
def test_wrong_trees_are_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(LINE.replace(old, new), "1x3")


def test_trees_for_another_hole_are_refused() -> None:
    with pytest.raises(InputError, match="which is not a live chip of 4x4 less 2x2@2,0"):
        read(AROUND_A_HOLE, "4x4", ("2x2@2,0",))
    with pytest.raises(InputError, match="needs trees, but got 0 <tree>"):
        read(trees(), "1x3")


def test_import_proves_and_prices_trees(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "the trees.xml"
    file.write_text(AROUND_A_HOLE)
    plan = tmp_path / "plan.json"

    line = ["import", str(file), "--mesh", "4x4", "--fail", *HOLE, "--payload", "10MB"]
    assert run_line([*line, "-o", str(plan)]) == 0
    printed = capsys.readouterr().out
    assert "forestcoll (allreduce over 12 ranks)" in printed
    assert "every contribution once" in printed
    assert "1.472 times the limit" in printed  # docs/formats.md says so
    assert run_line(["verify", str(plan)]) == 0

    assert run_line(["import", str(file), "--mesh", "4x4"]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "is for 12 nodes, but 4x4 has 16 connected live chips" in message
