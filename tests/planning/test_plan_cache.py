"""Plans made ahead: which there are, who makes them, and which of those in a folder are used."""

import fcntl
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshmend.errors import StoppedError
from meshmend.planning import catalogue, plan_cache
from meshmend.planning.catalogue import CollectiveCall, is_remembered, proved_schedule
from meshmend.planning.files import plan_document, read_plan, write_plan
from meshmend.planning.plan import plan
from meshmend.planning.plan_cache import (
    board_losses,
    load_or_make_plans,
    load_plans,
    plan_ahead,
    planned_calls,
    planned_losses,
    store_plans,
)
from meshmend.planning.plan_request import GATHER, PlanRequest, tile_sum
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.table import Collective
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.symmetry import stand_in
from meshmend.topology.text import parse_mesh
from meshmend.topology.tiles import box_tiling

SQUARE = Mesh((2, 2))
SUMS = ((9, "float32"),)
CLASS = catalogue.SHORT_BYTES
SUM = CollectiveCall("allreduce")


@pytest.fixture(autouse=True)
def _nothing_planned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_remembered", {})


def request(mesh: Mesh = SQUARE, algorithm: str = "auto") -> PlanRequest:
    return PlanRequest(mesh, (1,) * len(mesh.shape), algorithm, SUMS)


def plans_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def cannot_plan(*_: object) -> None:
    raise AssertionError("it was to be taken from the folder")


def test_there_is_a_plan_for_the_loss_of_each_chip_of_a_square_and_for_all_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_ahead(tmp_path / "plans", request())
    assert len(plans_in(tmp_path / "plans")) == 5
    assert planned_losses(tmp_path / "plans", SQUARE) == (4, 4)
    monkeypatch.setattr(catalogue, "_remembered", {})
    monkeypatch.setattr(catalogue, "_make", cannot_plan)

    for mesh in (SQUARE, *(SQUARE.without(f"{row},{col}") for row in (0, 1) for col in (0, 1))):
        load_plans(tmp_path / "plans", mesh, "auto", SUMS)
        assert proved_schedule(mesh, "auto", SUM, CLASS)[0].n_ranks == mesh.n_live


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1, exclude_max=True))
def test_wherever_one_begins_the_same_plans_are_made(tmp_path: Path, begin: float) -> None:
    for name in ("one", "other"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    plan_ahead(tmp_path / "one", request())
    plan_ahead(tmp_path / "other", request(), begin=begin)

    one, other = (plans_in(tmp_path / name) for name in ("one", "other"))
    assert [path.name for path in one] == [path.name for path in other]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


@pytest.mark.parametrize(("begin", "own"), [(0.0, 0), (0.5, 8)])
def test_the_mesh_itself_and_boards_beside_failed_chips_come_first(
    begin: float, own: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that begins at 0 plans the mesh as it is first, any other last."""
    made: list[Mesh] = []
    monkeypatch.setattr(plan_cache, "store_plans", lambda folder, mesh, *_: made.append(mesh))
    broken = Mesh((3, 3)).without("0,0")

    plan_ahead(tmp_path, request(broken), begin=begin)

    assert made.index(broken) == own
    beside = {broken.without("0,1"), broken.without("1,0")}
    assert set([mesh for mesh in made if mesh != broken][:2]) == beside
    assert len(set(made)) == len(made) == 9


def test_the_mesh_itself_is_planned_before_its_losses_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 64x64 took half a minute, in which a job ran its quick plans."""
    done: list[str] = []

    def looked_at(mesh: Mesh, **named: Any) -> Any:
        done.append("look")
        return stand_in(mesh, **named)

    monkeypatch.setattr(plan_cache, "store_plans", lambda *_: done.append("plan"))
    monkeypatch.setattr(plan_cache, "stand_in", looked_at)

    plan_ahead(tmp_path, request(Mesh((6, 6)).without("0,0")))

    assert done[:2] == ["plan", "look"]


@pytest.mark.parametrize(("wrap", "n_alike"), [("none", 2), ("all", 1)])
def test_losses_that_look_alike_share_one_search(
    wrap: str, n_alike: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: set[Mesh] = set()

    def counted(mesh: Mesh, *options: Any, **named: Any) -> Any:
        searched.add(mesh)
        return plan(mesh, *options, **named)

    monkeypatch.setattr(catalogue, "plan", counted)
    mesh, sums = parse_mesh("6x4", wrap=wrap), ((100_000, "float32"),)
    asked = PlanRequest(mesh, (2, 2), "auto", sums)
    for name, begin in (("one", 0.0), ("other", 0.6)):
        searched.clear()
        monkeypatch.setattr(catalogue, "_remembered", {})
        plan_ahead(tmp_path / name, asked, begin=begin)
        assert len(searched - {stand_in(mesh).mesh}) == n_alike

    one, other = (
        {path.name: path.read_bytes() for path in plans_in(tmp_path / name)}
        for name in ("one", "other")
    )
    assert one == other
    monkeypatch.setattr(catalogue, "_remembered", {})
    for left in board_losses(mesh, (2, 2)):
        load_plans(tmp_path / "one", left, "auto", sums)  # and so proves them
        assert is_remembered(left, "auto", SUM, catalogue.payload_class(SUM, 400_000))


def test_a_plan_that_several_write_at_once_is_whole_whenever_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    tables = {
        name: ALGORITHMS[name].build(SQUARE, Collective.ALLREDUCE)
        for name in ("ring-1d", "two-d", "rank-ring")
    }
    write_plan(path, SQUARE, tables["ring-1d"])

    def write(name: str) -> None:
        for _ in range(300):
            write_plan(path, SQUARE, tables[name])

    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(write, name) for name in tables]
        while not all(writer.done() for writer in writers):
            assert read_plan(path).schedule.algorithm in tables
        assert [writer.result() for writer in writers] == [None] * 3
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


def test_of_many_who_need_a_plan_at_once_one_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, plans = tmp_path / "made", tmp_path / "plans"
    make = catalogue._make

    def make_slowly(*question: Any) -> Any:
        with made.open("a") as log:
            log.write(f"{os.getpid()}\n")
        time.sleep(0.2)
        return make(*question)

    monkeypatch.setattr(catalogue, "_make", make_slowly)
    workers = [multiprocessing.get_context("fork").Process(
        target=load_or_make_plans, args=(plans, SQUARE, "auto", SUMS)
    ) for _ in range(4)]  # fmt: skip
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)

    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(made.read_text().splitlines()) == 1
    assert len(plans_in(plans)) == 1


def test_a_process_that_waits_for_a_hung_one_makes_the_plan_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "_LOCK_TIMEOUT_S", 0.05)
    with (tmp_path / ".lock").open("wb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)

        load_or_make_plans(tmp_path, SQUARE, "auto", SUMS)

    assert is_remembered(SQUARE, "auto", SUM, CLASS)


def test_a_process_stops_waiting_for_a_plan_when_there_is_a_newer_generation(
    tmp_path: Path,
) -> None:
    def newer() -> None:
        raise StoppedError("there is a newer generation")

    with (tmp_path / ".lock").open("wb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)

        with pytest.raises(StoppedError, match="newer"):
            load_or_make_plans(tmp_path, SQUARE, "auto", SUMS, check=newer)


def test_gathers_are_planned_ahead_in_rank_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = (*SUMS, (1 << 20, GATHER))
    plan_ahead(tmp_path, PlanRequest(SQUARE, (1, 1), "auto", sums))
    assert len(plans_in(tmp_path)) == 10
    monkeypatch.setattr(catalogue, "_remembered", {})
    monkeypatch.setattr(catalogue, "_make", cannot_plan)

    left = SQUARE.without("0,1")
    load_plans(tmp_path, left, "auto", sums)

    gather = CollectiveCall(GATHER)
    schedule, _ = proved_schedule(left, "auto", gather, catalogue.payload_class(gather, sums[1][0]))
    assert schedule.collective is Collective.ALL_GATHER
    assert sorted(schedule.owners) == list(schedule.owners)


def _be_in_another_order(plan: dict[str, Any]) -> None:
    """Right by itself, but rank 0 would find the part of rank 3 in its place."""
    plan["owners"] = plan["owners"][::-1]
    last = len(plan["owners"])
    plan["lo"], plan["hi"] = ([last - cut for cut in plan[name]] for name in ("hi", "lo"))


def test_a_gather_that_is_not_in_rank_order_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = ((1 << 10, GATHER),)
    plan_ahead(tmp_path, PlanRequest(SQUARE, (2, 2), "auto", sums))
    (path,) = plans_in(tmp_path)
    plan = json.loads(path.read_text())
    _be_in_another_order(plan)
    path.write_text(json.dumps(plan))
    assert read_plan(path).schedule.n_ranks == 4
    monkeypatch.setattr(catalogue, "_remembered", {})

    load_plans(tmp_path, SQUARE, "auto", sums)

    assert not is_remembered(SQUARE, "auto", CollectiveCall(GATHER), CLASS)


def test_there_is_a_plan_of_colours_for_the_loss_of_each_chip_of_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, sums = Mesh((2, 4)), (tile_sum(1 << 20, (1, 2)),)
    plan_ahead(tmp_path, PlanRequest(mesh, (2, 2), "auto", sums))
    monkeypatch.setattr(catalogue, "_remembered", {})
    monkeypatch.setattr(catalogue, "_make", cannot_plan)

    for chip in mesh.live:
        left = mesh.without(f"{chip[0]},{chip[1]}")
        rest = replace(left, failed=left.failed | set(box_tiling(left, (1, 2)).spares))
        load_plans(tmp_path, rest, "auto", sums)
        [(call, n_bytes)] = planned_calls(sums)
        schedule, _ = proved_schedule(rest, "auto", call, n_bytes)
        assert schedule.colours is not None
        assert schedule.colours.of_rank.tolist() == box_tiling(rest, (1, 2)).colour_of.tolist()


@pytest.mark.parametrize("others", [(9 << 20, "uint8"), tile_sum(9 << 20, (2, 1))])
def test_a_plan_of_other_colours_or_of_none_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: tuple[int, str]
) -> None:
    sums = (tile_sum(9 << 20, (1, 2)),)
    for size in (*sums, others):
        store_plans(tmp_path / size[1].replace(" ", ""), SQUARE, "auto", [size])
    wrong = plans_in(tmp_path / others[1].replace(" ", ""))[0]
    (right,) = plans_in(tmp_path / "tiles1x2")
    shutil.copy(wrong, right)
    monkeypatch.setattr(catalogue, "_remembered", {})

    load_plans(right.parent, SQUARE, "auto", sums)

    assert not is_remembered(SQUARE, "auto", *planned_calls(sums)[0])


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    load_or_make_plans(tmp_path / "file", SQUARE, "auto", SUMS)

    assert proved_schedule(SQUARE, "auto", SUM, CLASS)[0].n_ranks == 4


def test_a_loss_that_the_algorithm_does_not_support_is_left_out(tmp_path: Path) -> None:
    plan_ahead(tmp_path, request(Mesh((4, 4)), "two-d"))

    assert len(plans_in(tmp_path)) == 1  # the whole mesh
    assert planned_losses(tmp_path, Mesh((4, 4))) == (0, 16)


def test_how_many_losses_have_plans_is_known_of_one_mesh_while_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int] | None] = []

    def look(*_: object) -> None:
        seen.append(planned_losses(tmp_path, SQUARE))

    monkeypatch.setattr(plan_cache, "store_plans", look)
    plan_ahead(tmp_path, request())

    assert seen == [None, (0, 4), (1, 4), (2, 4), (3, 4)]
    assert planned_losses(tmp_path, SQUARE) == (4, 4)
    assert planned_losses(tmp_path, SQUARE.without("0,0")) is None
    (tmp_path / "coverage").write_text("[")
    assert planned_losses(tmp_path, SQUARE) is None


def _drop_a_row(plan: dict[str, list[int]]) -> None:
    for name in ("src", "dst", "lo", "hi", "op"):
        plan[name].pop()


def _be_a_gathering(plan: dict[str, object]) -> None:
    """Right by itself, and no sum."""
    plan |= plan_document(SQUARE, ALGORITHMS["rank-ring"].build(SQUARE, Collective.ALL_GATHER))


def _be_for_fewer(plan: dict[str, object]) -> None:
    left = SQUARE.without("0,0")
    other = plan_document(left, ALGORITHMS["rank-ring"].build(left, Collective.ALLREDUCE))
    plan |= {**other, "mesh": plan["mesh"]}


@pytest.mark.parametrize("spoil", [_drop_a_row, _be_a_gathering, _be_for_fewer])
def test_a_plan_that_is_wrong_is_not_taken_and_does_no_harm(
    spoil: Callable[[object], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_ahead(tmp_path, request())
    for path in plans_in(tmp_path):
        plan = json.loads(path.read_text())
        spoil(plan)
        path.write_text(json.dumps({**plan, "phases": []}))
    monkeypatch.setattr(catalogue, "_remembered", {})

    load_plans(tmp_path, SQUARE, "auto", SUMS)
    assert not is_remembered(SQUARE, "auto", SUM, CLASS)


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 2), st.integers(1, 2))
def test_each_board_is_lost_once(rows: int, cols: int, high: int, wide: int) -> None:
    mesh = Mesh((rows, cols))
    left = list(board_losses(mesh, (high, wide)))
    n_boards = -(-rows // high) * -(-cols // wide)

    assert len(left) == (n_boards if n_boards > 1 else 0)
    assert len(set(left)) == len(left)
    assert all(one == largest_part(one) for one in left)
