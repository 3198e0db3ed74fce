"""A coordinator that is cut off from its members: real hosts, of which only the network is cut."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbeds import require_testbed
from training_script import training_script
from waiting import HANG_S, until

pytest.importorskip("torch")

from meshmend.lab.testbed.bed import Testbed
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.train.data.audit import audit

HERE, NEAR, FAR = (0, 0), (0, 1), (0, 2)  # the coordinator's host, and two with a chip each
CUT = (HERE, NEAR), (NEAR, HERE)
N_STEPS = 600
# Writes down when it stepped; one that is paced would step on for minutes.
SCRIPT = training_script(
    f"batch=16, steps={N_STEPS}, saving=Saving(Path(sys.argv[1]), every=10)",
    """
    if counts:
        os.write(1, f"{job.step_number} {time.monotonic()}\\n".encode())
    time.sleep(float(sys.argv[2]))
    """,
)


class CutJob:
    """A job of two chips on hosts of their own, and whatever is started later."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        self._endpoint = f"{bed.address(HERE)}:7000"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "script.py").write_text(SCRIPT)

    def start_coordinator(self) -> None:
        record = self.folder / "record.json"
        self._start(
            "coordinator", HERE, "coordinator", "--listen", self._endpoint, "--state", record,
            "--set", "timing.heartbeat_timeout=1", "--set", "timing.holder_timeout=4",
        )  # fmt: skip

    def start_worker(self, name: str, host: Chip, chip: Chip, *, pace_s: float) -> None:
        self._start(
            name, host, "worker", "--coordinator", self._endpoint, "--chip", f"{chip[0]},{chip[1]}",
            "--run-dir", self.folder / "run", self.folder / "script.py",
            self.folder / "checkpoints", pace_s,
        )  # fmt: skip

    def said(self) -> str:
        return "".join(f"== {name}\n{self._log(name, 'err').read_text()}" for name in self._running)

    def steps_of(self, *names: str) -> list[tuple[float, int]]:
        """Return when these workers finished steps, and which."""
        lines = [line for name in names for line in self._log(name, "out").read_text().splitlines()]
        return sorted((float(line.split()[1]), int(line.split()[0])) for line in lines)

    def end_of(self, *names: str) -> list[int]:
        return [self._running[name].wait(HANG_S) for name in names]

    def kill(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def _start(self, name: str, host: Chip, command: str, *arguments: object) -> None:
        line = [sys.executable, "-m", "meshmend", command, "--mesh", "1x2", "--board", "1x1"]
        with self._log(name, "out").open("wb") as out, self._log(name, "err").open("wb") as err:
            self._running[name] = subprocess.Popen(
                self.bed.command(host, [*line, *map(str, arguments)]),
                stdout=out,
                stderr=err,
                env={**os.environ, "MESHMEND_SECRET": "what all hosts of this test know"},
            )

    def _log(self, name: str, kind: str) -> Path:
        return self.folder / f"{name}.{kind}"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CutJob]:
    require_testbed()
    monkeypatch.setenv("MESHMEND_TESTBED_DIR", str(tmp_path / "records"))
    with Testbed.up(Mesh((1, 3)), link_bandwidth=200e6 / 8) as bed:
        made = CutJob(bed, tmp_path)
        try:
            yield made
        finally:
            made.kill()


@pytest.mark.slow
def test_members_that_are_cut_off_from_their_coordinator_stop_before_it_restores_elsewhere(
    job: CutJob,
) -> None:
    """They see each other, so nothing else would stop them: there would be two histories."""
    job.start_coordinator()
    job.start_worker("first", NEAR, (0, 0), pace_s=0.1)
    job.start_worker("second", FAR, (0, 1), pace_s=0.1)
    until(lambda: len(job.steps_of("first", "second")) > 50, why=job.said)

    for source, goal in CUT:
        job.bed.drop(source, goal)
    job.start_worker("third", HERE, (0, 0), pace_s=0.0)
    job.start_worker("fourth", HERE, (0, 1), pace_s=0.0)
    assert job.end_of("third", "fourth") == [0, 0], job.said()
    for source, goal in CUT:
        job.bed.pass_again(source, goal)

    old, new = job.steps_of("first", "second"), job.steps_of("third", "fourth")
    assert new, job.said()
    assert old[-1][0] < new[0][0], "not a step of theirs after the first one elsewhere"
    assert new[0][1] > 10, "from a checkpoint, not from the beginning"
    assert (old[-1][1] < N_STEPS, new[-1][1]) == (True, N_STEPS)
    found = audit(job.folder / "run" / "ledger")
    assert (found.steps, found.lost, found.repeated, found.split) == (N_STEPS, 0, 0, ())
