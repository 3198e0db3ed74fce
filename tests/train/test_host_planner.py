"""Which worker of a host plans ahead, whose folder is trusted, and what becomes of its process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planners import PLANNING_S, is_running, planners_of
from waiting import until

pytest.importorskip("torch")

from meshmend.membership.generation import Generation, Seat
from meshmend.planning.plan_cache import plan_ahead
from meshmend.planning.plan_request import PlanRequest
from meshmend.topology.mesh import Mesh
from meshmend.train.core.host_planner import (
    HostPlanner,
    PlanAheadSettings,
    is_private_folder,
    scratch_plan_folder,
)

SQUARE = Mesh((2, 2))
SUMS = ((9, "float32"),)
LONG = Mesh((12, 12))  # with a plan per chip it keeps a planner busy for much longer than a test
LONG_SUMS = ((10**6, "float32"),)


def generation(mesh: Mesh, *hosts: str) -> Generation:
    """All chips of a mesh, dealt out to the hosts in turn."""
    seats = (
        Seat(chip, (hosts[number % len(hosts)], 7000 + number), 1)
        for number, chip in enumerate(mesh.live)
    )
    return Generation(1, tuple(seats))


def own_planners(n_expected: int) -> list[int]:
    """The planners of this process; one that has just been started has no command line yet."""
    until(
        lambda: len(planners_of(os.getpid())) >= n_expected,
        timeout_s=PLANNING_S,
        why=lambda: f"{n_expected} planners do not run",
    )
    return planners_of(os.getpid())


def plans_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def test_a_folder_that_is_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "plans"

    assert is_private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert is_private_folder(folder)  # as another worker finds it


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
    planner = HostPlanner((0, 0), PlanAheadSettings(folder, "auto", (1, 1), is_scratch=True))
    planner.plan_ahead(generation(SQUARE, "10.0.0.1"), SQUARE, SUMS)
    planner.plan_ahead(generation(SQUARE, "10.0.0.1"), SQUARE, SUMS)

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
    assert is_private_folder(tmp_path / "plans")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    assert not is_private_folder(tmp_path / "plans")


def test_a_job_finds_its_own_folder_and_no_other() -> None:
    folder = scratch_plan_folder("job", b"secret")

    assert folder == scratch_plan_folder("job", b"secret")
    assert str(os.geteuid()) in folder.name
    assert "secret" not in folder.name
    assert (
        len({folder, scratch_plan_folder("other", b"secret"), scratch_plan_folder("job", b"other")})
        == 3
    )


@pytest.fixture
def planner_of(tmp_path: Path) -> Iterator[Callable[..., HostPlanner]]:
    """Make the planner of a chip; all of them are closed at the end."""
    made: list[HostPlanner] = []

    def make(*chip: int, folder: Path = tmp_path / "plans", is_scratch: bool = True) -> HostPlanner:
        made.append(HostPlanner(chip, PlanAheadSettings(folder, "auto", (1, 1), is_scratch)))
        return made[-1]

    yield make
    for planner in made:
        planner.close()


@pytest.mark.slow  # the lowest priority waits for all other tests
def test_a_planner_fills_its_folder_and_leaves_nothing(
    planner_of: Callable[..., HostPlanner], tmp_path: Path
) -> None:
    broken = SQUARE.without("link:0,0-0,1")
    plan_ahead(tmp_path / "by hand", PlanRequest(broken, (1, 1), "auto", SUMS))
    wanted = {path.name for path in plans_in(tmp_path / "by hand")}
    planner = planner_of(0, 0)
    planner.plan_ahead(generation(broken, "10.0.0.1"), broken, SUMS)
    (pid,) = own_planners(1)

    def made() -> set[str]:
        return {path.name for path in plans_in(tmp_path / "plans")}

    until(
        lambda: made() == wanted, timeout_s=PLANNING_S, why=lambda: f"there is {made()} of {wanted}"
    )
    planner.close()
    assert not Path(f"/proc/{pid}").exists()
    assert not (tmp_path / "plans").exists()


def test_only_the_first_chip_of_each_host_plans(planner_of: Callable[..., HostPlanner]) -> None:
    """Chips 0,0 0,2 ... are on one host, chips 0,1 0,3 ... on the other."""
    now = generation(LONG, "10.0.0.1", "10.0.0.2")

    for chip, n_planners in [((0, 2), 0), ((5, 5), 0), ((0, 0), 1), ((0, 1), 2)]:
        planner_of(*chip).plan_ahead(now, LONG, LONG_SUMS)
        assert len(own_planners(n_planners)) == n_planners


def test_a_planner_lives_on_in_the_next_generation_until_its_chip_is_no_longer_the_first(
    planner_of: Callable[..., HostPlanner],
) -> None:
    second = planner_of(0, 1)
    second.plan_ahead(generation(LONG.without("0,0"), "10.0.0.1"), LONG, LONG_SUMS)
    (before,) = own_planners(1)
    second.plan_ahead(generation(LONG.without("0,0"), "10.0.0.1"), LONG, LONG_SUMS)
    assert own_planners(1) == [before]

    os.kill(before, signal.SIGKILL)  # as if memory were short
    until(lambda: not is_running(before), timeout_s=PLANNING_S, why=lambda: "it still runs")
    second.plan_ahead(generation(LONG.without("0,0"), "10.0.0.1"), LONG, LONG_SUMS)
    (after,) = own_planners(1)
    second.plan_ahead(generation(LONG, "10.0.0.1"), LONG, LONG_SUMS)  # it is not the first now
    until(lambda: not is_running(after), timeout_s=PLANNING_S, why=lambda: "it still runs")
    assert not planners_of(os.getpid())


@pytest.mark.slow  # the lowest priority waits for all other tests
def test_a_planner_ends_with_its_worker_even_if_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from meshmend.membership.generation import Generation, Seat\n"
        "from meshmend.topology.mesh import Mesh\n"
        "from meshmend.train.core.host_planner import HostPlanner, PlanAheadSettings\n"
        "mesh = Mesh((12, 12))\n"
        "seats = tuple(Seat(chip, ('10.0.0.1', 7000), 1) for chip in mesh.live)\n"
        "planner = HostPlanner((0, 0), PlanAheadSettings(Path(sys.argv[1]), 'auto', (1, 1)))\n"
        "planner.plan_ahead(Generation(1, seats), mesh, [(10**6, 'float32')])\n"
        "print(planner._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "plans")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
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
    planner_of: Callable[..., HostPlanner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    planner = planner_of(0, 0)
    for _ in range(2):
        planner.plan_ahead(generation(SQUARE, "10.0.0.1"), SQUARE, SUMS)

    (record,) = caplog.records
    assert "chip (0, 0) makes no plans ahead: [Errno 2]" in record.getMessage()


@pytest.mark.slow  # the lowest priority waits for all other tests
def test_a_planner_that_fails_is_told_of_once(
    planner_of: Callable[..., HostPlanner], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    planner = planner_of(0, 0, folder=tmp_path / "file" / "plans", is_scratch=False)
    for _ in range(2):
        planner.plan_ahead(generation(SQUARE, "10.0.0.1"), SQUARE, SUMS)
        until(lambda: bool(caplog.records), timeout_s=PLANNING_S, why=lambda: "nothing was told")
        until(
            lambda: not planners_of(os.getpid()), timeout_s=PLANNING_S, why=lambda: "it still runs"
        )

    (record,) = caplog.records
    assert "chip (0, 0) makes no plans ahead: NotADirectoryError" in record.getMessage()
