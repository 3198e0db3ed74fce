"""`meshmend agent`: one worker per chip of a host, started again when it dies."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from commanding import Command, commands
from ports import free_port
from training_script import WRONG_FROM_STEP_8, training_script
from waiting import until

pytest.importorskip("torch")

from meshmend.errors import InputError
from meshmend.launch.hosts import chips_from
from meshmend.launch.slurm_watch import AgentLine, read_agent_line
from meshmend.pages.report.training_run import training_run
from meshmend.topology.mesh import Mesh
from meshmend.train.data.audit import audit
from meshmend.train.state.checkpoint import complete_steps

# Each worker writes its process number into a file. Half-way it waits for the gate. A test that
# needs steps after a kill closes an earlier gate first: else all may be half-way before the kill.
SCRIPT = training_script(
    "batch=int(sys.argv[2]), steps=40, saving=Saving(folder / 'checkpoints', every=1000)",
    """
    written = folder / f".{name}"  # who reads the file finds all of it
    written.write_text(str(os.getpid()))
    written.rename(folder / name)
    while job.step_number == 10 and (folder / "closed").exists():
        time.sleep(0.02)
    while job.step_number == 20 and not (folder / "gate").exists():
        time.sleep(0.02)
    """,
    first="""
    folder = Path(sys.argv[1])
    name = f"{os.environ['MESHMEND_CHIP']} {os.environ['LOCAL_RANK']}"
    """,
)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMEND_SECRET", "only the chips of this test know")


class TwoHosts:
    """A job on a 2x2 mesh whose two hosts have a column each."""

    def __init__(self, folder: Path, start: object) -> None:
        self.folder, self.script = folder, folder / "script.py"
        self.script.write_text(SCRIPT)
        self._start = start
        self._endpoint = f"127.0.0.1:{free_port()}"

    def coordinator(self, *options: str | Path, name: str = "coordinator") -> Command:
        line = ("--mesh", "2x2", "--listen", self._endpoint, "--set", "timing.heartbeat_timeout=60")
        started: Command = self._start(name, "coordinator", *line, *options)  # type: ignore[operator]
        return started

    def agent(self, name: str, chips: str, *options: str, batch: int = 16) -> Command:
        line = ("--mesh", "2x2", "--coordinator", self._endpoint, "--chips", chips)
        keep = ("--run-dir", self.folder / "run")
        what = (self.script, self.folder, str(batch))
        started: Command = self._start(name, "agent", *line, *keep, *options, *what)  # type: ignore[operator]
        return started

    def worker(self, chip: str, local_rank: int) -> int:
        """Return the process number of a chip's worker, once it has done a step."""
        path = self.folder / f"{chip} {local_rank}"
        until(lambda: path.exists() and path.read_text().isdecimal())
        return int(path.read_text())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TwoHosts]:
    with commands(tmp_path) as start:
        yield TwoHosts(tmp_path, start)


def test_workers_that_are_killed_are_started_again_and_the_agents_end_with_the_job(
    job: TwoHosts,
) -> None:
    coordinator = job.coordinator()
    agents = [job.agent("left", "2x1@0,0"), job.agent("right", "2x1@0,1", "--supervised")]
    os.kill(job.worker("1,1", 1), signal.SIGKILL)
    until(lambda: coordinator.err.count("connected, 4 of 4") == 2, why=lambda: coordinator.err)
    (job.folder / "gate").touch()

    assert [agent.end() for agent in agents] == [0, 0], [agent.err for agent in agents]
    assert coordinator.end() == 0
    assert "the worker of chip (1, 1) ended: killed by SIGKILL; it is started" in agents[1].err
    found = audit(job.folder / "run" / "ledger")
    assert (found.steps, found.lost, found.repeated, found.faults) == (40, 0, 0, ())
    lines = agents[1].out.splitlines()
    assert (lines[0], lines[-1]) == ("meshmend-agent alive", "meshmend-agent ended 0")


def test_the_coordinator_of_several_hosts_writes_events_and_a_report(job: TwoHosts) -> None:
    run = job.folder / "run"
    keep = ("--run-dir", run, "--state", job.folder / "record.json")
    closed = job.folder / "closed"
    closed.touch()
    coordinator = job.coordinator(*keep)
    agents = [job.agent("left", "2x1@0,0"), job.agent("right", "2x1@0,1")]
    os.kill(job.worker("1,1", 1), signal.SIGKILL)
    until(lambda: coordinator.err.count("connected, 4 of 4") == 2, why=lambda: coordinator.err)
    closed.unlink()
    until(lambda: (run / "events.jsonl").read_text().count('"event":"recovered"') == 2)
    coordinator.signal(signal.SIGKILL)
    coordinator.end()
    coordinator = job.coordinator(*keep, name="second")
    until(lambda: coordinator.err.count("connected, 4 of 4") == 1, why=lambda: coordinator.err)
    (job.folder / "gate").touch()

    assert [agent.end() for agent in agents] == [0, 0], [agent.err for agent in agents]
    assert coordinator.end() == 0
    assert f"the report of the run is {run / 'report.html'}" in coordinator.err
    found = training_run((run / "events.jsonl").read_text().splitlines(keepends=True))
    assert found.n_done == 40
    assert found.chips == (4, 3, 4)
    assert [(each.fault, each.is_repair) for each in found.faults] == [
        ("chip (1, 1) is gone", False),
        ("chip (1, 1) joined", True),
    ]
    assert all(each.is_recovered for each in found.faults)
    assert (found.samples.lost, found.samples.repeated) == (0, 0)
    assert found.samples.used == 40 * 16
    assert "chip (1, 1) is gone" in (run / "report.html").read_text()


def test_a_coordinator_that_is_ended_writes_the_report_so_far(job: TwoHosts) -> None:
    run = job.folder / "run"
    coordinator = job.coordinator("--run-dir", run)
    job.agent("left", "2x1@0,0")
    job.agent("right", "2x1@0,1")
    job.worker("0,0", 0)
    until(lambda: '"step":20' in (run / "events.jsonl").read_text())

    coordinator.signal(signal.SIGTERM)

    assert coordinator.end() == 128 + signal.SIGTERM
    assert (run / "report.html").exists()
    assert training_run((run / "events.jsonl").read_text().splitlines(keepends=True)).end is None


def test_a_run_folder_that_cannot_be_made_is_refused_in_one_line(job: TwoHosts) -> None:
    (job.folder / "file").touch()
    coordinator = job.coordinator("--run-dir", job.folder / "file" / "run")

    assert coordinator.end() == 2
    assert "--run-dir needs a folder to write to" in coordinator.err
    assert "Traceback" not in coordinator.err


def test_an_agent_that_is_killed_takes_its_workers_along(job: TwoHosts) -> None:
    job.coordinator()
    agent = job.agent("left", "2x1@0,0")
    job.agent("right", "2x1@0,1")
    workers = [job.worker("0,0", 0), job.worker("1,0", 1)]

    agent.signal(signal.SIGKILL)

    agent.end()
    until(lambda: not any(Path(f"/proc/{pid}/fd").exists() for pid in workers))


def test_sigterm_ends_an_agent_and_its_workers(job: TwoHosts) -> None:
    job.coordinator()
    agent = job.agent("left", "2x1@0,0")
    job.agent("right", "2x1@0,1")
    workers = [job.worker("0,0", 0), job.worker("1,0", 1)]

    agent.signal(signal.SIGTERM)

    assert agent.end() == 128 + signal.SIGTERM
    assert not any(Path(f"/proc/{pid}/fd").exists() for pid in workers)


def test_sigterm_makes_the_workers_of_a_supervised_agent_save(job: TwoHosts) -> None:
    coordinator = job.coordinator()
    agents = [
        job.agent("left", "2x1@0,0", "--supervised"),
        job.agent("right", "2x1@0,1", "--supervised"),
    ]
    ranks = {"0,0": 0, "0,1": 0, "1,0": 1, "1,1": 1}
    workers = [job.worker(chip, rank) for chip, rank in ranks.items()]

    for agent in agents:
        agent.signal(signal.SIGTERM)
    for worker in workers:
        os.kill(worker, signal.SIGTERM)
    (job.folder / "gate").touch()

    assert [agent.end() for agent in agents] == [0, 0], [agent.err for agent in agents]
    assert coordinator.end() == 0
    assert complete_steps(job.folder / "checkpoints")


def test_sigterm_ends_a_supervised_agent_whose_coordinator_is_gone_too(job: TwoHosts) -> None:
    coordinator = job.coordinator("--state", job.folder / "run" / "coordinator.json")
    agent = job.agent("left", "2x1@0,0", "--supervised")
    job.agent("right", "2x1@0,1")
    workers = [job.worker("0,0", 0), job.worker("1,0", 1)]

    coordinator.signal(signal.SIGTERM)
    agent.signal(signal.SIGTERM)

    assert agent.end() == 128 + signal.SIGTERM
    assert agent.out.splitlines()[-1] == "meshmend-agent ended 143"
    assert not any(Path(f"/proc/{pid}/fd").exists() for pid in workers)


def test_an_agent_whose_workers_are_refused_ends_with_code_1(job: TwoHosts) -> None:
    coordinator = job.coordinator()
    job.agent("left", "2x1@0,0")
    until(lambda: "connected, 2 of 4" in coordinator.err, why=lambda: coordinator.err)

    agent = job.agent("right", "2x1@0,1", batch=32)

    assert agent.end() == 1
    assert "refused: batch is 32 on that chip, but 16 in this job" in agent.err
    assert "Traceback" not in agent.err


def test_a_chip_that_computes_wrong_numbers_leaves_alone_and_the_others_of_its_host_train_on(
    job: TwoHosts,
) -> None:
    job.script.write_text(
        training_script(
            "batch=16, steps=40, check_shares=4", "", first=WRONG_FROM_STEP_8.format(chip="1,1")
        )
    )
    coordinator = job.coordinator()

    agents = [job.agent("left", "2x1@0,0"), job.agent("right", "2x1@0,1")]

    assert [agent.end() for agent in agents] == [0, 0], [agent.err for agent in agents]
    assert coordinator.end() == 0
    assert "chip (1, 1) computed wrong numbers, and is out of the job until" in agents[1].err
    assert "it is started again" not in agents[1].err
    found = audit(job.folder / "run" / "ledger")
    assert (found.steps, found.lost, found.repeated, found.faults) == (40, 0, 0, ())


def test_a_chip_without_which_the_job_ends_says_so_on_its_own_host(job: TwoHosts) -> None:
    """Its board is not whole, so it waits until the others have finished."""
    coordinator = job.coordinator("--board", "2x1", "--set", "timing.gather=1")
    agents = [job.agent("left", "2x1@0,0"), job.agent("right", "0,1")]
    until(lambda: "0,1 waiting" in coordinator.err, why=lambda: coordinator.err)
    (job.folder / "gate").touch()

    assert [agent.end() for agent in agents] == [0, 0], [agent.err for agent in agents]
    assert coordinator.end() == 0
    assert agents[0].err == ""
    assert agents[1].err.splitlines() == [
        "[0,1] the job ended without chip (0, 1), which has no state: its "
        "board must be complete, but (1, 1) is missing"
    ]


def test_a_job_that_is_restarted_as_a_whole_begins_again_if_it_has_no_checkpoint(
    job: TwoHosts,
) -> None:
    record = ("--state", job.folder / "coordinator.json")
    coordinator = job.coordinator(*record)
    killed = [job.agent("left", "2x1@0,0"), job.agent("right", "2x1@0,1"), coordinator]
    until(lambda: audit(job.folder / "run" / "ledger").steps >= 20, why=lambda: coordinator.err)
    for process in killed:
        process.signal(signal.SIGKILL)
        process.end()
    (job.folder / "gate").touch()

    again = job.coordinator(*record, "--restarted", name="again")
    agents = [job.agent("left again", "2x1@0,0"), job.agent("right again", "2x1@0,1")]

    assert [agent.end() for agent in agents] == [0, 0], again.err
    assert again.end() == 0
    assert "going back to step 0" in again.err
    found = audit(job.folder / "run" / "ledger")
    assert (found.steps, found.lost, found.repeated, found.faults) == (40, 0, 0, ())
    assert found.redone >= 20


def test_an_agent_gives_up_a_script_that_always_fails(job: TwoHosts) -> None:
    job.script.write_text("raise ValueError('no such model')")
    job.coordinator()

    agent = job.agent("left", "0,0")

    assert agent.end() == 1
    assert agent.err.count("ValueError: no such model") == 5
    assert "chip (0, 0) has failed 5 times in a row; the agent gives up" in agent.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"meshmend-agent alive", AgentLine()),
        (b"meshmend-agent ended 143", AgentLine(143)),
        (b"[0,1] meshmend-agent alive", None),
        (b"meshmend-agent ended", None),
        (b"", None),
    ],
)
def test_the_lines_of_an_agent_are_told_from_those_of_its_workers(
    line: bytes, said: AgentLine | None
) -> None:
    assert read_agent_line(line) == said


def test_the_chips_of_a_host_are_the_live_chips_of_its_block() -> None:
    assert chips_from("2x2@0,2", Mesh((2, 4)).without("1,3")) == ((0, 2), (0, 3), (1, 2))
    assert chips_from("1,1", Mesh((2, 4))) == ((1, 1),)


@pytest.mark.parametrize("text", ["2x2@1,3", "2x2", "x", "link:0,0-0,1", "0,0,0", ""])
def test_chips_that_are_no_block_of_the_mesh_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--chips needs a block inside the mesh 2x4 such as"):
        chips_from(text, Mesh((2, 4)))


def test_a_block_without_a_live_chip_is_refused() -> None:
    with pytest.raises(InputError, match="--chips needs a live chip, but all chips of 1,1 have"):
        chips_from("1,1", Mesh((2, 4)).without("1,1"))
