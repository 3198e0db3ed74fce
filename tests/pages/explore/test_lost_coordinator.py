"""The page of a job whose coordinator dies, comes back, or ends with the job."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from browsing import Browsed, browsed, explorer, need_web_server
from ports import free_port
from served_coordinator import served_coordinator
from served_page import served_page
from training_script import training_script
from waiting import HANG_S, until

SECRET = "only the chips of this test know"
# It trains until there is a file `stop`.
SCRIPT = training_script(
    "batch=12, steps=1000000",
    """
    time.sleep(0.02)
    if (Path(__file__).parent / "stop").exists():
        job.stop()
    """,
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def says(found: Browsed, words: str) -> None:
    """Wait until the title of the job has these words."""
    until(lambda: words in found.text("#job-title"), why=lambda: found.text("#job-title"))


def goes_on(found: Browsed) -> None:
    """Wait until the page shows later steps."""
    before = step_of(found)
    until(lambda: step_of(found) > before)


def step_of(found: Browsed) -> int:
    return int(found.text("#job-figures").split("step", 1)[1].split()[0])


@pytest.mark.slow
def test_a_page_says_that_nobody_answers_until_the_coordinator_is_back(
    tmp_path: Path, chromium: Any
) -> None:
    address = ("127.0.0.1", free_port())
    options = ["--coordinator", f"127.0.0.1:{address[1]}"]
    with ExitStack() as stack:
        with served_coordinator("2x3", SECRET.encode(), address):
            served = explorer(tmp_path, *options, MESHMEND_SECRET=SECRET)
            found = stack.enter_context(browsed(chromium, stack.enter_context(served)))
            says(found, "gathering")

        says(found, "The job does not answer, and is asked again: nobody answers")
        with served_coordinator("2x3", SECRET.encode(), address):
            says(found, "Job ours: gathering")


@contextmanager
def processes(folder: Path) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Yield what starts a `meshmend` command of a job; none is left at the end."""
    began: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> "subprocess.Popen[bytes]":
        with (folder / "log").open("ab") as log:
            line = [sys.executable, "-m", "meshmend", *command]
            variables = {**os.environ, "MESHMEND_SECRET": SECRET}
            began.append(subprocess.Popen(line, stdout=log, stderr=log, env=variables))
        return began[-1]

    try:
        yield start
    finally:
        for process in began:
            process.kill()
            process.wait(HANG_S)


@pytest.mark.slow
def test_the_chips_answer_for_a_dead_coordinator_and_the_page_says_how_the_job_ended(
    tmp_path: Path, chromium: Any, script: Path
) -> None:
    at = f"127.0.0.1:{free_port()}"
    coordinator = ("coordinator", "--mesh", "1x2", "--board", "1x1", "--listen", at)
    with processes(tmp_path) as start, ExitStack() as pages:
        first = start(*coordinator)
        worker = ("worker", "--mesh", "1x2", "--coordinator", at, "--board", "1x1", "--chip")
        workers = [start(*worker, chip, str(script)) for chip in ("0,0", "0,1")]
        until(lambda: "finished step 1," in (tmp_path / "log").read_text())
        served = explorer(tmp_path, "--coordinator", at, MESHMEND_SECRET=SECRET)
        found = pages.enter_context(browsed(chromium, pages.enter_context(served)))
        says(found, "training")

        first.kill()
        first.wait(HANG_S)
        says(found, "training; the coordinator is away, and chip 0,")
        goes_on(found)
        start(*coordinator)
        until(lambda: "away" not in found.text("#job-title"))
        goes_on(found)
        (tmp_path / "stop").touch()

        assert [process.wait(HANG_S) for process in workers] == [0, 0]
        until(lambda: found.text("#job-title") in {"The job has finished", "Job job: over"})


@pytest.mark.slow
def test_a_local_job_is_shown_through_the_death_of_its_coordinator_to_its_end(
    tmp_path: Path, chromium: Any, script: Path
) -> None:
    need_web_server()
    command = ["run", "--elastic", "--mesh", "1x2", "--explore", str(script)]
    with (
        served_page(*command, folder=tmp_path) as served,
        browsed(chromium, served.address) as found,
    ):
        says(found, "training")
        os.kill(min(forks_of(served.pid)), signal.SIGKILL)  # the coordinator is the first fork
        until(lambda: "the coordinator answers again" in found.text("#job-events"))
        goes_on(found)
        until(lambda: "away" not in found.text("#job-title"))
        (tmp_path / "stop").touch()

        says(found, "The job has finished; its explorer is closed")
        found.problems.clear()  # a browser logs every request that is refused


def forks_of(launcher: int) -> list[int]:
    """Return the processes that were forked from a launcher: its coordinator and its workers."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    own = Path(f"/proc/{launcher}/cmdline").read_bytes()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes() == own]
