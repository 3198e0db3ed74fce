"""Plans made ahead: what lies in the folder, whose folder is trusted, and who fills it."""

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planners import PLANNING_S, is_running, planners_of

pytest.importorskip("torch")

from meshmend.errors import InputError
from meshmend.membership.generation import Generation, Seat
from meshmend.planning import catalogue
from meshmend.planning import plan_cache as foresight
from meshmend.planning.catalogue import Kind, is_remembered, proved_schedule
from meshmend.planning.files import plan_document, read_plan, write_plan
from meshmend.planning.plan_cache import PlanRequest, load_plans, losses, plan_ahead, plan_together
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.table import Collective
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.train.ahead import Ahead, Planner, is_ours, scratch_plans
from meshmend.train.worker_environment import worker_environment_from
from waiting import until

SQUARE = Mesh((2, 2))
SUMS = [(9, "float32")]
CLASS = catalogue.SHORT_BYTES
SUM = Kind("allreduce")
LONG = Mesh((12, 12))  # with a plan per chip it keeps a planner busy for much longer than a test
LONG_SUMS = [(10**6, "float32")]


@pytest.fixture(autouse=True)
def _nothing_planned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_remembered", {})


def outlook(mesh: Mesh = SQUARE, algorithm: str = "auto") -> PlanRequest:
    return PlanRequest(mesh, (1,) * len(mesh.shape), algorithm, SUMS)


def generation(mesh: Mesh, *hosts: str) -> Generation:
    """All chips of a mesh, dealt out to the hosts in turn."""
    seats = (
        Seat(chip, (hosts[number % len(hosts)], 7000 + number), 1)
        for number, chip in enumerate(mesh.live)
    )
    return Generation(1, tuple(seats))


def plans_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def cannot_plan(*_: object) -> None:
    raise AssertionError("it was to be taken from the folder")


def test_there_is_a_plan_for_the_loss_of_each_chip_of_a_square_and_for_all_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_ahead(tmp_path / "plans", outlook())
    assert len(plans_in(tmp_path / "plans")) == 5
    monkeypatch.setattr(catalogue, "_remembered", {})
    monkeypatch.setattr(catalogue, "_made", cannot_plan)

    for mesh in (SQUARE, *(SQUARE.without(f"{row},{col}") for row in (0, 1) for col in (0, 1))):
        load_plans(tmp_path / "plans", mesh, "auto", SUMS)
        assert proved_schedule(mesh, "auto", SUM, CLASS)[0].n_ranks == mesh.n_live


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1, exclude_max=True))
def test_wherever_one_begins_the_same_plans_are_made(tmp_path: Path, turn: float) -> None:
    for name in ("one", "other"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    plan_ahead(tmp_path / "one", outlook())
    plan_ahead(tmp_path / "other", outlook(), turn=turn)

    one, other = (plans_in(tmp_path / name) for name in ("one", "other"))
    assert [path.name for path in one] == [path.name for path in other]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


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
    make = catalogue._made

    def make_slowly(*question: Any) -> Any:
        with made.open("a") as log:
            log.write(f"{os.getpid()}\n")
        time.sleep(0.2)
        return make(*question)

    monkeypatch.setattr(catalogue, "_made", make_slowly)
    workers = [multiprocessing.get_context("fork").Process(
        target=plan_together, args=(plans, SQUARE, "auto", SUMS)
    ) for _ in range(4)]  # fmt: skip
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)

    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(made.read_text().splitlines()) == 1
    assert len(plans_in(plans)) == 1


def test_who_waits_for_one_that_has_stopped_makes_the_plan_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foresight, "_TURN_S", 0.05)
    with (tmp_path / ".turn").open("wb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)

        plan_together(tmp_path, SQUARE, "auto", SUMS)

    assert is_remembered(SQUARE, "auto", SUM, CLASS)


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    plan_together(tmp_path / "file", SQUARE, "auto", SUMS)

    assert proved_schedule(SQUARE, "auto", SUM, CLASS)[0].n_ranks == 4


def test_a_loss_that_the_algorithm_does_not_do_is_passed_over(tmp_path: Path) -> None:
    plan_ahead(tmp_path, outlook(Mesh((4, 4)), "two-d"))

    assert len(plans_in(tmp_path)) == 1  # the whole mesh


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
    plan_ahead(tmp_path, outlook())
    for path in plans_in(tmp_path):
        plan = json.loads(path.read_text())
        spoil(plan)
        path.write_text(json.dumps({**plan, "phases": []}))
    monkeypatch.setattr(catalogue, "_remembered", {})

    load_plans(tmp_path, SQUARE, "auto", SUMS)
    assert not is_remembered(SQUARE, "auto", SUM, CLASS)


def test_a_folder_that_is_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "plans"

    assert is_ours(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert is_ours(folder)  # as another worker finds it


def _a_link(path: Path) -> None:
    (path.parent / "theirs").mkdir(mode=0o700)
    path.symlink_to(path.parent / "theirs")


def _a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def _a_folder_for_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


@pytest.mark.parametrize(
    "prepare", [_a_link, _a_link_to_nothing, _a_folder_for_all, lambda path: path.write_text("")]
)
def test_what_others_could_have_put_there_is_not_used(
    prepare: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "plans"
    prepare(folder)
    planner = Planner((0, 0), Ahead(folder, "auto", (1, 1), is_scratch=True))
    planner.look_ahead(generation(SQUARE, "10.0.0.1"), SQUARE, SUMS)
    planner.look_ahead(generation(SQUARE, "10.0.0.1"), SQUARE, SUMS)

    assert planner.folder is None
    assert not planners_of(os.getpid())
    planner.close()
    assert os.path.lexists(folder)
    assert [record.getMessage() for record in caplog.records] == [
        f"chip (0, 0) makes no plans ahead: {folder} belongs to someone else"
    ]


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_ours(tmp_path / "plans")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    assert not is_ours(tmp_path / "plans")


def test_a_job_finds_its_own_folder_and_no_other() -> None:
    folder = scratch_plans("job", b"secret")

    assert folder == scratch_plans("job", b"secret")
    assert str(os.geteuid()) in folder.name
    assert "secret" not in folder.name
    assert len({folder, scratch_plans("other", b"secret"), scratch_plans("job", b"other")}) == 3


ENVIRONMENT = {
    "MESHMEND_COORDINATOR": "127.0.0.1:7000",
    "MESHMEND_JOB": "job",
    "MESHMEND_SECRET": "secret",
    "MESHMEND_MESH": "4x4",
    "MESHMEND_ALGORITHM": "trees",
    "MESHMEND_CHIP": "0,0",
}


@pytest.mark.parametrize(
    ("more", "ahead"),
    [
        ({}, None),
        ({"MESHMEND_JOB_DIR": "/run"}, None),
        ({"MESHMEND_PLAN_AHEAD": ""}, None),
        (
            {"MESHMEND_PLAN_AHEAD": "1"},
            Ahead(scratch_plans("job", b"secret"), "trees", (2, 2), is_scratch=True),
        ),
        (
            {"MESHMEND_PLAN_AHEAD": "1", "MESHMEND_BOARD": "4x1", "MESHMEND_JOB_DIR": "/run"},
            Ahead(Path("/run/plans"), "trees", (4, 1)),
        ),
    ],
)
def test_the_environment_says_whether_and_where_to_plan_ahead(
    more: dict[str, str], ahead: Ahead | None
) -> None:
    assert worker_environment_from(ENVIRONMENT | more).exchange_settings.ahead == ahead


@pytest.mark.parametrize("board", ["2", "2x2x2", "0x2", "two"])
def test_a_board_of_other_axes_is_refused(board: str) -> None:
    environment = ENVIRONMENT | {"MESHMEND_PLAN_AHEAD": "1", "MESHMEND_BOARD": board}

    with pytest.raises(InputError, match="MESHMEND_BOARD needs a shape for 4x4 such as 2x2"):
        worker_environment_from(environment)


@pytest.fixture
def planner_of(tmp_path: Path) -> Iterator[Callable[..., Planner]]:
    """Make the planner of a chip; all of them are closed at the end."""
    made: list[Planner] = []

    def make(*chip: int, folder: Path = tmp_path / "plans", is_scratch: bool = True) -> Planner:
        made.append(Planner(chip, Ahead(folder, "auto", (1, 1), is_scratch)))
        return made[-1]

    yield make
    for planner in made:
        planner.close()


@pytest.mark.slow  # the lowest priority waits for all other tests
def test_a_planner_fills_its_folder_and_leaves_nothing(
    planner_of: Callable[..., Planner], tmp_path: Path
) -> None:
    broken = SQUARE.without("link:0,0-0,1")
    plan_ahead(tmp_path / "by hand", outlook(broken))
    wanted = {path.name for path in plans_in(tmp_path / "by hand")}
    planner = planner_of(0, 0)
    planner.look_ahead(generation(broken, "10.0.0.1"), broken, SUMS)
    (pid,) = planners_of(os.getpid())

    def made() -> set[str]:
        return {path.name for path in plans_in(tmp_path / "plans")}

    until(
        lambda: made() == wanted, timeout_s=PLANNING_S, why=lambda: f"there is {made()} of {wanted}"
    )
    until(
        lambda: not Path(f"/proc/{pid}").exists(),
        timeout_s=PLANNING_S,
        why=lambda: "it is a zombie",
    )
    planner.close()
    assert not (tmp_path / "plans").exists()


def test_only_the_first_chip_of_each_host_plans(planner_of: Callable[..., Planner]) -> None:
    """Chips 0,0 0,2 ... are on one host, chips 0,1 0,3 ... on the other."""
    now = generation(LONG, "10.0.0.1", "10.0.0.2")

    for chip, n_planners in [((0, 2), 0), ((5, 5), 0), ((0, 0), 1), ((0, 1), 2)]:
        planner_of(*chip).look_ahead(now, LONG, LONG_SUMS)
        assert len(planners_of(os.getpid())) == n_planners


def test_the_next_generation_ends_what_was_planned_for_the_last(
    planner_of: Callable[..., Planner],
) -> None:
    second = planner_of(0, 1)
    second.look_ahead(generation(LONG.without("0,0"), "10.0.0.1"), LONG, LONG_SUMS)
    (before,) = planners_of(os.getpid())
    second.look_ahead(generation(LONG.without("0,0"), "10.0.0.1"), LONG, LONG_SUMS)

    until(lambda: not is_running(before), timeout_s=PLANNING_S, why=lambda: "it still runs")
    (after,) = planners_of(os.getpid())
    second.look_ahead(generation(LONG, "10.0.0.1"), LONG, LONG_SUMS)  # it is not the first now
    until(lambda: not is_running(after), timeout_s=PLANNING_S, why=lambda: "it still runs")
    assert not planners_of(os.getpid())


@pytest.mark.slow  # the lowest priority waits for all other tests
def test_a_planner_ends_with_its_worker_even_if_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from test_train_planner import *\n"
        "planner = Planner((0, 0), Ahead(Path(sys.argv[1]), 'auto', (1, 1)))\n"
        "planner.look_ahead(generation(LONG, '10.0.0.1'), LONG, LONG_SUMS)\n"
        "print(*planners_of(os.getpid()), flush=True)\n"
        "time.sleep(600)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), *filter(None, sys.path)])
    worker = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "plans")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    until(
        lambda: bool(plans_in(tmp_path / "plans")),
        timeout_s=PLANNING_S,
        why=lambda: "it plans nothing",
    )
    assert is_running(pid)
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    worker.kill()
    worker.wait()
    worker.stdout.close()

    until(lambda: not is_running(pid), timeout_s=PLANNING_S, why=lambda: f"{pid} still runs")
    assert worker.returncode == -signal.SIGKILL


def test_a_planner_that_cannot_start_is_told_of_once(
    planner_of: Callable[..., Planner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    planner = planner_of(0, 0)
    for _ in range(2):
        planner.look_ahead(generation(SQUARE, "10.0.0.1"), SQUARE, SUMS)

    (record,) = caplog.records
    assert "chip (0, 0) makes no plans ahead: [Errno 2]" in record.getMessage()


@pytest.mark.slow  # the lowest priority waits for all other tests
def test_a_planner_that_fails_is_told_of_once(
    planner_of: Callable[..., Planner], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    planner = planner_of(0, 0, folder=tmp_path / "file" / "plans", is_scratch=False)
    for _ in range(2):
        planner.look_ahead(generation(SQUARE, "10.0.0.1"), SQUARE, SUMS)
        until(lambda: bool(caplog.records), timeout_s=PLANNING_S, why=lambda: "nothing was told")
        until(
            lambda: not planners_of(os.getpid()), timeout_s=PLANNING_S, why=lambda: "it still runs"
        )

    (record,) = caplog.records
    assert "chip (0, 0) makes no plans ahead: NotADirectoryError" in record.getMessage()


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 2), st.integers(1, 2))
def test_each_board_is_lost_once(rows: int, cols: int, high: int, wide: int) -> None:
    mesh = Mesh((rows, cols))
    left = list(losses(mesh, (high, wide)))
    n_boards = -(-rows // high) * -(-cols // wide)

    assert len(left) == (n_boards if n_boards > 1 else 0)
    assert len(set(left)) == len(left)
    assert all(one == largest_part(one) for one in left)
