"""Hosts without a shared folder, with clocks of their own, that reboot with an empty disk."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from separate_hosts import Host, booted_hosts, real_clock_ahead
from testbeds import require_testbed
from training_script import training_script
from waiting import HANG_S, until

pytest.importorskip("torch")

from meshmend.lab.testbed.bed import Testbed
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.train.data.audit import audit
from meshmend.train.state.checkpoint import newest_complete, steps_in

# Waits at two steps for a file on the disk of its host.
SCRIPT = training_script(
    "batch=16, steps=int(sys.argv[2]), saving=Saving(disk / 'checkpoints', every=10)",
    """
    while job.step_number in (40, 70) and not (disk / f"gate-{job.step_number}").exists():
        select.select([], [], [], 0.02)  # under faketime, time.sleep fails now and then
    """,
    first="disk = Path(sys.argv[1])",
    last=r"""
    os.write(1, f"finished {job.step_number} {job.loss:.6f} at {time.time():.0f}\n".encode())
    """,
)
N_STEPS = 100
CHIPS = Mesh((2, 2)).live


class FourHosts:
    """A job on a 2x2 mesh, one host per chip; the coordinator is on the first host."""

    def __init__(self, hosts: dict[Chip, Host], endpoint: str, script: Path) -> None:
        self.hosts, self._endpoint, self._script = hosts, endpoint, script
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.coordinator = ""  # the name of the last one
        self.worker_of: dict[Chip, str] = {}  # the names of the last ones
        self.hours: dict[Chip, int] = {}

    def start_coordinator(self) -> None:
        host = self.hosts[0, 0]
        self.coordinator = f"coordinator {len(self.running)}"
        line = ["coordinator", "--mesh", "2x2", "--board", "1x1", "--listen", self._endpoint]
        line += ["--state", f"{host.disk}/record.json", "--set", "timing.heartbeat_timeout=60"]
        self._start(host, self.coordinator, line)

    def start_worker(self, chip: Chip) -> None:
        host = self.hosts[chip]
        self.worker_of[chip] = f"worker {chip} {len(self.running)}"
        line = ["worker", "--mesh", "2x2", "--board", "1x1", "--coordinator", self._endpoint]
        line += ["--chip", ",".join(map(str, chip)), "--run-dir", f"{host.disk}/run"]
        line += [str(self._script), str(host.disk), str(N_STEPS)]
        self._start(host, self.worker_of[chip], line)

    def _start(self, host: Host, name: str, line: list[str]) -> None:
        prefix = real_clock_ahead(self.hours, host.chip) if self.hours else ()
        secret = {"MESHMEND_SECRET": "what all hosts of this test know"}
        self.running[name] = host.start(name, *line, prefix=prefix, **secret)

    def said(self) -> str:
        """Return what the last coordinator has printed."""
        return self.hosts[0, 0].log(self.coordinator)

    def all_said(self) -> str:
        return "".join(f"== {name}\n{self.hosts[0, 0].log(name)}" for name in self.running)

    def wait_until_connected(self, times: int) -> None:
        def are_connected() -> bool:
            return self.said().count("connected, 4 of 4") >= times

        until(are_connected, why=self.all_said)

    def open_gate(self, step: int) -> None:
        for host in self.hosts.values():
            host.on_disk(f"gate-{step}").touch()

    def end(self) -> list[int]:
        """Return the exit codes of the last coordinator and the last workers."""
        names = [self.coordinator, *self.worker_of.values()]
        return [self.running[name].wait(HANG_S) for name in names]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FourHosts]:
    require_testbed()
    monkeypatch.setenv("MESHMEND_TESTBED_DIR", str(tmp_path / "records"))
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "script.py").write_text(SCRIPT)
    with Testbed.up(Mesh((2, 2)), link_bandwidth=200e6 / 8) as bed:
        endpoint = f"{bed.address((0, 0))}:7000"
        with booted_hosts(bed, CHIPS, tmp_path) as hosts:
            four = FourHosts(hosts, endpoint, tmp_path / "script.py")
            yield four
        for process in four.running.values():
            process.kill()
            process.wait()


def check_ledgers(job: FourHosts, folder: Path) -> None:
    """Collect the ledgers of all hosts into a folder: every sample was used once."""
    for host in job.hosts.values():
        host.collect("run/ledger", folder)
    found = audit(folder)
    assert (found.steps, found.used) == (N_STEPS, N_STEPS * 16), job.all_said()
    assert (found.lost, found.repeated) == (0, 0)
    assert found.hashed > 0
    assert not found.split


@pytest.mark.slow
def test_hosts_without_a_shared_folder_survive_reboots_with_empty_disks(
    job: FourHosts, tmp_path: Path
) -> None:
    """First a host with a worker, then the host that has a worker, the coordinator and its record.

    Their monotonic clocks are hours apart, as the clocks of real hosts are.
    """
    ledgers = tmp_path / "ledgers"
    job.start_coordinator()
    for chip in CHIPS:
        job.start_worker(chip)
    until(lambda: "all 4 chips have finished step 1," in job.said(), why=job.all_said)

    job.hosts[1, 0].lose_power("run/ledger", ledgers)
    until(lambda: "chip (1, 0) is gone" in job.said(), why=job.all_said)
    job.hosts[1, 0].boot()
    assert not job.hosts[1, 0].on_disk("run").exists()
    job.start_worker((1, 0))
    job.wait_until_connected(times=2)
    job.open_gate(40)
    until(lambda: re.findall(r": (\d) chips from", job.said()) == ["4", "3", "4"], why=job.all_said)

    job.hosts[0, 0].lose_power("run/ledger", ledgers)
    job.hosts[0, 0].boot()
    job.start_coordinator()
    job.start_worker((0, 0))
    job.wait_until_connected(times=1)
    job.open_gate(70)

    assert job.end() == [0] * 5, job.all_said()
    check_ledgers(job, ledgers)
    last = {job.hosts[chip].log(job.worker_of[chip]).splitlines()[-1] for chip in CHIPS}
    assert len({line.rpartition(" at ")[0] for line in last}) == 1
    check_checkpoints(job)


def check_checkpoints(job: FourHosts) -> None:
    """No host has a complete checkpoint, none says that it has one, and the user is told why."""
    for host in job.hosts.values():
        assert len(steps_in(host.on_disk("checkpoints"))) > 1
        assert newest_complete(host.on_disk("checkpoints")) is None
    told = re.findall(r"cannot write a whole checkpoint: .*", job.all_said())
    assert told
    assert all(re.search(r"it has 1 of [34] shards; shard-", line) for line in told), told
    assert all("all hosts must see this folder" in line for line in told), told


@pytest.mark.slow
def test_hosts_whose_clocks_are_hours_apart_train_through_a_death(
    job: FourHosts, tmp_path: Path
) -> None:
    job.hours = {(0, 0): 0, (0, 1): 7, (1, 0): -30, (1, 1): 1}
    ledgers = tmp_path / "ledgers"
    job.start_coordinator()
    for chip in CHIPS:
        job.start_worker(chip)
    until(lambda: "all 4 chips have finished step 1," in job.said(), why=job.all_said)
    job.hosts[0, 1].lose_power("run/ledger", ledgers)
    job.hosts[0, 1].boot()
    job.start_worker((0, 1))
    job.wait_until_connected(times=2)
    job.open_gate(40)
    job.open_gate(70)

    assert job.end() == [0] * 5, job.all_said()
    check_ledgers(job, ledgers)
    ends = {
        chip: int(job.hosts[chip].log(job.worker_of[chip]).split()[-1]) - 3600 * job.hours[chip]
        for chip in CHIPS
    }
    assert max(ends.values()) - min(ends.values()) < 600, ends
    waits = re.findall(r"finished step \d+, ([\d.]+) (m?s) after", job.said())
    assert waits
    assert all(float(number) < 600 for number, unit in waits if unit == "s"), job.said()
