"""The process that plans ahead: its task and its end."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import MessageError
from meshmend.planning.ahead_process import AheadProcess
from meshmend.planning.plan_request import PlanRequest, PlanTask, decode_task, encode_task
from meshmend.topology.mesh import Mesh
from planners import PLANNING_S, children_of, is_running
from strategies import broken_meshes
from waiting import until

SUMS = ((10**6, "float32"),)

tasks = st.builds(
    PlanTask,
    st.text(),
    st.builds(
        PlanRequest,
        broken_meshes(),
        st.lists(st.integers(1, 4)).map(tuple),
        st.text(),
        st.lists(st.tuples(st.integers(0, 1 << 40), st.text())).map(tuple),
    ),
    st.floats(0, 1),
)


@given(tasks)
def test_a_task_survives_being_written(task: PlanTask) -> None:
    assert decode_task(encode_task(task)) == task


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"kind": "plan"}', b"\xff"])
def test_what_is_no_task_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError, match="a task to plan ahead"):
        decode_task(data)


def until_first_plan(task: PlanTask) -> AheadProcess:
    shutil.rmtree(task.path, ignore_errors=True)
    process = AheadProcess()
    process.plan(task)
    until(
        lambda: any(task.path.glob("*.json")),
        timeout_s=PLANNING_S,
        why=lambda: f"process {process.pid} plans nothing",
    )
    return process


@pytest.mark.slow  # the lowest priority waits for all other tests
@pytest.mark.parametrize("side", [4, 8])
def test_the_process_maps_no_torch(side: int, tmp_path: Path) -> None:
    request = PlanRequest(Mesh((side, side)), (2, 2), "auto", SUMS)
    task = PlanTask(str(tmp_path / "plans"), request)
    compiled = until_first_plan(task)  # so that the second finds all loops compiled
    compiled.kill()
    assert compiled.wait() == ""

    process = until_first_plan(task)
    os.kill(process.pid, signal.SIGSTOP)  # it is not to end while it is looked at
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    process.kill()

    assert process.wait() == ""
    assert "libtorch" not in maps
    assert "/site-packages/torch/" not in maps


def test_importing_what_plans_imports_no_torch() -> None:
    program = (
        "import sys, meshmend.planning.ahead_process, meshmend.planning.plan_cache\n"
        "assert 'torch' not in sys.modules\n"
    )

    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_killed_process_has_not_failed(tmp_path: Path) -> None:
    request = PlanRequest(Mesh((12, 12)), (1, 1), "auto", SUMS)
    process = AheadProcess()
    process.plan(PlanTask(str(tmp_path / "plans"), request))

    process.kill()

    assert process.wait() == ""
    assert not Path(f"/proc/{process.pid}").exists()


@pytest.mark.slow  # the lowest priority waits for all other tests
def test_a_process_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    request = PlanRequest(Mesh((2, 2)), (1, 1), "auto", ((9, "float32"),))
    process = AheadProcess()
    process.plan(PlanTask(str(tmp_path / "file" / "plans"), request))

    assert process.wait().startswith("NotADirectoryError")
    with pytest.raises(OSError, match="Bad file descriptor"):
        process.plan(PlanTask(str(tmp_path / "plans"), request))


@pytest.mark.slow  # the lowest priority waits for all other tests
def test_a_new_task_takes_the_place_of_the_one_before_in_the_same_process(tmp_path: Path) -> None:
    long = PlanRequest(Mesh((12, 12)), (1, 1), "auto", SUMS)
    short = PlanRequest(Mesh((2, 2)), (1, 1), "auto", ((9, "float32"),))
    process = until_first_plan(PlanTask(str(tmp_path / "long"), long))
    (planning,) = children_of(process.pid)
    process.plan(PlanTask(str(tmp_path / "dropped"), long))
    process.plan(PlanTask(str(tmp_path / "short"), short))

    until(
        lambda: (
            len(list((tmp_path / "short").glob("*.json"))) >= 5 and not children_of(process.pid)
        ),
        timeout_s=PLANNING_S,
        why=lambda: "it plans nothing",
    )
    assert not is_running(planning)
    assert is_running(process.pid)
    process.kill()
    assert process.wait() == ""


@pytest.mark.slow  # the lowest priority waits for all other tests
def test_who_makes_plans_ends_with_the_process_that_forked_it(tmp_path: Path) -> None:
    request = PlanRequest(Mesh((12, 12)), (1, 1), "auto", SUMS)
    process = until_first_plan(PlanTask(str(tmp_path / "plans"), request))
    (planning,) = children_of(process.pid)
    assert os.getpriority(os.PRIO_PROCESS, planning) == 19

    process.kill()
    assert process.wait() == ""

    until(
        lambda: not is_running(planning),
        timeout_s=PLANNING_S,
        why=lambda: f"{planning} still runs",
    )
