"""Workers that are forked can compute, whatever OMP_NUM_THREADS says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commanding import meshmend_run
from waiting import HANG_S

pytest.importorskip("torch")

from meshmend.launch.worker import compute_in_one_thread

# A parallel loop needs more elements than torch gives to one thread.
_FORK_AFTER_A_PARALLEL_LOOP = """
import os, torch
from meshmend.launch.supervisor import Supervisor

def compute():
    torch.set_num_threads(2)
    return float((torch.ones(1 << 20) + 1).sum())

compute()
processes = Supervisor()
child = processes.fork("", lambda pipes, parent: os._exit(7 if compute() else 1))
while processes.alive():
    processes.serve(None)
print(child.code)
"""

_LAUNCH_IN_A_FORKED_PROCESS = """
import os, torch
from meshmend.launch.supervisor import Supervisor

(torch.ones(1 << 20) + 1).sum()
if os.fork() == 0:
    torch.set_num_threads(1)
    processes = Supervisor()
    child = processes.fork("", lambda pipes, parent: os._exit(7))
    while processes.alive():
        processes.serve(None)
    print(child.code, flush=True)
    os._exit(0)
os.wait()
"""


def clean_environment(**more: str) -> dict[str, str]:
    """The environment of a user who has set nothing."""
    kept = ("PATH", "HOME", "PYTHONPATH", "NUMBA_CACHE_DIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | more


@pytest.mark.parametrize("script", [_FORK_AFTER_A_PARALLEL_LOOP, _LAUNCH_IN_A_FORKED_PROCESS])
def test_workers_are_forked_though_a_process_before_them_computed_in_threads(script: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=HANG_S,
        check=False,
    )

    assert ran.stdout == "7\n", ran.stderr


@pytest.mark.parametrize(
    ("text", "n_threads"), [("", 1), ("4", 4), ("3,2", 3), ("many", 1), ("0", 1)]
)
def test_workers_get_the_threads_that_the_user_wants(
    text: str, n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)

    assert compute_in_one_thread() == n_threads
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_a_worker_of_run_computes_in_as_many_threads_as_the_environment_says(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\nprint(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])\n"
        "print(int((torch.ones(1 << 20) + 1).sum()))\n"
    )

    ran = meshmend_run("--mesh", "1x2", script, OMP_NUM_THREADS="3")

    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == [
        "[0,0] 2097152",
        "[0,0] 3 3",
        "[0,1] 2097152",
        "[0,1] 3 3",
    ]


@pytest.mark.slow  # the tests above find each cause of a hang that there was
@pytest.mark.parametrize("threads", [{"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "4"}, {}])
def test_steps_are_taken_in_a_clean_environment(threads: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    line = ["train", "--mesh", "1x2", "--steps", "3", "--run-dir", str(tmp_path / "run")]
    ran = subprocess.run(
        [sys.executable, "-m", "meshmend", *line],
        capture_output=True,
        text=True,
        env=clean_environment(**threads),
        cwd=tmp_path,
        timeout=HANG_S,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert "0 lost, 0 repeated" in ran.stdout
