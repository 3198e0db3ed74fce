"""What a scheduler's restarts need: workers that come late, and a probe for those that train."""

import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

from commanding import Command, commands
from ports import free_port
from training_script import training_script
from waiting import until

pytest.importorskip("torch")

from meshmend.config import JobConfig
from meshmend.launch.kubernetes import READY_FOLDER, KubernetesJob, indexed_job_manifests
from meshmend.membership.messages import FRESH, Status
from meshmend.topology.failures import format_shape
from meshmend.train.core.worker_environment import ReadyFile
from meshmend.train.data.audit import audit

SCRIPT = training_script(
    "batch=8, steps=10",
    """
    while job.step_number == 5 and not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    """,
    last=r'os.write(1, f"finished {job.step_number}\n".encode())',
)


class PairOfChips:
    """A job on a 1x2 mesh that waits in the middle until its gate is opened."""

    def __init__(self, start: Callable[..., Command], folder: Path) -> None:
        self._start, self._folder = start, folder
        self.gate, self.ready = folder / "gate", folder / "ready files"
        (folder / "script.py").write_text(SCRIPT)
        self._endpoint = f"127.0.0.1:{free_port()}"
        self._secret = {"MESHMEND_SECRET": "only these two chips know it"}

    def coordinator(self, *options: str) -> Command:
        line = ("coordinator", "--mesh", "1x2", "--board", "1x1", "--listen", self._endpoint)
        return self._start(
            "coordinator", *line, "--set", "timing.heartbeat_timeout=60", *options, **self._secret
        )

    def worker(self, chip: str, name: str = "") -> Command:
        line = ("worker", "--mesh", "1x2", "--board", "1x1", "--coordinator", self._endpoint)
        what = ("--chip", chip, self._folder / "script.py", self.gate)
        ready = {"MESHMEND_READY_DIR": str(self.ready)}
        return self._start(name or f"worker {chip}", *line, *what, **self._secret, **ready)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[PairOfChips]:
    with commands(tmp_path) as start:
        yield PairOfChips(start, tmp_path)


def test_a_worker_that_comes_after_the_end_finishes_too(job: PairOfChips) -> None:
    """So the pod of a host that came back too late completes, and with it the Job."""
    coordinator = job.coordinator("--set", "timing.linger=600")
    job.gate.touch()
    workers = [job.worker("0,0"), job.worker("0,1")]
    assert [worker.end() for worker in workers] == [0, 0], coordinator.err
    until(lambda: "the job is over; the coordinator stays" in coordinator.err)

    late = job.worker("0,1", "late")

    assert late.end() == 0, late.err
    assert late.out == "finished 0\n"
    assert not coordinator.has_ended
    coordinator.signal(signal.SIGTERM)
    assert coordinator.end() == 143


def test_a_coordinator_that_has_stayed_long_enough_ends(job: PairOfChips) -> None:
    coordinator = job.coordinator("--set", "timing.linger=0.1")
    job.gate.touch()
    workers = [job.worker("0,0"), job.worker("0,1")]

    assert [worker.end() for worker in workers] == [0, 0], coordinator.err
    assert coordinator.end() == 0
    assert coordinator.err.splitlines()[-1] == "meshmend: all workers have finished"


def k8s_job(mesh: str, hosts: str, *arguments: str, run_dir: str = "") -> KubernetesJob:
    """A job for Kubernetes, each of whose pods has a block of chips."""
    settings: dict[str, Any] = {"mesh.shape": mesh, "hosts.block": hosts, "job.name": "train"}
    settings |= {"kubernetes.image": "image", "job.run_dir": run_dir}
    settings |= {"timing.gather": 600.0, "timing.linger": 86400.0}  # as `meshmend submit` says
    return KubernetesJob(JobConfig().with_(settings), arguments)


def test_the_commands_of_a_manifest_train_through_the_death_of_a_pod(tmp_path: Path) -> None:
    """What Kubernetes would do is done by hand: variables, the address of the service, a restart.

    Two pods with two chips each; one is killed with all its workers.
    """
    job = k8s_job(
        "2x2",
        "1x2",
        str(tmp_path / "script.py"),
        str(tmp_path / "gate"),
        run_dir=str(tmp_path / "run"),
    )
    (tmp_path / "script.py").write_text(SCRIPT)
    *_, coordinator_job, worker_job = indexed_job_manifests(job)
    here = f"127.0.0.1:{free_port()}"
    replaced = {
        "0.0.0.0:7000": here,
        "0.0.0.0:9090": f"127.0.0.1:{free_port()}",
        "train-coordinator:7000": here,
        "$(POD_IP)": "127.0.0.1",
        "/var/lib/meshmend/record.json": str(tmp_path / "record.json"),
    }

    def command_in(document: dict[str, Any]) -> list[str]:
        command = document["spec"]["template"]["spec"]["containers"][0]["command"]
        assert command[0] == "meshmend"
        return [replaced.get(part, part) for part in command[1:]]

    with commands(tmp_path) as start:

        def pod(number: int, name: str) -> Command:
            variables = {"JOB_COMPLETION_INDEX": str(number), "MESHMEND_READY_DIR": str(ready)}
            return start(name, *command_in(worker_job), **secret, **variables)

        ready, secret = tmp_path / "ready", {"MESHMEND_SECRET": "what a Secret would hold"}
        coordinator = start("coordinator", *command_in(coordinator_job), **secret)
        pods = [pod(number, f"pod {number}") for number in (0, 1)]
        until(lambda: len(list(ready.glob("*"))) == 4, why=lambda: coordinator.err + pods[0].err)
        pods[1].signal(signal.SIGKILL)
        until(lambda: "chip (1, 1) is gone" in coordinator.err, why=lambda: coordinator.err)
        pods[1] = pod(1, "pod 1 again")
        until(lambda: coordinator.err.count("connected, 4 of 4") == 2, why=lambda: coordinator.err)
        (tmp_path / "gate").touch()

        assert [each.end() for each in pods] == [0, 0], coordinator.err
        until(lambda: "the job is over; the coordinator stays" in coordinator.err)
        assert all(each.out.count("finished 10") == 2 for each in pods)
    found = audit(tmp_path / "run" / "ledger")
    assert (found.steps, found.used, found.lost, found.repeated) == (10, 80, 0, 0)


def probe_succeeds(folder: Path, host: tuple[int, ...]) -> bool:
    """Run the readiness probe of a manifest for a pod with this block of chips."""
    job = k8s_job("1x2", format_shape(host), "train.py")
    container = indexed_job_manifests(job)[-1]["spec"]["template"]["spec"]["containers"][0]
    command = container["readinessProbe"]["exec"]["command"]
    assert str(prod(host)) in command[-1]
    line = [re.sub(re.escape(READY_FOLDER), f"'{folder}'", part) for part in command]
    return subprocess.run(line, capture_output=True).returncode == 0


def test_the_probe_of_a_pod_succeeds_while_all_its_chips_train(job: PairOfChips) -> None:
    job.ready.mkdir()
    (job.ready / "0-0").touch()  # left by a worker that was killed
    first = job.worker("0,0")
    until(lambda: not (job.ready / "0-0").exists(), why=lambda: first.err)
    assert not probe_succeeds(job.ready, (1, 1))

    coordinator = job.coordinator()
    second = job.worker("0,1")
    until(lambda: probe_succeeds(job.ready, (1, 2)), why=lambda: coordinator.err)
    second.signal(signal.SIGKILL)
    again = job.worker("0,1", "again")
    until(lambda: coordinator.err.count("connected, 2 of 2") == 2, why=lambda: coordinator.err)
    job.gate.touch()

    assert [worker.end() for worker in (first, again)] == [0, 0], coordinator.err


def test_the_probe_of_the_coordinator_fails_while_it_hangs(job: PairOfChips) -> None:
    pod = k8s_job("1x2", "1x1", "train.py")
    container = indexed_job_manifests(pod)[-2]["spec"]["template"]["spec"]["containers"][0]
    probe, port = container["livenessProbe"], free_port()
    coordinator = job.coordinator("--metrics", f"127.0.0.1:{port}")

    def is_alive() -> bool:
        """Ask what a kubelet asks; a status from 200 to 399 is a success."""
        try:
            url = f"http://127.0.0.1:{port}{probe['httpGet']['path']}"
            with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]) as answer:
                status: int = answer.status
                return 200 <= status < 400
        except OSError:
            return False

    until(is_alive, why=lambda: coordinator.err)
    coordinator.signal(signal.SIGSTOP)
    assert not is_alive()
    socket.create_connection(("127.0.0.1", port), timeout=60).close()  # this notices nothing
    coordinator.signal(signal.SIGCONT)
    until(is_alive, why=lambda: coordinator.err)


@pytest.mark.parametrize(
    ("status", "is_ready"),
    [
        (Status(generation=0, ready=False, state_version=FRESH), False),  # it has just started
        (Status(generation=3, ready=True, state_version=2), False),  # it lacks the state
        (Status(generation=3, ready=False, state_version=3), False),  # it has lost a peer
        (Status(generation=3, ready=True, state_version=3), True),
    ],
)
def test_a_worker_is_ready_if_it_is_up_to_date_in_its_generation(
    status: Status, is_ready: bool, tmp_path: Path
) -> None:
    file = ReadyFile(tmp_path / "new", (0, 3))
    file.update(Status(generation=2, ready=True, state_version=2))
    assert (tmp_path / "new" / "0-3").exists()

    file.update(status)

    assert (tmp_path / "new" / "0-3").exists() == is_ready


def test_a_ready_file_that_cannot_be_written_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    ReadyFile(tmp_path / "file", (0, 3)).update(Status(2, True, 2))

    assert "cannot change the ready file" in caplog.text
