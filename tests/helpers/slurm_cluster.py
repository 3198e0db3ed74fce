"""A Slurm cluster of several nodes on this machine: munged, slurmctld, and a slurmd per node.

Everything is in one folder, listens on loopback, and runs as the user of the test. A node is its
slurmd and the processes whose environment names it; to kill a node is to kill all of them.
"""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ports import free_port
from waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
HOW_TO_INSTALL = "apt-get install --no-install-recommends slurm-wlm munge"

_NODE = "ENGINE_NODE"  # in the environment of a slurmd, and so of the steps that it starts

_CONFIGURATION = """
ClusterName=engines
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
MessageTimeout=5
TCPTimeout=1
KillWait=5
InactiveLimit=0
MinJobAge=300
SlurmdTimeout={timeout}
SlurmctldTimeout=30
PropagateResourceLimits=NONE
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=graceful Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=15
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def require_slurm() -> None:
    """Skip the test, with one line that says what to install, if Slurm is not there."""
    missing = [name for name in PROGRAMS if _program(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}; install Slurm: {HOW_TO_INSTALL}")


@dataclass
class SlurmCluster:
    """A running cluster; `environment` is that of its clients."""

    folder: Path
    environment: dict[str, str]
    nodes: tuple[str, ...]
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, *command: str | Path) -> str:
        """Run a client of Slurm, such as sbatch; return what it prints."""
        done = subprocess.run(
            [str(word) for word in command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._start(node, "slurmd", "-D", "-N", node, **{_NODE: node})

    def kill_node(self, node: str) -> float:
        """Kill the slurmd of a node and all processes on it; return when."""
        pids = self.processes_of(node)
        now = time.monotonic()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._daemons[node].wait()
        return now

    def processes_of(self, node: str, command: str = "") -> list[int]:
        """Return the processes on a node whose command line contains a text."""
        names = (f"{_NODE}={node}".encode(), f"SLURMD_NODENAME={node}".encode())
        folder = f"SLURM_CONF={self.folder}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                is_ours = any(each.startswith(folder) for each in variables)
                if is_ours and any(name in variables for name in names) and command in line:
                    found.append(int(entry.name))
        return found

    def job(self, number: str) -> dict[str, str]:
        """Return what slurmctld knows about a job."""
        words = self.run("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def requeue(self, number: str) -> float:
        """Requeue a job; return when its next attempt may begin."""
        self.run("scontrol", "requeue", number)
        return self.release(number)

    def preempt(self, number: str) -> float:
        """Preempt a job by an urgent one that takes all nodes; return when it may begin again."""
        urgent = ("--partition=urgent", f"--nodes={len(self.nodes)}", "--exclusive")
        taking = self.run("sbatch", "--parsable", "--output=none", *urgent, "--wrap=sleep 600")
        until(lambda: self.job(taking.strip())["JobState"] == "RUNNING")
        self.run("scancel", taking.strip())
        return self.release(number)

    def release(self, number: str) -> float:
        """Let a requeued job begin as soon as it can, not in two minutes; return when."""
        until(lambda: self.job(number)["JobState"] == "PENDING", why=lambda: str(self.job(number)))
        self.run("scontrol", "update", f"JobId={number}", "StartTime=now")
        return time.monotonic()

    def end(self, number: str) -> dict[str, str]:
        """Return what slurmctld knows about a job once it has ended."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY")
        until(lambda: self.job(number)["JobState"] in over, why=lambda: str(self.job(number)))
        return self.job(number)

    def _start(self, name: str, program: str, *arguments: str, **variables: str) -> None:
        path = _program(program)
        assert path is not None
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [path, *arguments],
                env={**self.environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _start_all(self) -> None:
        socket_file = self.folder / "munge.socket"
        files = {
            "key-file": "munge.key",
            "log-file": "munge.log",
            "pid-file": "munge.pid",
            "seed-file": "munge.seed",
            "socket": "munge.socket",
        }
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *options)
        until(socket_file.exists, why=self._logs)
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in self.nodes:
            self.start_node(node)
        for node in self.nodes:
            until(lambda node=node: self._is_idle(node), why=self._logs)  # type: ignore[misc]

    def _is_idle(self, node: str) -> bool:
        command = ["sinfo", "--noheader", "--nodes", node, "--format=%T"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout.strip() == "idle"

    def _logs(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out"))
        )

    def _stop_all(self) -> None:
        for node in self.nodes:
            for pid in self.processes_of(node):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()


@contextmanager
def slurm_cluster(
    folder: Path, *, n_nodes: int = 4, n_cpus: int = 8, timeout_s: int = 300
) -> Iterator[SlurmCluster]:
    """Yield a cluster of this many nodes, each with this many CPUs in name.

    slurmctld counts a node as down after `timeout_s` without an answer of its slurmd.
    """
    nodes = tuple(f"n{number}" for number in range(n_nodes))
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    for node in nodes:
        (folder / "spool" / node).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    lines = [
        f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 "
        f"Port={free_port()} CPUs={n_cpus} State=UNKNOWN"
        for node in nodes
    ]
    text = _CONFIGURATION.format(
        host=socket.gethostname(),
        port=free_port(),
        user=getpass.getuser(),
        folder=folder,
        timeout=timeout_s,
        nodes="\n".join(lines),
    )
    (folder / "slurm.conf").write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    cluster = SlurmCluster(folder, environment, nodes)
    try:
        cluster._start_all()
        yield cluster
    finally:
        cluster._stop_all()


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
