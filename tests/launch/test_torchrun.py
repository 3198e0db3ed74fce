"""Workers under two agents of torchrun, one of which is lost and started again."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from planners import is_running
from ports import free_port
from training_script import training_script
from waiting import HANG_S, until

pytest.importorskip("torch")

from meshmend.topology.mesh import Mesh
from meshmend.train.data.audit import audit

# Waits half-way for a file.
SCRIPT = training_script(
    "batch=16, steps=100",
    """
    while job.step_number == 50 and not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    """,
    last=r'os.write(1, f"finished {job.step_number}\n".encode())',
)


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


class TwoAgents:
    """A 2x2 mesh under two agents of torchrun with two workers each, and a coordinator."""

    def __init__(self, folder: Path, rendezvous: str) -> None:
        self._folder, self._rendezvous = folder, rendezvous
        self._port, self._store_port = free_port(), free_port()
        self.gate, self.run_dir = folder / "gate", folder / "run"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "script.py").write_text(SCRIPT)

    def coordinator(self) -> None:
        line = ["meshmend", "coordinator", "--mesh", "2x2", "--board", "1x2"]
        line += ["--listen", f"127.0.0.1:{self._port}", "--set", "timing.holder_timeout=1"]
        self._start("coordinator", [*line, "--set", "timing.heartbeat_timeout=60"])

    def agent(self, node: int, name: str) -> None:
        how = {
            "static": ["--master-addr", "127.0.0.1", "--master-port", f"{self._store_port}"],
            "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._store_port}"],
        }[self._rendezvous]
        line = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *how]
        line += ["--node-rank", str(node), "-m", "meshmend", "worker", "--mesh", "2x2"]
        line += ["--coordinator", f"127.0.0.1:{self._port}", "--board", "1x2"]
        line += ["--run-dir", str(self.run_dir), str(self._folder / "script.py"), str(self.gate)]
        self._start(name, line)

    def has_store(self) -> bool:
        """Return whether an agent listens where the agents meet."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._store_port)) == 0

    def lose_host(self, name: str) -> None:
        """Kill an agent and its workers, as a host that is lost."""
        agent = self.running[name]
        for pid in (agent.pid, *children_of(agent.pid)):
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def has_lost_two_chips(self) -> bool:
        """Return whether the coordinator knows; those that wait half-way meet when they go on."""
        return len(set(re.findall(r"chip \(\d, \d\) is gone", self.log("coordinator")))) >= 2

    def log(self, name: str) -> str:
        return (self._folder / name).read_text()

    def all_logs(self) -> str:
        return "".join(f"== {name}\n{self.log(name)}" for name in self.running)

    def close(self) -> None:
        for process in self.running.values():
            for pid in (process.pid, *children_of(process.pid)):
                if process.poll() is None:
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def _start(self, name: str, line: list[str]) -> None:
        environment = {**os.environ, "MESHMEND_SECRET": "only these two agents know it"}
        environment["LOGLEVEL"] = "INFO"  # of torchrun
        with (self._folder / name).open("wb") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", *line], stdout=log, stderr=log, env=environment
            )


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TwoAgents]:
    both = TwoAgents(tmp_path, request.param)
    try:
        yield both
    finally:
        both.close()


def train_on_four_chips(job: TwoAgents) -> None:
    job.coordinator()
    job.agent(0, "agent 0")
    until(job.has_store, why=job.all_logs)  # so that the store is on the first host
    job.agent(1, "agent 1")
    until(lambda: "all 4 chips have finished" in job.log("coordinator"), why=job.all_logs)


def lose_and_restart(job: TwoAgents, node: int) -> None:
    """Train on four chips, lose the host of an agent, and start its command again."""
    train_on_four_chips(job)
    job.lose_host(f"agent {node}")
    until(job.has_lost_two_chips, why=job.all_logs)
    job.agent(node, "again")


def check_finished(job: TwoAgents) -> None:
    """Let a job finish whose second agent was started again; check that no sample was lost."""
    until(lambda: job.log("coordinator").count("connected, 4 of 4") == 2, why=job.all_logs)
    job.gate.touch()
    codes = [job.running[name].wait(HANG_S) for name in ("coordinator", "agent 0", "again")]
    assert codes == [0, 0, 0], job.all_logs()
    assert job.log("agent 0").count("finished 100") == 2
    assert job.log("again").count("finished 100") == 2
    found = audit(job.run_dir / "ledger")
    assert (found.steps, found.used, found.lost, found.repeated) == (100, 1600, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["static"], indirect=True)
def test_a_host_that_was_lost_joins_again_with_a_static_rendezvous(job: TwoAgents) -> None:
    lose_and_restart(job, 1)
    check_finished(job)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["static"], indirect=True)
def test_torchrun_ends_the_host_of_a_worker_that_dies(job: TwoAgents) -> None:
    train_on_four_chips(job)
    workers = children_of(job.running["agent 1"].pid)
    os.kill(workers[0], signal.SIGKILL)

    assert job.running["agent 1"].wait(HANG_S) == 1
    assert not any(map(is_running, workers))
    until(job.has_lost_two_chips, why=job.all_logs)
    job.agent(1, "again")
    check_finished(job)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["c10d"], indirect=True)
def test_an_elastic_rendezvous_restarts_the_workers_that_survived(job: TwoAgents) -> None:
    """Torchrun does that for its own sake; here it loses the state that the survivors hold."""
    lose_and_restart(job, 1)

    until(lambda: "will restart worker group" in job.log("agent 0"), why=job.all_logs)
    gone = [f"chip {chip} is gone" for chip in Mesh((2, 2)).live]
    until(lambda: all(each in job.log("coordinator") for each in gone), why=job.all_logs)
