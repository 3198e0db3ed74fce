"""Jobs on a real Ray cluster of several nodes on this machine: what is killed comes back.

Run with `make engines`.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from planners import is_running
from training_script import WRONG_FROM_STEP_8, training_script
from waiting import until

# Ray's own secret of the cluster: read at its import, and else made in the home folder.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
pytest.importorskip("ray", reason="needs Ray: pip install 'meshmend[ray]'")
pytest.importorskip("torch")

import ray
from ray.cluster_utils import Cluster

from meshmend.errors import InputError, JobFailedError
from meshmend.launch.ray import RayJob, RayRun, attach, submit, train
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.train.data.audit import audit

pytestmark = pytest.mark.engines

# On a machine that has nothing else to do.
STEPS_AGAIN_S = 2.0  # the others step again so soon after a death
SINGLE = {"mesh.board": "1x1"}  # each chip fails alone
BACK_S = 10.0  # the chip that died steps again so soon
IMPORTS = "import ray, torch, meshmend.train.torch.job; torch.optim.SGD([torch.zeros(1)])"

# Each worker writes a line for each step that counts: the time and the step. It trains until the
# gate is open: a busy machine may take minutes for what a test waits for.
SCRIPT = training_script(
    "batch=32, steps=1_000_000",
    """
    if counts:
        steps.write(f"{time.time()} {job.step_number}\\n")
    time.sleep(0.1)  # leaves the processors to what is started meanwhile
    if (folder / "gate").exists():
        job.stop()
    """,
    first="""
    folder = Path(sys.argv[1])
    chip = os.environ["MESHMEND_CHIP"]
    if (folder / f"broken {chip}").exists():
        raise OSError("this chip is broken")
    steps = (folder / f"{chip} {os.getpid()}.steps").open("w", 1)
    variables = [f"{name}={text}" for name, text in os.environ.items() if "MESHMEND" in name]
    (folder / f"{chip} variables").write_text("\\n".join(variables))
    """,
    last="""
    if job.is_leader:
        (folder / "finished").write_text(str(job.step_number))
    while (folder / "goes on").exists():
        time.sleep(0.1)
    """,
)


@dataclass(frozen=True)
class Watched:
    """A job whose workers write down when they step."""

    run: RayRun
    folder: Path
    mesh: Mesh

    def steps(self, chip: Chip, after: float = 0.0, *, by_new: float = 0.0) -> list[float]:
        """Return when a chip finished steps after a time; with `by_new`, only by a worker since."""
        return sorted(
            float(line.split()[0])
            for file in self.files(chip)
            for lines in [file.read_text().splitlines()]
            for line in lines
            if float(line.split()[0]) > after and float(lines[0].split()[0]) > by_new
        )

    def files(self, chip: Chip) -> list[Path]:
        """Return the files of the workers of a chip, the newest last."""
        files = self.folder.glob(f"{','.join(map(str, chip))} *.steps")
        return sorted(files, key=lambda file: file.stat().st_ctime)

    def pid(self, chip: Chip) -> int:
        """Return the process of the latest worker of a chip."""
        return int(self.files(chip)[-1].stem.split()[-1])

    def all_step(
        self, after: float = 0.0, *, without: tuple[Chip, ...] = (), new: tuple[Chip, ...] = ()
    ) -> float:
        """Wait until all chips have stepped after a time; return when the last of them did.

        A chip's first step after that time may have begun before it, so its second counts. Of the
        chips in `new`, only the steps of new workers count.
        """

        def steps(chip: Chip) -> list[float]:
            return self.steps(chip, after, by_new=after if chip in new else 0.0)[1:]

        chips = [chip for chip in self.mesh.live if chip not in without]
        until(lambda: all(map(steps, chips)), why=self.told)
        return max(steps(chip)[0] for chip in chips)

    def finish(self) -> None:
        """Let the job end; check that it did, and that every sample was used once."""
        (self.folder / "gate").touch()
        self.run.wait()
        found = audit(self.folder / "run" / "ledger")
        n_steps = int((self.folder / "finished").read_text())
        assert (found.steps, found.used) == (n_steps, n_steps * 32)
        assert (found.lost, found.repeated) == (0, 0)
        assert not found.split

    def told(self) -> str:
        return repr(self.run.status())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head node without CPUs, and four nodes."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20},
    )
    for _ in range(4):
        add_node(cluster)
    ray.init(address=cluster.address, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=4, object_store_memory=80 << 20)


@pytest.fixture
def start(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Return what starts a job whose workers write down their steps; it is cancelled at the end."""
    script = tmp_path / "train it.py"
    script.write_text(SCRIPT)
    jobs: list[Watched] = []

    def start_job(
        shape: str, *, hosts: str = "", settings: Mapping[str, object] | None = None
    ) -> Watched:
        files = {"job.run_dir": str(tmp_path / "run"), "job.name": f"job-{tmp_path.name}"}
        job = RayJob.on(
            shape, script, (str(tmp_path),), hosts=hosts, settings={**files, **(settings or {})}
        )
        jobs.append(Watched(submit(job), tmp_path, job.mesh))
        return jobs[-1]

    yield start_job
    for job in jobs:
        if job.run.name in [each["name"] for each in ray.util.list_named_actors(True)]:
            job.run.cancel()


def test_a_killed_worker_is_back_at_once_and_a_killed_coordinator_is_missed_by_nobody(
    start: Callable[..., Watched],
) -> None:
    job = start("2x2", hosts="1x2", settings=SINGLE)
    job.all_step()
    killed = kill(job.pid((0, 1)))
    again = job.all_step(killed, without=((0, 1),)) - killed
    back = job.all_step(killed, new=((0, 1),)) - killed
    coordinators = ray_processes("RayCoordinator")
    lost = kill(*coordinators)
    job.all_step(lost)
    status = job.run.status()
    until(lambda: job.run.status().n_connected == 4, why=job.told)
    print(f"worker killed: others step after {again:.2f} s, it after {back:.2f} s")

    assert len(coordinators) == 1
    assert status.outcome is None
    assert is_in_time(again, STEPS_AGAIN_S)
    assert is_in_time(back, BACK_S)
    job.finish()


def test_a_killed_host_is_back_on_its_node(start: Callable[..., Watched]) -> None:
    job = start("2x2", hosts="1x2", settings=SINGLE)
    job.all_step()
    host = psutil.Process(job.pid((1, 0))).parent().parent()
    assert "RayHost" in host.name() + " ".join(host.cmdline())
    nodes = job.run.status().nodes
    lost = ((1, 0), (1, 1))
    workers = [job.pid(chip) for chip in lost]
    killed = kill(host.pid)
    until(lambda: not any(map(is_running, workers)))
    again = job.all_step(time.time(), without=lost) - killed
    back = job.all_step(killed, new=lost) - killed
    print(f"host's actor killed: others step after {again:.2f} s, its chips after {back:.2f} s")

    assert is_in_time(again, STEPS_AGAIN_S)
    assert is_in_time(back, BACK_S)
    assert job.run.status().nodes == nodes
    job.finish()


def test_a_killed_node_is_replaced_by_a_new_one(
    cluster: Any, start: Callable[..., Watched]
) -> None:
    job = start("4x4", hosts="2x2")
    job.all_step()
    lost = ((0, 2), (0, 3), (1, 2), (1, 3))
    before = job.run.status().nodes
    killed = kill_node(cluster, before[1])
    again = job.all_step(killed, without=lost) - killed
    add_node(cluster)
    added = time.time()
    back = job.all_step(added, new=lost) - added
    after = job.run.status().nodes
    print(f"node killed: others step after {again:.2f} s, its chips {back:.2f} s after a new node")

    assert is_in_time(again, STEPS_AGAIN_S)
    assert is_in_time(back, BACK_S)
    assert after[1] != before[1]
    assert (after[0], after[2], after[3]) == (before[0], before[2], before[3])
    job.finish()


def test_a_killed_node_is_replaced_by_a_spare_one_at_once(
    cluster: Any, start: Callable[..., Watched]
) -> None:
    job = start("2x2", hosts="1x2")
    job.all_step()
    lost = ((0, 0), (0, 1))
    killed = kill_node(cluster, job.run.status().nodes[0])
    again = job.all_step(killed, without=lost) - killed
    back = job.all_step(killed, new=lost) - killed
    add_node(cluster)
    print(f"node killed: others step after {again:.2f} s, its chips on a spare after {back:.2f} s")

    assert is_in_time(again, STEPS_AGAIN_S)
    assert is_in_time(back, BACK_S)
    job.finish()


def test_a_node_and_the_coordinator_that_are_killed_together_come_back(
    cluster: Any, start: Callable[..., Watched]
) -> None:
    job = start("1x3", hosts="1x1", settings=SINGLE)
    job.all_step()
    before = job.run.status().nodes
    killed = kill_node(cluster, before[2])
    kill(*ray_processes("RayCoordinator"))
    again = job.all_step(killed, without=((0, 2),)) - killed
    back = job.all_step(killed, new=((0, 2),)) - killed
    add_node(cluster)
    after = job.run.status().nodes
    print(f"node and coordinator killed: others step after {again:.2f} s, it after {back:.2f} s")

    assert after[:2] == before[:2]
    assert after[2] != before[2]
    job.finish()


def test_a_coordinator_that_hangs_is_started_again(start: Callable[..., Watched]) -> None:
    job = start("1x2", hosts="1x1", settings=SINGLE)
    job.all_step()
    (frozen,) = ray_processes("RayCoordinator")
    os.kill(frozen, signal.SIGSTOP)
    stopped = time.time()
    until(lambda: not is_running(frozen))
    noticed = time.time() - stopped
    job.all_step(time.time())
    until(lambda: job.run.status().n_connected == 2, why=job.told)
    back = time.time() - stopped
    killed = kill(job.pid((0, 1)))
    job.all_step(killed, new=((0, 1),))
    print(f"coordinator frozen: killed after {noticed:.1f} s, at work again after {back:.1f} s")

    job.finish()


def test_a_script_that_goes_on_after_its_loop_keeps_its_coordinator(
    start: Callable[..., Watched],
) -> None:
    job = start("1x1", settings=SINGLE)
    for name in ("goes on", "gate"):
        (job.folder / name).touch()
    until((job.folder / "finished").exists, why=job.told)
    coordinators = ray_processes("RayCoordinator")
    finished = time.monotonic()
    until(lambda: time.monotonic() > finished + 20)  # a coordinator that hung would be killed

    assert ray_processes("RayCoordinator") == coordinators
    (job.folder / "goes on").unlink()
    job.finish()


def test_settings_reach_the_workers(start: Callable[..., Watched]) -> None:
    settings = {"job.check_shares": 50, "timing.link_timeout": 3, "sums.checksum": True}
    job = start("1x2", settings=SINGLE | settings)
    job.all_step()
    variables = (job.folder / "0,1 variables").read_text().splitlines()
    told = {"MESHMEND_CHECK_SHARES=50", "MESHMEND_LINK_TIMEOUT=3", "MESHMEND_CHECKSUM=1"}

    assert told <= set(variables)
    job.finish()


def test_a_chip_that_computes_wrong_numbers_leaves_alone(cluster: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        training_script("batch=32, steps=40", "", first=WRONG_FROM_STEP_8.format(chip="0,1"))
    )
    settings = {"job.name": "wrong", "job.check_shares": 4, "job.run_dir": str(tmp_path / "run")}
    run = submit(RayJob.on("2x2", script, (), hosts="1x2", settings=SINGLE | settings))

    run.wait()

    found = audit(tmp_path / "run" / "ledger")
    assert (found.steps, found.lost, found.repeated, found.split) == (40, 0, 0, ())
    files = (tmp_path / "run" / "ledger").iterdir()
    at_end = {each.name[:3] for each in files if "\ndone 40 " in each.read_text()}
    assert at_end == {"0-0", "1-0", "1-1"}


def test_a_host_that_fails_alone_tries_again_on_another_node(
    start: Callable[..., Watched],
) -> None:
    job = start("1x2", hosts="1x1", settings=SINGLE)
    job.all_step()
    before = job.run.status().nodes
    (job.folder / "broken 0,1").touch()
    kill(job.pid((0, 1)))
    until(lambda: job.run.status().nodes[1] != before[1], why=job.told)
    (job.folder / "broken 0,1").unlink()
    mended = time.time()
    job.all_step(mended, new=((0, 1),))

    assert job.run.status().nodes[0] == before[0]
    job.finish()


def test_the_example_trains_a_function_on_a_cluster(cluster: Any) -> None:
    example = Path(__file__).parents[2] / "examples" / "ray" / "train.py"
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(
        [sys.executable, example], env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "trained"


def test_ray_train_sums_on_our_backend_and_starts_again_after_a_kill() -> None:
    example = Path(__file__).parents[2] / "examples" / "ray" / "ray_train.py"
    environment = {**os.environ, "RAY_ADDRESS": "local"}  # a cluster of its own, of four processors
    done = subprocess.run(
        [sys.executable, example, "--kill-at", "15"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert re.search(r"^backend meshmend: steps (1|11) to 30, loss", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("error", [ZeroDivisionError("it is broken"), InputError("it cannot be")])
def test_a_loop_that_fails_again_and_again_ends_the_job(cluster: Any, error: Exception) -> None:
    def loop() -> None:
        raise error

    with pytest.raises(
        JobFailedError, match=r"'fails' did not finish: the agent of host 0 \(chips"
    ):
        train("1x1", loop, settings={"job.name": "fails"})


def test_a_job_outlives_the_process_that_started_it(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    program = (
        "import sys, ray\n"
        "from meshmend.launch.ray import RayJob, submit\n"
        "ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False)\n"
        "job = {'settings': {'job.name': 'outlives'}, 'arguments': (sys.argv[3],)}\n"
        "submit(RayJob.on('1x2', sys.argv[2], **job))\n"
    )
    line = (sys.executable, "-c", program, cluster.address, tmp_path / "train.py", tmp_path)
    subprocess.run(line, check=True)
    run = attach("outlives")
    with pytest.raises(InputError, match="a job of the name 'outlives' is on this Ray cluster"):
        submit(RayJob.on("1x2", tmp_path / "train.py", settings={"job.name": "outlives"}))
    (tmp_path / "gate").touch()
    run.wait()

    assert (tmp_path / "finished").exists()
    with pytest.raises(InputError, match="no job of the name 'outlives'"):
        attach("outlives")


def test_a_cancelled_job_leaves_no_process_and_its_secret_is_in_no_command_and_no_log(
    start: Callable[..., Watched],
) -> None:
    job = start("2x2", hosts="1x2", settings=SINGLE)
    job.all_step()
    pids = [job.pid(chip) for chip in job.mesh.live]
    secret = psutil.Process(pids[0]).environ()["MESHMEND_SECRET"]
    commands = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    job.run.cancel()
    until(lambda: not any(map(is_running, pids)))
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path()).glob("*")

    assert len(secret) == 64
    assert not any(secret in command for command in commands)
    assert not any(secret in file.read_text(errors="replace") for file in logs if file.is_file())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"hosts": "3x1"}, "--hosts needs a block of chips that tiles the mesh 2x2, but got 3x1"),
        ({"hosts": "two"}, "--hosts needs a block of chips such as 4x2, but got 'two'"),
        (
            {"settings": {"job.name": "a job"}},
            "a job needs a name of letters, digits, .* but got 'a job'",
        ),
        ({"resources": {"CPU": 0}}, "each above 0, but got {'CPU': 0}"),
        ({"loop": "/nowhere/train.py"}, "a job needs a script, but there is no file /nowhere"),
        ({"arguments": ("--lr",)}, "a function gets no arguments"),
        ({"mesh": "2by2"}, "--mesh needs positive extents"),
        ({"settings": {"mesh.board": "2"}}, "--board needs a shape for 2x2"),
        ({"settings": {"job.check_shares": -1}}, "--check-shares needs a whole number of at least"),
        ({"settings": {"job.chek": 1}}, "settings: there is no setting 'job.chek'"),
        ({"settings": {"slurm.port": 1}}, "slurm.port has no effect: meshmend ray does not read"),
    ],
)
def test_a_job_that_cannot_be_is_refused_before_anything_starts(
    options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        train(options.pop("mesh", "2x2"), options.pop("loop", print), **options)


def is_in_time(found_s: float, usual_s: float) -> bool:
    """Whether chips stepped soon enough; a busy machine may take as much longer as it is busy.

    How busy it is, a process tells that imports what a host imports: by the time that it takes, and
    the processor time that it gets.
    """
    if found_s < usual_s:
        return True
    began, used = time.monotonic(), os.times()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    took_s, after = time.monotonic() - began, os.times()
    cpu_s = after.children_user + after.children_system - used.children_user - used.children_system
    print(f"this machine is busy: {cpu_s:.1f} s of a processor take {took_s:.1f} s")
    return found_s < usual_s * took_s / cpu_s


def kill(*pids: int) -> float:
    """Kill processes and return when."""
    killed = time.time()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return killed


def kill_node(cluster: Any, node_id: str | None) -> float:
    """Kill all processes of a node at once, as a power failure does; return when."""
    (node,) = [each for each in cluster.worker_nodes if each.node_id == node_id]
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    killed = kill(raylet.pid, *(child.pid for child in raylet.children(recursive=True)))
    cluster.remove_node(node, allow_graceful=False)
    return killed


def ray_processes(actor: str) -> list[int]:
    """Return the processes of all actors of a class."""
    found = psutil.process_iter(["cmdline"])
    return [each.pid for each in found if f"ray::{actor}" in " ".join(each.info["cmdline"] or ())]
