"""The job file of `meshmend submit slurm` under real Slurm: tasks, nodes and the coordinator die.

Every node is a slurmd on this machine. Each worker writes down when it has done a step, so the
times are those of the training itself.
"""

import getpass
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_cluster import SlurmCluster, require_slurm, slurm_cluster
from training_script import training_script
from waiting import until

pytest.importorskip("torch")

from meshmend.train.data.audit import audit

pytestmark = pytest.mark.engines

# A small model on made-up samples, in steps slow enough to be killed in. It trains until the gate
# is open: a busy machine may take minutes for what a test waits for, and who waits admits no chip.
SCRIPT = training_script(
    "batch=16, steps=1_000_000, saving=saving",
    """
    if counts:
        steps.write(f"{time.monotonic()} {job.step_number} {len(job.chips)}\\n")
    time.sleep(0.05)
    if gate.exists():
        job.stop()
    """,
    first="""
    folder, every = Path(sys.argv[1]), int(sys.argv[2])
    saving = Saving(folder / "checkpoints", every=every) if every else None
    steps = (folder / f"steps-{os.environ['MESHMEND_CHIP']}").open("a", buffering=1)
    gate = folder / "gate"
    """,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Eight nodes: the jobs use four, the others are spare."""
    require_slurm()
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), n_nodes=8) as running:
        yield running


@pytest.fixture(autouse=True)
def end_of_jobs(cluster: SlurmCluster) -> Iterator[None]:
    """Cancel the job of a test that failed: it would keep the nodes, and the machine, busy."""
    yield
    cluster.run("scancel", "--user", getpass.getuser())


def meshmend(cluster: SlurmCluster, folder: Path, *words: str) -> str:
    """Run a command of meshmend as a user of the cluster would; return what it prints."""
    command = [sys.executable, "-m", "meshmend", *words]
    done = subprocess.run(
        command, env=cluster.environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_quiet() -> bool:
    """Whether this machine had nothing else to do; only then are times of recoveries checked."""
    return os.getloadavg()[0] < (os.cpu_count() or 1)


class SubmittedJob:
    """A job of `meshmend submit slurm --run`, and what its workers write down."""

    def __init__(
        self, cluster: SlurmCluster, folder: Path, *options: str, save_every: int = 50
    ) -> None:
        self.cluster, self.folder = cluster, folder
        self.run_dir = folder / "run of this job"
        script = folder / "train.py"
        script.write_text(SCRIPT)
        words = [*options, "--run-dir", str(self.run_dir), "--time", "30"]
        words += ["--sbatch", f"--output={folder}/job.out"]
        words += [str(script), str(folder), str(save_every)]
        self.number = meshmend(cluster, folder, "submit", "slurm", "--run", *words).strip()

    @property
    def log(self) -> str:
        path = self.folder / "job.out"
        return path.read_text() if path.exists() else ""

    def steps_of(self, chip: str) -> list[tuple[float, int, int]]:
        """Return when a chip did which step, and how many chips trained."""
        path = self.folder / f"steps-{chip}"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(float(at), int(step), int(n_chips)) for at, step, n_chips in rows]

    def await_step(
        self, chip: str, is_it: Callable[[float, int, int], bool]
    ) -> tuple[float, int, int]:
        """Return the first step of a chip that is so, as soon as there is one."""
        found: list[tuple[float, int, int]] = []

        def look() -> bool:
            found[:] = [row for row in self.steps_of(chip) if is_it(*row)]
            return bool(found)

        until(look, why=lambda: self.log)
        return found[0]

    def await_chips(self, n_chips: int, *, after: float = 0.0) -> float:
        """Return when all chips of the mesh were training together first."""
        return self.await_step("0,0", lambda at, _, count: at > after and count == n_chips)[0]

    def pause_of(self, chips: list[str], n_chips: int, since: float) -> float:
        """Return how long after a kill the last of these chips had stepped with fewer chips."""
        steps = [
            self.await_step(chip, lambda at, _, count: at > since and count < n_chips)
            for chip in chips
        ]
        return max(at for at, *_ in steps) - since

    def finish(self) -> None:
        """Let the job finish; check its exit code, its history and its samples."""
        (self.folder / "gate").touch()
        ended = self.cluster.end(self.number)
        assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), self.log
        found = audit(self.run_dir / "ledger")
        assert (found.lost, found.repeated, found.faults) == (0, 0, ())
        assert found.replicas_equal
        secret = (self.run_dir / "secret").read_text()
        assert secret not in self.log
        assert (self.run_dir / "secret").stat().st_mode & 0o777 == 0o600

    def kill(self, node: str, command: str) -> float:
        """Kill the processes on a node whose command line contains a text; return when."""
        pids = self.cluster.processes_of(node, command)
        assert pids, f"no process on {node} runs {command}"
        now = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return now


@pytest.mark.parametrize(
    ("mesh", "hosts", "chips"),
    [
        ("2x2", "1x1", {"n0": ["0,0"], "n1": ["0,1"], "n2": ["1,0"], "n3": ["1,1"]}),
        (
            "4x4",
            "2x2",
            {
                "n0": ["0,0", "0,1", "1,0", "1,1"],
                "n1": ["0,2", "0,3", "1,2", "1,3"],
                "n2": ["2,0", "2,1", "3,0", "3,1"],
                "n3": ["2,2", "2,3", "3,2", "3,3"],
            },
        ),
    ],
)
def test_a_killed_task_a_killed_node_and_a_killed_coordinator_are_survived(
    cluster: SlurmCluster,
    tmp_path: Path,
    mesh: str,
    hosts: str,
    chips: dict[str, list[str]],
) -> None:
    n_chips = sum(map(len, chips.values()))

    def others(node: str) -> list[str]:
        return [chip for other, some in chips.items() if other != node for chip in some]

    job = SubmittedJob(cluster, tmp_path, "--mesh", mesh, "--hosts", hosts)
    job.await_chips(n_chips)

    killed = job.kill("n1", "meshmend agent")
    task_s = job.pause_of(others("n1"), n_chips, killed)
    task_back_s = job.await_chips(n_chips, after=killed + task_s) - killed

    killed = cluster.kill_node("n2")
    node_s = job.pause_of(others("n2"), n_chips, killed)
    until(lambda: time.monotonic() > killed + 8)
    cluster.start_node("n2")
    returned = time.monotonic()
    node_back_s = (
        job.await_step(chips["n2"][0], lambda at, _, count: at > returned and count == n_chips)[0]
        - returned
    )

    job.kill("n0", "meshmend coordinator")
    until(lambda: job.log.count("listens on") == 2, why=lambda: job.log)
    until(
        lambda: f"connected, {n_chips} of {n_chips}" in job.log.rpartition("listens on")[2],
        why=lambda: job.log,
    )
    killed = job.kill("n3", "meshmend agent")
    last_s = job.pause_of(others("n3"), n_chips, killed)
    job.await_chips(n_chips, after=killed + last_s)
    job.finish()

    print(
        f"\n{mesh} on four nodes: the others step again {task_s:.2f} s after a killed task, "
        f"{node_s:.2f} s after a killed node; the task is back after {task_back_s:.1f} s, the node "
        f"{node_back_s:.1f} s after its return"
    )
    if is_quiet():
        assert task_s < 1
        assert node_s < 3
        assert node_back_s < 15


def test_scancel_ends_everything_within_seconds(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SubmittedJob(cluster, tmp_path, "--mesh", "2x2", "--hosts", "2x1", "--per-chip")
    job.await_chips(4)
    running = [pid for node in cluster.nodes for pid in cluster.processes_of(node, "meshmend")]
    assert len(running) >= 2 + 4 * 3  # supervisor, coordinator; srun, agent and worker of each chip

    cluster.run("scancel", job.number)
    cancelled = time.monotonic()

    until(lambda: not any(cluster.processes_of(node, "meshmend") for node in cluster.nodes))
    took_s = time.monotonic() - cancelled
    assert cluster.end(job.number)["JobState"] == "CANCELLED"
    print(f"\nscancel ended everything within {took_s:.1f} s")
    if is_quiet():
        assert took_s < 5


@pytest.mark.parametrize("how", ["requeued", "preempted"])
def test_a_job_that_begins_again_goes_on_from_its_checkpoint(
    cluster: SlurmCluster, tmp_path: Path, how: str
) -> None:
    job = SubmittedJob(cluster, tmp_path, "--mesh", "2x2", "--hosts", "1x1")
    job.await_step("0,0", lambda at, step, count: step >= 60)

    ended = cluster.requeue(job.number) if how == "requeued" else cluster.preempt(job.number)

    _, step, _ = job.await_step("0,0", lambda at, step, count: at > ended)
    assert step > 50  # it may have saved a later step when it was told to end
    job.finish()
    assert ("DUE TO PREEMPTION" in job.log) == (how == "preempted")


def test_a_requeued_job_without_a_checkpoint_begins_again(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = SubmittedJob(cluster, tmp_path, "--mesh", "1x2", "--hosts", "1x1", save_every=0)
    job.await_step("0,0", lambda at, step, count: step >= 20)

    requeued = cluster.requeue(job.number)

    _, step, _ = job.await_step("0,0", lambda at, step, count: at > requeued)
    assert step == 1
    job.finish()


def test_a_job_that_will_be_preempted_saves_at_once(cluster: SlurmCluster, tmp_path: Path) -> None:
    options = ("--mesh", "2x2", "--hosts", "1x1", "--sbatch", "--partition=graceful")
    job = SubmittedJob(cluster, tmp_path, *options, save_every=1_000_000)
    job.await_step("0,0", lambda at, step, count: step >= 60)

    preempted = cluster.preempt(job.number)

    _, step, _ = job.await_step("0,0", lambda at, step, count: at > preempted)
    assert step > 60
    job.finish()


def test_a_job_whose_first_node_dies_is_requeued(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SubmittedJob(cluster, tmp_path, "--mesh", "2x2", "--hosts", "1x1", "--port", "24816")
    job.await_step("0,0", lambda at, step, count: step >= 60)
    first = cluster.job(job.number)["BatchHost"]

    killed = cluster.kill_node(first)
    until(lambda: cluster.job(job.number)["JobState"] != "RUNNING", why=lambda: job.log)
    noticed_s = time.monotonic() - killed
    cluster.run("scontrol", "update", f"NodeName={first}", "State=DOWN", "Reason=test")
    began = cluster.release(job.number)

    _, step, _ = job.await_step("0,0", lambda at, step, count: at > began)
    assert step > 50
    assert "listens on 127.0.0.1:24816" in job.log
    job.finish()
    cluster.start_node(first)
    print(f"\nthe job was requeued {noticed_s:.0f} s after the death of its first node")


def test_a_host_whose_node_left_the_job_gets_another_node(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = SubmittedJob(cluster, tmp_path, "--mesh", "2x2", "--hosts", "1x2")
    job.await_chips(4)

    cluster.kill_node("n1")
    cluster.run("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=test")
    down = time.monotonic()

    job.await_step("1,0", lambda at, step, count: at > down and count == 4)
    assert cluster.job(job.number)["NodeList"] == "n0"
    name = f"meshmend-{job.number}-host-1x2@1.0"
    replacing = cluster.job(
        cluster.run("squeue", "--noheader", f"--name={name}", "--format=%i").strip()
    )
    assert replacing["NumCPUs"] == "2"
    assert replacing["TimeLimit"] <= "00:30:00"  # what the job had left, in whole minutes
    cluster.start_node("n1")
    job.finish()
    until(lambda: not cluster.run("squeue", "--noheader"))


def test_slurm_accepts_the_job_file_of_a_large_mesh(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    line = ("submit", "slurm", "--mesh", "8x8", "--hosts", "4x2", "-o", "job.sh", "train.py")
    assert meshmend(cluster, tmp_path, *line) == ""

    cluster.run("sbatch", "--test-only", tmp_path / "job.sh")


def test_a_script_that_always_fails_ends_its_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no such model')")
    line = ("submit", "slurm", "--run", "--mesh", "1x1", "--hosts", "1x1", "train.py")
    number = meshmend(cluster, tmp_path, *line).strip()

    ended = cluster.end(number)

    printed = (tmp_path / f"slurm-{number}.out").read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0"), printed
    assert "ValueError: no such model" in printed, printed  # pytest shows the ends of a text only
