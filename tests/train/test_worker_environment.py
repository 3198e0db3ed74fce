"""What a worker makes of its environment."""

import os
from multiprocessing import current_process
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshmend.errors import InputError
from meshmend.membership.faults.fault import parse_fault
from meshmend.topology.mesh import Mesh
from meshmend.train.core.host_planner import PlanAheadSettings, scratch_plan_folder
from meshmend.train.core.worker_environment import (
    WorkerEnvironment,
    worker_environment,
    worker_environment_from,
)

ENVIRONMENT = {
    "MESHMEND_COORDINATOR": "127.0.0.1:7000",
    "MESHMEND_JOB": "job",
    "MESHMEND_SECRET": "known to all of us",
    "MESHMEND_MESH": "4x4",
    "MESHMEND_ALGORITHM": "trees",
    "MESHMEND_CHIP": "0,0",
}


@pytest.mark.parametrize(
    ("more", "plan_ahead"),
    [
        ({}, None),
        ({"MESHMEND_JOB_DIR": "/run"}, None),
        ({"MESHMEND_PLAN_AHEAD": ""}, None),
        (
            {"MESHMEND_PLAN_AHEAD": "1"},
            PlanAheadSettings(
                scratch_plan_folder("job", b"known to all of us"), "trees", (2, 2), is_scratch=True
            ),
        ),
        (
            {"MESHMEND_PLAN_AHEAD": "1", "MESHMEND_BOARD": "4x1", "MESHMEND_JOB_DIR": "/run"},
            PlanAheadSettings(Path("/run/plans"), "trees", (4, 1)),
        ),
    ],
)
def test_the_environment_says_whether_and_where_to_plan_ahead(
    more: dict[str, str], plan_ahead: PlanAheadSettings | None
) -> None:
    assert worker_environment_from(ENVIRONMENT | more).plan_ahead == plan_ahead


def test_a_script_without_a_main_guard_makes_no_second_worker_of_its_chip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loader worker that is spawned runs it once more, with the variables of its worker."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(current_process(), "_inheriting", True, raising=False)
    worker_environment.cache_clear()

    with pytest.raises(InputError, match=r"runs the script once more.* if __name__ == '__main__'"):
        worker_environment()


@pytest.mark.parametrize("board", ["2", "2x2x2", "0x2", "two"])
def test_a_board_of_other_axes_is_refused(board: str) -> None:
    environment = ENVIRONMENT | {"MESHMEND_PLAN_AHEAD": "1", "MESHMEND_BOARD": board}

    with pytest.raises(InputError, match=r"MESHMEND_BOARD needs a shape (for 4x4 )?such as 2x2"):
        worker_environment_from(environment)


def test_without_a_coordinator_a_process_trains_alone() -> None:
    alone = worker_environment_from({"MESHMEND_JOB_DIR": "/run", "MESHMEND_CHIP": "0,1"})

    assert alone == WorkerEnvironment(run_dir=Path("/run"))


def test_a_worker_knows_its_identity_and_its_faults() -> None:
    fault = "kill 0,0 at 3"
    more = {"MESHMEND_FAIL": "3,3", "MESHMEND_INJECT": fault, "MESHMEND_CHIP": "0,2"}

    worker = worker_environment_from(ENVIRONMENT | more)

    assert worker.identity is not None
    assert (worker.identity.job, worker.identity.chip, worker.identity.seat) == ("job", (0, 2), 2)
    assert worker.identity.coordinator == ("127.0.0.1", 7000)
    assert worker.identity.secret == b"known to all of us"
    assert (worker.whole, worker.n_live_at_start) == (Mesh((4, 4)), 15)
    assert worker.faults == (parse_fault(fault, Mesh((4, 4))),)


@pytest.mark.parametrize(
    ("missing", "match"),
    [
        ("MESHMEND_MESH", "a worker needs to know the mesh, but MESHMEND_MESH is not set"),
        ("MESHMEND_SECRET", "a worker needs the job's secret, but MESHMEND_SECRET is not set"),
        ("MESHMEND_CHIP", "a worker needs to know its chip, but MESHMEND_CHIP is not set"),
    ],
)
def test_a_worker_says_what_it_lacks(missing: str, match: str) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != missing}

    with pytest.raises(InputError, match=match):
        worker_environment_from(environment)


def test_a_forked_worker_reads_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent may have trained alone before it became a launcher."""
    for name in [name for name in os.environ if name.startswith("MESHMEND_")]:
        monkeypatch.delenv(name)
    assert worker_environment().identity is None

    if (pid := os.fork()) == 0:
        os.environ.update(ENVIRONMENT)
        os._exit(0 if worker_environment().identity is not None else 1)

    assert os.waitpid(pid, 0)[1] == 0
    assert worker_environment().identity is None
