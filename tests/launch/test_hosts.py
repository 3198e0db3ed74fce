"""`meshmend coordinator` and `meshmend worker`: jobs whose workers some launcher starts."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commanding import Command, commands
from planners import is_running, planners_of
from ports import free_port
from testbeds import require_testbed
from training_script import training_script
from waiting import HANG_S, until

pytest.importorskip("torch")

from meshmend.cli.main import run_line
from meshmend.errors import InputError
from meshmend.lab.testbed.bed import Testbed
from meshmend.launch.hosts import address_toward, board_from, chip_from, is_answered, secret_from
from meshmend.launch.termination import exit_soon_after_signal
from meshmend.membership.history import BegunGeneration, CoordinatorRecord
from meshmend.membership.messages import COORDINATOR
from meshmend.membership.record_file import RecordFile, load_history
from meshmend.planning.files import PlanFile, decode_plan
from meshmend.planning.settings import Settings
from meshmend.topology.mesh import Mesh
from meshmend.train.data.audit import audit
from meshmend.transport.listener import Listener, listening

HOLED = Mesh((2, 2)).without("0,1")

# A small model on made-up samples, slow enough to be killed. If there is a gate, it waits for that
# half-way, and hurries when it is open.
SCRIPT = training_script(
    "batch=batch, steps=n_steps, seed=seed",
    """
    if not (gates and os.path.exists(gates[0])):
        time.sleep(pause_s)
    while gates and job.step_number == n_steps // 2 and not os.path.exists(gates[0]):
        time.sleep(0.02)
    """,
    first="""
    n_steps, pause_s, *gates = int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:]
    batch, seed = int(os.environ.get("BATCH", 16)), int(os.environ.get("SEED", 0))
    """,
    last=r'os.write(1, f"finished {job.step_number} {job.loss:.6f}\n".encode())  # in one piece',
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's secret in the environment, and no launcher's variables."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MESHMEND_SECRET", "only the chips of this test know")


class OnLoopback:
    """A job on a 2x2 mesh whose processes are started one by one, on this host."""

    def __init__(self, start: Callable[..., Command], script: Path) -> None:
        self._start, self._script = start, script
        self.gate, self.run_dir = script.with_name("gate"), script.with_name("run")
        self._port = free_port()
        self._n_started = 0

    def coordinator(self) -> Command:
        self._n_started += 1
        listen = ("--listen", f"127.0.0.1:{self._port}", "--set", "timing.heartbeat_timeout=60")
        line = ("coordinator", "--mesh", "2x2", "--board", "1x1", *listen)
        return self._start(f"coordinator{self._n_started}", *line)

    def worker(
        self,
        chip: str,
        *arguments: str,
        n_steps: int = 60,
        pause_s: float = 0.01,
        keeps: bool = True,
        **environment: str,
    ) -> Command:
        self._n_started += 1
        line = ("worker", "--mesh", "2x2", "--coordinator", f"127.0.0.1:{self._port}")
        run_dir = ("--run-dir", self.run_dir) if keeps else ()
        mine = ("--board", "1x1", "--chip", chip, *run_dir, *arguments)
        name = f"worker{self._n_started}"
        what = (self._script, str(n_steps), str(pause_s), self.gate)
        return self._start(name, *line, *mine, *what, **environment)


@pytest.fixture
def job(tmp_path: Path, script: Path) -> Iterator[OnLoopback]:
    with commands(tmp_path) as start:
        yield OnLoopback(start, script)


@pytest.fixture
def planned_job(tmp_path: Path, script: Path) -> Iterator[OnLoopback]:
    with commands(tmp_path, plan_ahead=True) as start:
        yield OnLoopback(start, script)


def test_a_job_outlives_its_coordinator_and_a_worker(job: OnLoopback) -> None:
    """The coordinator is killed and comes back, then a worker is killed and comes back.

    Without a coordinator the workers go on, up to the gate.
    """
    first = job.coordinator()
    workers = {chip: job.worker(chip, pause_s=0.05) for chip in ("0,0", "0,1", "1,0", "1,1")}
    until(lambda: "all 4 chips have finished step 1," in first.err, why=lambda: first.err)
    first.signal(signal.SIGKILL)
    assert first.end() == -signal.SIGKILL
    until(lambda: audit(job.run_dir / "ledger").steps == 30, why=lambda: first.err)
    second = job.coordinator()
    until(lambda: "connected, 4 of 4" in second.err, why=lambda: second.err)
    workers["0,1"].signal(signal.SIGKILL)
    until(lambda: "chip (0, 1) is gone" in second.err, why=lambda: second.err)
    again = job.worker("0,1")
    until(lambda: second.err.count("connected, 4 of 4") == 2, why=lambda: second.err)
    job.gate.touch()

    living = [again, *(worker for chip, worker in workers.items() if chip != "0,1")]
    assert [worker.end() for worker in living] == [0] * 4, [worker.err for worker in living]
    assert second.end() == 0
    assert len({worker.out for worker in living}) == 1
    assert living[0].out.startswith("finished 60 ")
    assert second.err.splitlines()[-1] == "meshmend: all workers have finished"
    assert re.findall(r": (\d) chips from", second.err)[-1] == "4"
    assert re.search(
        r"all \d chips have finished step \d+, [\d.]+ m?s after the first chip left", second.err
    )
    found = audit(job.run_dir / "ledger")
    assert (found.steps, found.used, found.lost, found.repeated) == (60, 960, 0, 0)
    assert found.hashed > 0
    assert not found.split


@pytest.mark.slow  # the lowest priority waits for all other tests
def test_the_first_worker_of_a_host_plans_ahead_and_the_next_when_it_is_killed(
    planned_job: OnLoopback,
) -> None:
    coordinator = planned_job.coordinator()
    slow: dict[str, Any] = {"n_steps": 240, "pause_s": 0.5}
    workers = {chip: planned_job.worker(chip, **slow) for chip in ("0,0", "0,1", "1,0", "1,1")}
    seen: dict[str, set[int]] = {chip: set() for chip in workers}

    def n_seen(chip: str) -> int:
        for other, worker in workers.items():
            seen[other] |= set(planners_of(worker.pid))
        return len(seen[chip])

    def told() -> str:
        return coordinator.err + "".join(worker.err for worker in workers.values())

    until(lambda: n_seen("0,0") > 0, why=told)
    assert sum(map(len, seen.values())) == 1
    workers["0,0"].signal(signal.SIGKILL)
    assert workers.pop("0,0").end() == -signal.SIGKILL
    until(lambda: n_seen("0,1") > 0, why=told)
    workers["0,0"] = planned_job.worker("0,0", **slow)
    until(lambda: n_seen("0,0") > 1, why=told)
    plans = planned_job.run_dir / "plans"
    until(lambda: len(list(plans.glob("*.json"))) >= 5, why=told)
    until(lambda: not any(map(is_running, seen["0,1"])), why=told)
    planned_job.gate.touch()

    assert [worker.end() for worker in workers.values()] == [0] * 4, told()
    assert coordinator.end() == 0
    assert len({worker.out for worker in workers.values()}) == 1
    assert not seen["1,0"] | seen["1,1"]
    assert not any(map(is_running, seen["0,0"] | seen["0,1"]))


@pytest.mark.slow  # the lowest priority waits for all other tests
def test_without_a_run_folder_plans_are_in_a_folder_of_the_host_while_the_job_runs(
    planned_job: OnLoopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    coordinator = planned_job.coordinator()
    workers = [planned_job.worker(chip, keeps=False) for chip in ("0,0", "0,1", "1,0", "1,1")]

    def told() -> str:
        return coordinator.err + "".join(worker.err for worker in workers)

    def plans() -> list[Path]:
        return list(tmp_path.glob("tmp/meshmend-plans-*/*.json"))

    until(lambda: len(plans()) == 5, why=told)
    (folder,) = tmp_path.glob("tmp/*")
    assert folder.stat().st_mode & 0o777 == 0o700
    planned_job.gate.touch()

    assert [worker.end() for worker in workers] == [0] * 4, told()
    assert coordinator.end() == 0
    assert not list(tmp_path.glob("tmp/*"))
    assert "plans ahead" not in told()


TILES = """
import sys, time, os
import torch
from torch.distributed.fsdp import fully_shard
from meshmend.train import TileJob

def build(mesh):
    model = fully_shard(torch.nn.Linear(64, 64), mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

job = TileJob(build, [(torch.ones(64),)] * 16, tile="1x2", batch=16, steps=400)
for step in job:
    with step as (inputs,):
        job.optimizer.zero_grad()
        step.backward(job.model(inputs).square().mean())
        job.optimizer.step()
    if not os.path.exists(sys.argv[3]):
        time.sleep(0.2)
os.write(1, b"finished\\n")
"""


@pytest.mark.slow  # the lowest priority waits for all other tests
def test_the_first_worker_of_a_host_plans_the_sums_between_tiles_ahead(
    planned_job: OnLoopback, script: Path
) -> None:
    """They are known after the first step, and not when a chip enters a generation."""
    script.write_text(TILES)
    coordinator = planned_job.coordinator()
    workers = [planned_job.worker(chip) for chip in ("0,0", "0,1", "1,0", "1,1")]

    def told() -> str:
        return coordinator.err + "".join(worker.err for worker in workers)

    def plans() -> list[PlanFile]:
        found = (planned_job.run_dir / "plans").glob("*.json")
        return [decode_plan(path.read_bytes(), path.name) for path in found]

    until(lambda: any(plan.tiling is not None for plan in plans()), why=told)
    planned_job.gate.touch()

    assert [worker.end() for worker in workers] == [0] * 4, told()
    assert coordinator.end() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_worker_and_a_coordinator_end_when_they_are_asked_to(
    number: int, code: int, job: OnLoopback
) -> None:
    worker = job.worker("0,0", n_steps=10**6)
    until(lambda: "waits for its coordinator" in worker.err, why=lambda: worker.err)
    coordinator = job.coordinator()
    other = job.worker("0,1", n_steps=10**6)
    until(lambda: "connected, 2 of 4" in coordinator.err, why=lambda: coordinator.err)

    for command in (worker, other, coordinator):
        command.signal(number)
        assert command.end() == code
        assert "Traceback" not in command.err


def test_a_process_that_is_deaf_to_signals_is_ended_all_the_same() -> None:
    """It waits in compiled code, which no signal interrupts: for a lock that it holds itself."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with exit_soon_after_signal():
                lock = ctypes.create_string_buffer(256)
                library = ctypes.CDLL(None)
                library.pthread_mutex_lock(lock)
                os.write(writer, b"!")
                library.pthread_mutex_lock(lock)
        finally:
            os._exit(0)
    assert os.read(reader, 1) == b"!"
    os.close(reader)
    os.close(writer)
    until(lambda: sleeps(child))
    os.kill(child, signal.SIGTERM)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143


def sleeps(pid: int) -> bool:
    """Return whether the main thread of a process waits in the kernel."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_a_worker_of_another_job_is_refused_and_the_job_goes_on(job: OnLoopback) -> None:
    coordinator = job.coordinator()
    until(lambda: "listens on" in coordinator.err, why=lambda: coordinator.err)
    stranger = job.worker("0,0", "--job", "another")

    assert stranger.end() == 1
    assert "belongs to job 'another'" in stranger.err.splitlines()[-1]
    until(lambda: "refused 127.0.0.1:" in coordinator.err, why=lambda: coordinator.err)
    coordinator.signal(0)  # it is still there


def test_workers_with_other_arguments_are_refused_and_the_job_goes_on(job: OnLoopback) -> None:
    others: dict[str, dict[str, Any]] = {
        "steps is 100 on that chip, but 60 in this job": {"n_steps": 100},
        "batch is 8 on that chip, but 16 in this job": {"BATCH": "8"},
        "seed is 7 on that chip, but 0 in this job": {"SEED": "7"},
        "algorithm is trees on that chip, but auto-on-one-host in this job": {
            "MESHMEND_ALGORITHM": "trees"
        },
        "mesh is 2x2 wrap all on that chip, but 2x2 in this job": {"MESHMEND_WRAP": "all"},
    }
    coordinator = job.coordinator()
    workers = [job.worker("0,0")]
    until(lambda: "connected, 1 of 4" in coordinator.err, why=lambda: coordinator.err)
    for words, other in others.items():
        wrong = job.worker("0,1", **other)
        assert wrong.end() == 1
        assert wrong.err.splitlines()[-1] == (
            f"meshmend: chip (0, 1) refused: {words}, as on chip (0, 0)"
        )
        assert f"chip (0, 1) refused: {words}" in coordinator.err

    workers += [job.worker(chip) for chip in ("0,1", "1,0", "1,1")]
    job.gate.touch()
    assert [worker.end() for worker in workers] == [0] * 4, coordinator.err
    found = audit(job.run_dir / "ledger")
    assert (found.steps, found.used, found.lost, found.repeated) == (60, 960, 0, 0)


def test_a_second_worker_of_a_chip_waits_quietly_and_gives_up(job: OnLoopback) -> None:
    coordinator = job.coordinator()
    first = job.worker("0,0")
    until(lambda: "connected, 1 of 4" in coordinator.err, why=lambda: coordinator.err)
    second = job.worker("0,0", "--set", "timing.wait_for_chip=2")

    assert second.end() == 1
    assert second.err.splitlines()[-1] == (
        "meshmend: chip (0, 0) has another worker, still there after 2 s; stop one of the two"
    )
    assert coordinator.err.count("has another worker") == 1
    assert not first.has_ended


def test_a_worker_that_finds_no_coordinator_gives_up(job: OnLoopback) -> None:
    late = job.worker("0,0", "--set", "timing.join_timeout=1")

    assert late.end() == 1
    assert "chip (0, 0) found no coordinator at 127.0.0.1:" in late.err.splitlines()[-1]
    assert "within 1 s: the job is over, or was never started" in late.err.splitlines()[-1]


def test_a_coordinator_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from meshmend.cli.main import run_line\n"
        "sys.exit(run_line(['coordinator', '--mesh', '2x2', '--listen', '127.0.0.1:0']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "the coordinator of job 'job' on 2x2 listens on 127.0.0.1:" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)

    assert process.wait(HANG_S) == 143
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_coordinator_says_what_an_earlier_one_left_until_it_is_told_to_forget(
    tmp_path: Path,
) -> None:
    record = tmp_path / "record.json"
    begun = BegunGeneration(3, (((0, 0), ("127.0.0.1", 7)),))
    RecordFile(record).save(CoordinatorRecord("job", (begun,), step=177, highest=3))
    state = ("--state", str(record))
    with commands(tmp_path) as start:
        environment = {"MESHMEND_SECRET": "s" * 32}
        waits = start("waits", *COORDINATOR_LINE, *state, **environment)
        until(lambda: "last known at step 177" in waits.err, why=lambda: waits.err)
        assert "to begin again, use --new" in waits.err
        assert record.exists()

        forgets = start("forgets", *COORDINATOR_LINE, *state, "--new", **environment)
        until(lambda: "the job begins again" in forgets.err, why=lambda: forgets.err)
        assert not record.exists() or load_history(record, "job").is_new  # it may have its term


COORDINATOR_LINE = ["coordinator", "--mesh", "2x2", "--listen", "127.0.0.1:0"]
WORKER_LINE = ["worker", "--mesh", "2x2", "--coordinator", "127.0.0.1:9", "--chip", "0,0"]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (
            [*COORDINATOR_LINE, "--secret-file", "/nowhere/secret"],
            "read /nowhere/secret: No such file",
        ),
        ([*COORDINATOR_LINE, "--board", "2"], "--board needs a shape for 2x2 such as 2x2"),
        ([*COORDINATOR_LINE[:-1], "7000"], "--listen needs HOST:PORT such as 10.0.0.1:7000"),
        ([*COORDINATOR_LINE[:-1], "192.0.2.1:7000"], "cannot listen on 192.0.2.1:7000"),
        ([*WORKER_LINE, "nowhere.py"], "there is no file nowhere.py"),
        ([*WORKER_LINE, "--board", "2", "x.py"], "--board needs a shape for 2x2 such as 2x2"),
        ([*WORKER_LINE[:-1], "7,7", "nowhere.py"], "--chip needs a chip of 2x2 such as 0,1"),
        ([*WORKER_LINE[:-2], "nowhere.py"], "a worker needs its chip, but none of RANK"),
        ([*WORKER_LINE[:4], "here", "--chip", "0,0", "x.py"], "--coordinator needs HOST:PORT"),
        (
            [*WORKER_LINE, "--bind", "192.0.2.1", __file__],
            "a worker needs an address of its host, but cannot listen on 192.0.2.1: Cannot assign",
        ),
        (
            [*WORKER_LINE, "--bind", "0.0.0.0", __file__],
            "a worker needs one address at which the others call it, but 0.0.0.0 is every address",
        ),
    ],
)
def test_what_cannot_be_started_is_refused_in_one_line(
    line: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_line(line) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert match in said


@pytest.mark.parametrize("line", [COORDINATOR_LINE, [*WORKER_LINE, __file__]])
def test_without_a_secret_nothing_starts(
    line: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MESHMEND_SECRET")

    assert run_line(line) == 2
    assert "needs a secret, but MESHMEND_SECRET is not set" in capsys.readouterr().err


def test_a_worker_with_another_secret_is_told_so_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listener = listening("127.0.0.1")
    host, port = listener.getsockname()
    another = Listener(
        listener,
        b"another",
        COORDINATOR,
        name="the coordinator",
        admit=lambda one, why: one.close(),
    )
    line = [*WORKER_LINE, __file__]
    line[line.index("127.0.0.1:9")] = f"{host}:{port}"

    assert run_line(line) == 2
    assert "need the same secret" in capsys.readouterr().err
    assert is_answered((host, port), b"another", within_s=HANG_S)
    another.close()
    assert not is_answered((host, port), b"another", within_s=1.0)


@pytest.mark.parametrize(
    ("environment", "chip"),
    [
        ({"RANK": "0", "WORLD_SIZE": "3"}, (0, 0)),
        ({"RANK": "2", "WORLD_SIZE": "3", "SLURM_PROCID": "0"}, (1, 1)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}, (1, 0)),
        ({"JOB_COMPLETION_INDEX": "2"}, (1, 1)),
    ],
)
def test_a_launcher_numbers_the_live_chips(
    environment: dict[str, str], chip: tuple[int, ...]
) -> None:
    assert chip_from(None, environment, HOLED) == chip
    assert chip_from("0,1", environment, HOLED) == (0, 1)  # one that was repaired


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({}, "none of RANK, SLURM_PROCID, JOB_COMPLETION_INDEX is set; name the chip"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "there are 4 tasks and .* has 3 live chips"),
        ({"SLURM_PROCID": "3"}, "from 0 to 2, but it is '3'"),
        ({"JOB_COMPLETION_INDEX": "x"}, "from 0 to 2, but it is 'x'"),
    ],
)
def test_a_launcher_that_does_not_fit_the_mesh_is_refused(
    environment: dict[str, str], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        chip_from(None, environment, HOLED)


def test_boards_are_of_two_by_two_chips_unless_said_otherwise() -> None:
    assert board_from(None, Mesh((4,))) == (1,)
    assert board_from(None, Mesh((4, 4))) == (2, 2)
    assert board_from(None, Mesh((4, 4, 4))) == (2, 2, 1)
    assert board_from("4x2", Mesh((4, 4))) == (4, 2)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    return file


def test_a_secret_is_taken_from_a_file_before_the_environment(secret_file: Path) -> None:
    secret_file.write_text("a secret from a file\n")

    outside = {"MESHMEND_SECRET": "a secret from outside"}
    assert secret_from(outside, secret_file) == "a secret from a file"
    assert secret_from(outside, None) == "a secret from outside"
    secret_file.write_text("\n")
    with pytest.raises(InputError, match="is empty; make one with: python -c"):
        secret_from({}, secret_file)


def test_a_secret_that_can_be_guessed_is_refused(secret_file: Path) -> None:
    secret_file.write_text("fifteen letters")

    words = r"needs a secret of at least 16 bytes, but got one of 15; make one with: python -c "
    with pytest.raises(InputError, match=f"--secret-file .*secret {words}"):
        secret_from({}, secret_file)
    with pytest.raises(InputError, match=f"MESHMEND_SECRET {words}"):
        secret_from({"MESHMEND_SECRET": "fifteen letters"}, None)
    with pytest.raises(InputError, match=f"MESHMEND_SECRET {words}"):
        Settings(HOLED, secret="fifteen letters")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_secret_file_that_others_can_use_is_refused(secret_file: Path, mode: int) -> None:
    secret_file.write_text("a secret that is long enough")
    secret_file.chmod(mode)

    with pytest.raises(InputError, match=f"has mode {mode:o}; run: chmod 600 .*/secret$"):
        secret_from({}, secret_file)


def test_a_device_is_no_secret_file() -> None:
    with pytest.raises(InputError, match="cannot read /dev/zero: it is a device"):
        secret_from({}, Path("/dev/zero"))


def test_who_has_a_coordinator_on_loopback_listens_on_loopback() -> None:
    assert address_toward(("127.0.0.1", 7000)) == "127.0.0.1"
    with pytest.raises(InputError, match=r"a route to its coordinator, but no\.such\.host"):
        address_toward(("no.such.host.invalid", 7000))


@pytest.mark.slow
def test_the_hosts_of_a_testbed_train_together_through_a_death(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chip is a host with an address of its own; nothing is shared by fork."""
    require_testbed()
    monkeypatch.setenv("MESHMEND_TESTBED_DIR", str(tmp_path / "records"))
    chips = Mesh((2, 2)).live
    with Testbed.up(Mesh((2, 2)), link_bandwidth=50e6 / 8) as bed:

        def start(chip: tuple[int, ...], name: str, *arguments: str) -> subprocess.Popen[bytes]:
            line = bed.command(chip, [sys.executable, "-m", "meshmend", *arguments])
            with (tmp_path / name).open("wb") as log:
                return subprocess.Popen(line, stdout=log, stderr=log)

        def worker(chip: tuple[int, ...], name: str) -> subprocess.Popen[bytes]:
            at = ",".join(map(str, chip))
            options = ["--mesh", "2x2", "--chip", at, "--run-dir", str(tmp_path / "run")]
            what = [str(script), "400", "0.02", str(gate)]
            return start(chip, name, "worker", "--coordinator", endpoint, *options, *what)

        def told() -> str:
            return (tmp_path / "coordinator").read_text()

        gate = tmp_path / "gate"
        endpoint = f"{bed.address((0, 0))}:7000"
        listen = ["--mesh", "2x2", "--board", "1x1", "--listen", endpoint]
        coordinator = start((0, 0), "coordinator", "coordinator", *listen)
        workers = {chip: worker(chip, f"{chip}") for chip in chips}
        try:
            until(lambda: "all 4 chips have finished" in told(), why=told)
            kill_inside(workers[1, 0])
            until(lambda: "chip (1, 0) is gone" in told(), why=told)
            workers[1, 0] = worker((1, 0), "again")
            until(lambda: told().count("connected, 4 of 4") == 2, why=told)
            gate.touch()
            codes = [process.wait(HANG_S) for process in (coordinator, *workers.values())]
        finally:
            for process in (coordinator, *workers.values()):
                process.kill()
                process.wait()

    assert codes == [0] * 5, told()
    assert re.findall(r": (\d) chips from", told()) == ["4", "3", "4"]
    last = [(tmp_path / name).read_text().splitlines()[-1] for name in ("(0, 0)", "again")]
    assert last[0] == last[1]
    assert last[0].startswith("finished 400 ")
    found = audit(tmp_path / "run" / "ledger")
    assert (found.steps, found.used, found.lost, found.repeated) == (400, 6400, 0, 0)
    assert found.hashed > 0
    assert not found.split


def kill_inside(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all below it: what enters a namespace may wait for what it started."""
    pids = [process.pid]
    for pid in pids:
        path = Path(f"/proc/{pid}/task/{pid}/children")
        pids += [int(child) for child in path.read_text().split()] if path.exists() else []
    for pid in reversed(pids):
        os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_torchrun_starts_a_worker_per_chip(tmp_path: Path, script: Path) -> None:
    port = free_port()
    run_dir = ["--run-dir", str(tmp_path / "run")]
    python = [sys.executable, "-m"]
    coordinator = subprocess.Popen(
        [*python, "meshmend", "coordinator", "--mesh", "2x2", "--listen", f"127.0.0.1:{port}"],
        stderr=subprocess.PIPE,
        text=True,
    )
    agent = subprocess.run(
        [
            *(*python, "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m"),
            *("meshmend", "worker", "--coordinator", f"127.0.0.1:{port}", "--mesh", "2x2"),
            *(*run_dir, str(script), "20", "0"),
        ],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    _, said = coordinator.communicate(timeout=HANG_S)

    assert agent.returncode == 0, agent.stderr
    assert coordinator.returncode == 0, said
    assert len(set(agent.stdout.splitlines())) == 1
    assert agent.stdout.count("finished 20") == 4
    found = audit(tmp_path / "run" / "ledger")
    assert (found.steps, found.used, found.lost, found.repeated) == (20, 320, 0, 0)


@pytest.mark.parametrize("option", ["--new", "--restarted"])
def test_an_option_about_an_earlier_run_needs_its_record(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_line(["coordinator", "--mesh", "2x2", "--listen", "127.0.0.1:0", option]) == 2
    expected = f"meshmend: {option} needs --state FILE, the record of an earlier run\n"
    assert capsys.readouterr().err == expected
