"""Contenders of the side-by-side benchmark: formulas as their papers have them, plans proved."""

from pathlib import Path

import pytest

from meshmend.planning.plan import planned
from meshmend.planning.target import Target
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from other_programs import allreduce_of, forestcoll_plans, half_of, mesh_name, tacos_plans
from published_formulas import FORMULAS, bucket_s, swing_s, tto_s

BYTES = Fabric("only bytes", 1.0, 0.0, 0.0)  # a byte takes a second, a hop nothing
HOPS = Fabric("only hops", 1e15, 1.0, 0.0)


def torus(shape: str) -> Mesh:
    return parse_mesh(shape, wrap="all")


def test_the_bucket_algorithm_uses_all_ports_and_takes_each_axis_twice() -> None:
    assert bucket_s(torus("16x16"), BYTES, 1.0) == pytest.approx((1 - 1 / 256) / 2)
    assert bucket_s(torus("16x16"), HOPS, 1.0) == pytest.approx(4 * 15)
    assert bucket_s(torus("4x8"), HOPS, 1.0) == pytest.approx(4 * 7)


@pytest.mark.parametrize(("shape", "most"), [("64x64", 1.19), ("16x16x16", 1.03)])
def test_swing_has_the_congestion_that_its_paper_states(shape: str, most: float) -> None:
    mesh = torus(shape)
    least_s = 1 / len(mesh.shape)

    assert swing_s(mesh, BYTES, 1.0) == pytest.approx(most * least_s, rel=0.01)


def test_swing_sends_short_payloads_in_half_of_the_steps() -> None:
    """On 16x16: 1, 1, 3 and 5 chips away, along both axes."""
    assert swing_s(torus("16x16"), HOPS, 1.0) == pytest.approx(2 * (1 + 1 + 3 + 5))


def test_three_trees_carry_two_thirds_of_the_payload() -> None:
    assert tto_s(Mesh((8, 8)), BYTES, 3.0) == pytest.approx(2.0)
    assert tto_s(Mesh((8, 8)), HOPS, 3.0) == pytest.approx(28.0)


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_no_paper_has_a_formula_for_failed_chips(name: str) -> None:
    for wrap in ("none", "all"):
        assert FORMULAS[name](parse_mesh("8x8", wrap=wrap, fail=["3,3"]), HOPS, 1.0) is None


def test_an_all_gather_and_its_reverse_before_it_are_an_allreduce_with_both_as_its_halves() -> None:
    mesh = parse_mesh("3x4", fail=["1,1"])
    gather = algorithm("rank-ring").build(mesh, Collective.ALL_GATHER)
    allreduce = allreduce_of(gather)

    halves = [
        half_of(allreduce, half) for half in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    ]
    for schedule in (allreduce, *halves):
        assert planned(mesh, schedule, Target()).proof.method == "exact"
    assert [half.n_rows for half in halves] == [gather.n_rows] * 2


def test_what_is_not_there_is_left_out_with_a_reason(tmp_path: Path) -> None:
    mesh, name = Mesh((2, 2)), mesh_name("2x2", "all", "1x1@0,1")

    assert name == "2x2-torus-less-1x1-0-1"
    assert "--tacos DIR" in tacos_plans(None, mesh, name).why_not
    assert tacos_plans(tmp_path, mesh, name).why_not == f"no file {name}.xml"
    assert "--forestcoll DIR" in forestcoll_plans(tmp_path, mesh, patience_s=1).why_not


_TO_THE_OTHER = """
<algo ngpus="2" coll="allgather" nchunksperloop="2">
 <gpu id="0">
  <tb id="0" send="1" recv="1" chan="0">
   <step type="s" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0"/>
   <step type="r" srcbuf="o" srcoff="1" dstbuf="o" dstoff="1"/>
  </tb>
 </gpu>
 <gpu id="1">
  <tb id="0" send="0" recv="0" chan="0">
   <step type="s" srcbuf="o" srcoff="1" dstbuf="o" dstoff="1"/>
   <step type="r" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0"/>
  </tb>
 </gpu>
</algo>
"""


def test_all_files_of_a_mesh_are_read_and_none_of_another(tmp_path: Path) -> None:
    for name in ("1x2.xml", "1x2.draw-2.xml", "1x2-torus.xml", "1x2-less-0-0.xml"):
        (tmp_path / name).write_text(_TO_THE_OTHER)

    assert len(tacos_plans(tmp_path, Mesh((1, 2)), "1x2").sums) == 2
