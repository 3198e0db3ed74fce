"""Strangers at every port: what thousands of connections without the secret do to a job's steps.

A job trains on a line of chips. After a while every port of the job, the coordinator's and each
worker's, gets so many connections a second that say nothing. Meanwhile one chip is killed and
repaired: its replacement must be admitted. Prints the steps before and during the flood.

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
from pathlib import Path

from meshmend.launch.one_thread import compute_in_one_thread

compute_in_one_thread()

from meshmend.faults.fault import parse_fault  # noqa: E402  # after torch has one thread
from meshmend.launch.training import Training, train  # noqa: E402
from meshmend.membership.events import FaultRecovered, StepFinished, TimedEvent  # noqa: E402
from meshmend.planning.settings import Settings  # noqa: E402
from meshmend.topology.text import parse_mesh  # noqa: E402
from meshmend.workloads.registry import workload  # noqa: E402
from record import record  # noqa: E402

CALM_S = 15.0  # from the first step until the flood
_LISTEN = "0A"  # in /proc/net/tcp


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="1x3")
    parser.add_argument("--per-port", type=int, default=5000, help="connections on each port")
    parser.add_argument("--seconds", type=float, default=10.0, help="in which they come")
    options = parser.parse_args()
    watch = Watch(options.per_port, options.seconds)
    mesh = parse_mesh(options.mesh)
    middle = CALM_S + options.seconds / 2
    inject = (f"kill 0,0 at {middle - 2:g}s", f"repair 0,0 at {middle:g}s")
    with tempfile.TemporaryDirectory() as folder:
        train(
            Training(
                workload=workload("resnet", "tiny", norm="group"),
                settings=Settings(mesh),
                run_dir=Path(folder) / "run",
                steps=10**9,
                faults=tuple(parse_fault(text, mesh) for text in inject),
                for_s=CALM_S + options.seconds + 5.0,
            ),
            watch.hear,
        )
    return watch.verdict(options.mesh)


class Watch:
    """Follows a job, and floods it when its time has come."""

    def __init__(self, per_port: int, seconds: float) -> None:
        self._per_port, self._seconds = per_port, seconds
        self._steps: list[float] = []
        self._flood: tuple[float, float] | None = None
        self._recovered: dict[str, float | None] = {}
        self._n_called = 0
        self._n_ports = 0
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
                self._call_all(_ports(os.getppid()))
                os._exit(0)
            self._n_ports = len(_ports(os.getpid()))
            self._n_called = self._per_port * self._n_ports
            threading.Thread(target=os.waitpid, args=(pid, 0), daemon=True).start()

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

    def verdict(self, mesh: str) -> int:
        """Print and keep what came out; return 0 if the job held."""
        assert self._flood is not None, "the job ended before the flood"
        begin, end = self._flood
        gaps = list(zip(self._steps, self._steps[1:], strict=False))
        before = [after - at for at, after in gaps if at > 3.0 and after < begin]
        during = [after - at for at, after in gaps if begin <= at < end]
        median, worst = statistics.median(before), sorted(during)[-4:]
        result = {
            "mesh": mesh,
            "ports": self._n_ports,
            "connections_a_port": self._per_port,
            "seconds": self._seconds,
            "median_step_before_s": round(median, 4),
            "worst_step_before_s": round(max(before), 4),
            "median_step_during_s": round(statistics.median(during), 4),
            "steps_during": len(during),
            "ratio_of_medians": round(statistics.median(during) / median, 3),
            "longest_gaps_during_s": [round(gap, 3) for gap in worst],
            "recovered_s": self._recovered,
        }
        for name, value in result.items():
            print(f"{name:24} {value}")
        print(f"written to {record('flood', result)}")
        return 0 if all(self._recovered.values()) and len(self._recovered) == 2 else 1


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
