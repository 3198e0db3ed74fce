"""A look inside a running job of real processes: status, metrics and structured logs."""

import json
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commanding import Command, commands
from ports import free_port
from training_script import training_script
from waiting import HANG_S, until

pytest.importorskip("torch")

CHIPS = ("0,0", "0,1", "1,0", "1,1")

# Steps slowly until the gate is open. Says something on standard error in its own way.
SCRIPT = training_script(
    "batch=16, steps=1_000_000",
    """
    time.sleep(0.05)
    if os.path.exists(sys.argv[1]):
        raise ValueError("the gate is open")
    """,
    first=r'print("a plain line\nand half", end="", file=sys.stderr)',
)


class WatchedJob:
    """A job on a 2x2 mesh whose processes write structured logs."""

    def __init__(self, start: Callable[..., Command], folder: Path) -> None:
        self._start, self._folder = start, folder
        self.where = f"127.0.0.1:{free_port()}"
        self.metrics = f"127.0.0.1:{free_port()}"
        self.gate, self.record = folder / "gate", folder / "a record.json"
        self._script = folder / "script.py"
        self._script.write_text(SCRIPT)
        self._n_started = 0

    def coordinator(self) -> Command:
        self._n_started += 1
        where = ("--listen", self.where, "--metrics", self.metrics, "--state", self.record)
        line = ("coordinator", "--mesh", "2x2", "--board", "1x1", "--log-json", "--job", "ours")
        return self._start(
            f"coordinator{self._n_started}", *line, *where, "--set", "timing.heartbeat_timeout=60"
        )

    def worker(self, chip: str) -> Command:
        mine = ("--chip", chip, "--coordinator", self.where, "--mesh", "2x2", "--board", "1x1")
        line = ("worker", "--log-json", "--job", "ours", *mine, self._script, self.gate)
        return self._start(f"worker{chip}", *line)

    def status(self, *options: str) -> dict[str, Any]:
        self._n_started += 1
        name = f"status{self._n_started}"
        line = ("status", "--coordinator", self.where, "--json", "--timeout", "60", *options)
        asked = self._start(name, *line)
        assert asked.end() == 0, asked.err
        document: dict[str, Any] = json.loads(asked.out)
        return document

    def scrape(self) -> dict[str, float]:
        url = f"http://{self.metrics}/metrics"
        with urllib.request.urlopen(url, timeout=HANG_S) as answer:
            lines = answer.read().decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedJob]:
    monkeypatch.setenv("MESHMEND_SECRET", "only the chips of this test know")
    monkeypatch.setenv("MESHMEND_NONSENSE", "1")  # a warning, which must be JSON too
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with commands(tmp_path, plan_ahead=True) as start:
        yield WatchedJob(start, tmp_path)


def records(command: Command) -> list[dict[str, Any]]:
    """Return all that a process wrote on standard error, every line of which must be JSON."""
    return [json.loads(line) for line in command.err.splitlines()]


def check_logs(coordinator: Command, workers: dict[str, Command]) -> None:
    for command in (coordinator, *workers.values()):
        for each in records(command):
            assert {"time", "level", "logger", "message", "chip", "job"} <= each.keys()
    arrived = [each for each in records(coordinator) if " connected, " in each["message"]]
    assert sorted(each["chip"] for each in arrived) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert arrived[0]["event"]["event"] == "arrived"
    said = records(workers["0,1"])
    assert {str(each["chip"]) for each in said if each["job"] == "ours"} == {"[0, 1]"}
    messages = [each["message"] for each in said]
    assert any("there is no variable MESHMEND_NONSENSE" in each for each in messages)
    assert "a plain line" in messages
    assert "and half" in messages


def test_a_job_is_looked_into_with_and_without_its_coordinator(job: WatchedJob) -> None:
    first = job.coordinator()
    workers = {chip: job.worker(chip) for chip in CHIPS}
    until(lambda: "have finished step 1," in first.err, why=lambda: first.err)

    seen = job.status("--job", "ours")
    assert (seen["answered_by"], seen["phase"], seen["job"]) == (None, "training", "ours")
    assert [each["chip"] for each in seen["workers"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert seen["arguments"][0]["fingerprint"]["batch"] == 16
    link = 'meshmend_link_sent_bytes_total{chip="0,0",peer="0,1"}'
    until(lambda: job.scrape().get(link, 0) > 0)  # each chip tells its bytes by itself
    counted = job.scrape()
    assert (counted["meshmend_live_chips"], counted["meshmend_generation"]) == (4, 1)
    assert counted["meshmend_steps_total"] > 0
    assert counted["meshmend_sent_bytes_total"] >= counted[link]
    until(lambda: job.scrape().get("meshmend_planned_boards") == 4)  # the host plans ahead
    assert job.status("--job", "ours")["planned"] == [4, 4]

    first.signal(signal.SIGKILL)
    first.end()
    alone = job.status()  # it remembers where the workers listen
    assert alone["answered_by"] is not None
    assert (alone["phase"], alone["generation"]["number"]) == ("training", 1)
    assert len(alone["workers"]) >= 1
    assert alone["step"] >= seen["step"]
    by_record = job.status("--state", str(job.record))
    assert by_record["answered_by"] is not None

    second = job.coordinator()
    until(lambda: job.status()["answered_by"] is None)
    until(lambda: "connected, 4 of 4" in second.err, why=lambda: second.err)
    job.gate.touch()
    assert [worker.end() for worker in workers.values()] == [1, 1, 1, 1]
    second.signal(signal.SIGTERM)
    assert second.end() == 143
    check_logs(first, workers)
    (raised,) = [each for each in records(workers["1,1"]) if "ValueError" in each["message"]]
    assert raised["level"] == "error"
    assert "the gate is open" in raised["message"]
