"""Strangers at every port: what thousands of connections without the secret do to a job's steps.

A job trains on a line of chips. After a while every port of the job, the coordinator's and each
worker's, gets so many connections a second that say nothing. Meanwhile one chip is killed and
repaired: its replacement must be admitted. Prints the steps before and during the flood, beside the
same job without a flood: the kill, the repair and other work of the machine slow steps too.

The callers run on this machine. If the workers' steps take all its processors, they slow each other
down. With --wait-ms each sample waits for so long without a processor, as for an accelerator.

    python benchmarks/flood.py --per-port 5000 --seconds 10
"""

import argparse
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from meshmend.config import (
    JobConfig,
    LocalConfig,
    MeshConfig,
    RunConfig,
    SavingConfig,
    TrainingConfig,
)
from meshmend.launch.worker import compute_in_one_thread

compute_in_one_thread()

import torch  # noqa: E402

from meshmend.lab.workloads.registry import workload  # noqa: E402
from meshmend.lab.workloads.trainable import SampleSet  # noqa: E402
from meshmend.launch.training import train  # noqa: E402
from meshmend.membership.events import FaultRecovered, StepFinished, TimedEvent  # noqa: E402
from record import record  # noqa: E402

CALM_S = 15.0  # from the first step until the flood
_LISTEN = "0A"  # in /proc/net/tcp


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="1x3")
    parser.add_argument("--per-port", type=int, default=5000, help="connections on each port")
    parser.add_argument("--seconds", type=float, default=10.0, help="in which they come")
    parser.add_argument("--wait-ms", type=float, default=0.0, help="per sample, as an accelerator")
    options = parser.parse_args()
    results = {
        name: _trained(options.mesh, n_calls, options.seconds, options.wait_ms / 1e3)
        for name, n_calls in (("without", 0), ("with", options.per_port))
    }
    for key in results["with"]:
        print(f"{key:24} " + "   ".join(f"{name} {each[key]}" for name, each in results.items()))
    name = "flood-waiting" if options.wait_ms else "flood"
    print(f"written to {record(name, {**vars(options), **results})}")
    return 0 if all(each["recovered"] for each in results.values()) else 1


class WaitingSamples:
    """A data set whose samples take some time to get, and no processor."""

    def __init__(self, dataset: SampleSet, wait_s: float) -> None:
        self._dataset, self._wait_s = dataset, wait_s

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, ...]:
        time.sleep(self._wait_s)
        return self._dataset[index]


def _trained(mesh_text: str, per_port: int, seconds: float, wait_s: float) -> dict[str, object]:
    """Return how the steps of a job went that gets so many calls on each port."""
    watch = Watch(per_port, seconds)
    middle = CALM_S + seconds / 2
    inject = (f"kill 0,0 at {middle - 2:g}s", f"repair 0,0 at {middle:g}s")
    model = workload("resnet", "tiny", norm="group")
    if wait_s:
        model = replace(model, dataset=WaitingSamples(model.dataset, wait_s))
    with tempfile.TemporaryDirectory() as folder:
        train(
            model,
            JobConfig(
                mesh=MeshConfig(shape=mesh_text),
                job=RunConfig(run_dir=f"{folder}/run"),
                training=TrainingConfig(steps=10**9),
                saving=SavingConfig(every=0),
                local=LocalConfig(inject=inject),
            ),
            watch.hear,
            for_s=CALM_S + seconds + 5.0,
        )
    return watch.result()


class Watch:
    """Follows a job, and floods it when its time has come."""

    def __init__(self, per_port: int, seconds: float) -> None:
        self._per_port, self._seconds = per_port, seconds
        self._steps: list[float] = []
        self._flood: tuple[float, float] | None = None
        self._recovered: dict[str, float | None] = {}
        self._n_ports = 0
        self._called_s = float("inf")
        self._started = False

    def hear(self, timed: TimedEvent) -> None:
        """Take in an event of the run."""
        if isinstance(timed.event, FaultRecovered):
            self._recovered[timed.event.fault] = timed.event.recovered_s
        if not isinstance(timed.event, StepFinished):
            return
        self._steps.append(timed.t)
        if not self._started and timed.t > CALM_S:
            self._started = True
            self._flood = timed.t, timed.t + self._seconds
            pid = os.fork()  # calls from a process of its own, as a stranger does
            if pid == 0:
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
                self._call_all(_ports(os.getppid()))
                os._exit(0)
            self._n_ports = len(_ports(os.getpid()))
            threading.Thread(target=self._await_caller, args=(pid,), daemon=True).start()

    def _await_caller(self, pid: int) -> None:
        began = time.monotonic()
        os.waitpid(pid, 0)
        self._called_s = time.monotonic() - began

    def _call_all(self, ports: list[int]) -> None:
        kept: list[socket.socket] = []
        began = time.monotonic()
        for number in range(self._per_port):
            for port in ports:
                caller = socket.socket()
                caller.setblocking(False)
                caller.connect_ex(("127.0.0.1", port))
                kept.append(caller)
            while len(kept) > 500:
                kept.pop(0).close()
            ahead_s = number * self._seconds / self._per_port - (time.monotonic() - began)
            if ahead_s > 0:
                time.sleep(ahead_s)

    def result(self) -> dict[str, object]:
        """Return what came out."""
        assert self._flood is not None, "the job ended before the flood"
        begin, end = self._flood
        gaps = list(zip(self._steps, self._steps[1:], strict=False))
        median = statistics.median(after - at for at, after in gaps if at > 3.0 and after < begin)
        ratios = sorted((after - at) / median for at, after in gaps if begin <= at < end)
        return {
            "ports": self._n_ports,
            "called_within_s": round(self._called_s, 2),
            "median_step_before_s": round(median, 4),
            "median_during": round(statistics.median(ratios), 3),
            "steps_during": len(ratios),
            # The two slowest are the recoveries.
            "slowest": [round(ratio, 2) for ratio in ratios[-6:]],
            "above_2": sum(ratio > 2 for ratio in ratios[:-2]),
            "recovered_s": self._recovered,
            "recovered": len(self._recovered) == 2 and all(self._recovered.values()),
        }


def _ports(pid: int) -> list[int]:
    """Return the ports on which a process and its children listen on loopback."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    inodes = set()
    for owner in [str(pid), *children]:
        for link in Path(f"/proc/{owner}/fd").iterdir():
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sorted(
        {int(row[1].split(":")[1], 16) for row in rows if row[3] == _LISTEN and row[9] in inodes}
    )


if __name__ == "__main__":
    sys.exit(main())
