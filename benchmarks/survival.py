"""How long a job stands still when a link, a part of the mesh or the coordinator falls silent.

    python benchmarks/survival.py [--runs 3]

| case | what happens | asked |
| --- | --- | --- |
| drop | a link drops all packets of one direction; nobody is told | 2 x link timeout |
| partition | a chip is cut off from all others, the coordinator included, for 15 s | 3 s after |
| freeze | the coordinator is stopped (SIGSTOP), and a chip is killed | 2 x heartbeat timeout |

`drop` and `partition` run a coordinator and four workers on the hosts of a testbed; they need what
`meshmend testbed` needs. `freeze` runs `meshmend train`, whose launcher replaces the coordinator.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from meshmend.config import SECRET
from meshmend.errors import MeshmendError
from meshmend.lab.testbed.bed import Testbed
from meshmend.launch.worker import compute_in_one_thread
from meshmend.topology.failures import Chip
from meshmend.topology.text import parse_mesh
from record import record

MESH = parse_mesh("2x2")
LINK_TIMEOUT_S = HEARTBEAT_TIMEOUT_S = 2.0
ASKED_S = {
    "drop": 2 * LINK_TIMEOUT_S,
    "partition": 3.0,
    "freeze": 2 * HEARTBEAT_TIMEOUT_S,
}
_PARTITION_S = 15.0
_STEADY_S = 4.0  # of training before something happens
_STEADY_STEPS = 20
_HANG_S = 120.0

# Trains for ever and writes down when each step was finished.
_SCRIPT = """
import os, sys, time, torch
from meshmend.train import Job

torch.manual_seed(0)
inputs = torch.randn(500, 8)
dataset = torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(8, 1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
times = open(sys.argv[1], "a", buffering=1)
for inputs, labels in (job := Job(model, optimizer, dataset, batch=16, steps=10**6)):
    loss = torch.nn.functional.mse_loss(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    job.step(loss)
    print(time.monotonic(), file=times)
    time.sleep(0.02)
"""


class HostJob:
    """A job on the hosts of a testbed; each worker writes down when it finished a step."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self._bed, self._folder = bed, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "script.py").write_text(_SCRIPT)
        listen = f"{bed.address((0, 0))}:7000"
        board = ("--mesh", str(MESH), "--board", "1x1")
        self._start((0, 0), "coordinator", *board, "--listen", listen)
        for chip in MESH.live:
            name = ",".join(map(str, chip))
            what = (str(folder / "script.py"), str(self._times(chip)))
            self._start(chip, "worker", *board, "--coordinator", listen, "--chip", name, *what)

    def _start(self, chip: Chip, *line: str) -> None:
        argv = self._bed.command(chip, [sys.executable, "-m", "meshmend", *line])
        log = self._folder / f"{line[0]}-{'-'.join(map(str, chip))}.log"
        with log.open("wb") as stream:
            self._processes.append(subprocess.Popen(argv, stdout=stream, stderr=stream))

    def _times(self, chip: Chip) -> Path:
        return self._folder / f"times-{'-'.join(map(str, chip))}"

    def steps_of(self, chip: Chip) -> list[float]:
        """Return when a chip finished its steps."""
        path = self._times(chip)
        lines = path.read_text().splitlines() if path.exists() else []
        return [float(line) for line in lines]

    def _steps_steadily(self, chip: Chip, after: float) -> bool:
        return sum(at > after for at in self.steps_of(chip)) > _STEADY_STEPS

    def goes_on(self, chips: tuple[Chip, ...], after: float) -> float:
        """Wait until chips step steadily again; return when the last of them had stepped again."""
        ends = []
        for chip in chips:
            await_true(partial(self._steps_steadily, chip, after))
            times = [after, *(at for at in self.steps_of(chip) if at > after)]
            gaps = [(later - at, later) for at, later in pairwise(times)]
            ends.append(max(gaps)[1])  # the end of the longest pause
        return max(ends)

    def close(self) -> None:
        """Kill what runs."""
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def await_true(is_true: Callable[[], bool]) -> None:
    """Return when something is true.

    Raises:
        TimeoutError: it does not become true.
    """
    until = time.monotonic() + _HANG_S
    while not is_true():
        if time.monotonic() > until:
            raise TimeoutError(f"nothing for {_HANG_S:g} s")
        time.sleep(0.05)


@contextmanager
def training() -> Iterator[tuple[Testbed, HostJob]]:
    """Yield a testbed, and a job on it that has been stepping for a while."""
    os.environ[SECRET.name] = os.urandom(16).hex()
    with (
        tempfile.TemporaryDirectory() as folder,
        Testbed.up(MESH, link_bandwidth=25e6) as bed,
    ):
        job = HostJob(bed, Path(folder))
        try:
            await_true(lambda: all(job.steps_of(chip) for chip in MESH.live))
            time.sleep(_STEADY_S)
            yield bed, job
        finally:
            job.close()


def drop() -> float:
    """Return how long until all chips step again after a link drops packets one way."""
    with training() as (bed, job):
        began = time.monotonic()
        bed.drop((1, 0), (1, 1))
        time.sleep(2 * LINK_TIMEOUT_S)
        return job.goes_on(MESH.live, began) - began


def partition() -> float:
    """Return how long after its links pass packets again a chip has stepped."""
    lonely: Chip = (1, 1)
    with training() as (bed, job):
        ways = [(lonely, other) for other in MESH.neighbors(lonely)]
        ways += [(other, lonely) for _, other in ways]
        for way in ways:
            bed.drop(*way)
        time.sleep(_PARTITION_S)
        for way in ways:
            bed.pass_again(*way)
        healed = time.monotonic()
        await_true(lambda: any(at > healed for at in job.steps_of(lonely)))
        return min(at for at in job.steps_of(lonely) if at > healed) - healed


def freeze() -> float:
    """Return how long until a job goes on whose coordinator is frozen when a chip is killed."""
    from meshmend.config import (
        JobConfig,
        LocalConfig,
        RunConfig,
        SavingConfig,
        Timing,
        TrainingConfig,
    )
    from meshmend.lab.workloads.registry import workload
    from meshmend.launch.training import train
    from meshmend.membership.events import FaultRecovered, TimedEvent
    from meshmend.topology.text import mesh_config

    recovered: dict[str, float | None] = {}

    def hear(timed: TimedEvent) -> None:
        if isinstance(timed.event, FaultRecovered):
            recovered[timed.event.fault] = timed.event.recovered_s

    inject = ("freeze coordinator at 5s for 600s", "kill 0,1 at 5.1s")
    with tempfile.TemporaryDirectory() as folder:
        train(
            workload("resnet", "tiny", norm="group"),
            JobConfig(
                mesh=mesh_config(MESH),
                job=RunConfig(run_dir=f"{folder}/run"),
                training=TrainingConfig(steps=10**9),
                saving=SavingConfig(every=0),
                local=LocalConfig(inject=inject),
                timing=Timing(heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S),
            ),
            hear,
            for_s=20.0,
        )
    found = recovered.get("kill 0,1")
    if found is None:
        raise TimeoutError("the job did not recover from the kill")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--case", action="append", choices=sorted(ASKED_S), help="only this")
    options = parser.parse_args()
    compute_in_one_thread()
    cases = {"drop": drop, "partition": partition, "freeze": freeze}
    results: dict[str, object] = {}
    for name in options.case or cases:
        try:
            found = [cases[name]() for _ in range(options.runs)]
        except (MeshmendError, TimeoutError) as error:
            print(f"{name:10} failed: {error}")
            results[name] = {"failed": str(error)}
            continue
        worst, asked = max(found), ASKED_S[name]
        verdict = "met" if worst <= asked else "missed"
        words = ", ".join(f"{each:.2f}" for each in found)
        print(f"{name:10} {words} s; median {median(found):.2f} s, asked {asked:g} s: {verdict}")
        results[name] = {"seconds": [round(each, 3) for each in found], "asked_s": asked}
    print(f"written to {record('survival', results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
