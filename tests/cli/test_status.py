"""`meshmend status`: what it shows, what it refuses, and whom it remembers."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from meshmend.cli.main import run_line
from meshmend.cli.status_view import picture
from meshmend.membership.events import FabricMeasured, WorkerLeft
from meshmend.membership.generation import Generation, Seat
from meshmend.membership.history import BegunGeneration, CoordinatorRecord
from meshmend.membership.job import JobFingerprint
from meshmend.membership.job_status import (
    ChangeCause,
    ChipsWait,
    FinishedChange,
    JobPhase,
    JobStatus,
    PastChange,
    PastEvent,
    SharedArguments,
    WorkerSummary,
)
from meshmend.membership.record_file import RecordFile
from meshmend.topology.failures import parse_link
from meshmend.transport.listener import Address
from ports import free_port
from served_coordinator import served_coordinator
from waiting import HANG_S, until

SECRET = "only the chips of this test know"
PRINT = JobFingerprint("0.1", 100, 64, 0, "constant", "a model", "SGD(lr)", 500, "ab12")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The secret in the environment, and a cache of our own."""
    monkeypatch.setenv("MESHMEND_SECRET", SECRET)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@contextmanager
def served(mesh: str = "2x2x2", address: Address = ("127.0.0.1", 0)) -> Iterator[str]:
    """Yield HOST:PORT of a coordinator of a job that waits for its workers."""
    with served_coordinator(mesh, SECRET.encode(), address) as (host, port):
        yield f"{host}:{port}"


def shown(status: JobStatus, width: int = 110) -> str:
    console = Console(width=width, height=50, force_terminal=False)
    with console.capture() as capture:
        console.print(picture(status, width, 40), highlight=False)
    return capture.get()


def half_formed() -> JobStatus:
    """A 3-D mesh: six of eight chips are members, one waits, one is gone, one is behind."""
    chips = [(z, y, x) for z in range(2) for y in range(2) for x in range(2)]
    members, waits = chips[:6], chips[6]
    workers = [
        WorkerSummary(chip, ("host", 1), 4, 41, behind_s=8.0 if chip == chips[2] else None)
        for chip in members
    ]
    return JobStatus(
        "ours",
        "0.1",
        (2, 2, 2),
        JobPhase.TRAINING,
        3725.0,
        41,
        generation=Generation(
            4,
            tuple(Seat(chip, ("host", 1), 1) for chip in members),
            cut=frozenset([parse_link("link:0,0,0-0,0,1")]),
        ),
        step_ago_s=8.2,
        steps_per_s=2.5,
        samples_per_s=160.0,
        planned=(12, 16),
        fabric=FabricMeasured(6.15e6, 44e-6, 12e-6, 0),
        waits=(
            ChipsWait((waits,), (), "its board must be complete, but (1, 1, 1) is missing", 30.0),
            ChipsWait(tuple(members[:2]), (chips[2],), "the sum needs the gradients of all", 8.0),
        ),
        workers=(*workers, WorkerSummary(waits, ("host", 1), None, 0)),
        arguments=(SharedArguments(PRINT, tuple(members)),),
        events=(PastEvent(62.0, WorkerLeft(chips[7], "chip (1, 1, 1) is gone")),),
        changes=(PastChange(61.5, FinishedChange(ChangeCause.LEFT, 0.4, 6, 30, 4)),),
    )


def test_a_half_formed_mesh_shows_who_lives_who_waits_and_what_happened() -> None:
    text = " ".join(shown(half_formed()).split())

    for words in (
        "job 'ours' on mesh 2x2x2: training answered by the coordinator, up 1 h 2 min",
        "■ 5 alive ◌ 1 waiting ▲ 1 hung ✕ 1 dead",
        "step 41 of 100, 8.20 s ago",
        "rate 2.5 steps/s, 160 samples/s",
        "generation 4 with 6 chips, without link:0,0,0-0,0,1",
        "plans ahead for the loss of 12 of 16 boards",
        "fabric plans for reference; measured: 6.15MB/s,44us,12us",
        "1,1,0 waits, 30.00 s so far: its board must be complete, but (1, 1, 1) is missing",
        "1x1x2@0,0,0 wait for 0,1,0, 8.00 s so far: the sum needs the gradients of all",
        "62.00 s ago chip (1, 1, 1) is gone",
        "61.50 s ago all 6 chips have finished step 30, 0.40 s after the first chip left",
        "meshmend 0.1, 100 steps of 64 samples, seed 0, policy constant, SGD(lr), a model",
    ):
        assert words in text


def test_a_worker_shows_a_chip_that_it_has_lost_as_dead_and_others_unheard_as_alive() -> None:
    chips = [(0, 0), (0, 1), (0, 2)]
    status = JobStatus(
        "ours",
        "0.1",
        (1, 4),
        JobPhase.TRAINING,
        1.0,
        0,
        answered_by=chips[0],
        generation=Generation(4, tuple(Seat(chip, ("host", 1), 1) for chip in chips)),
        waits=(ChipsWait((chips[0],), (chips[2],), "it lost its connection to them"),),
        workers=(WorkerSummary(chips[0], ("host", 1), 4, 0),),
    )

    assert "■ 2 alive ✕ 2 dead" in " ".join(shown(status).split())


@pytest.mark.parametrize("shape", [(1,), (1, 9), (64, 64), (3, 4, 5), (2, 2, 2, 2)])
@pytest.mark.parametrize("phase", list(JobPhase))
@pytest.mark.parametrize("width", [20, 80])
def test_any_job_can_be_drawn(shape: tuple[int, ...], phase: JobPhase, width: int) -> None:
    chip = (0,) * len(shape)
    worker = WorkerSummary(chip, ("host", 1), None, 0)
    status = JobStatus(
        "ours", "0.1", shape, phase, 1.0, 0, answered_by=chip, workers=(worker,), failure="why"
    )

    assert phase.value in " ".join(shown(status, width).split())


def test_a_running_coordinator_is_shown_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as where:
        assert run_line(["status", "--coordinator", where]) == 0
        assert "job 'ours' on mesh 2x2x2: gathering" in capsys.readouterr().out

        assert run_line(["status", "--coordinator", where, "--json", "--job", "ours"]) == 0
        document = json.loads(capsys.readouterr().out)
    assert (document["job"], document["shape"], document["step"]) == ("ours", [2, 2, 2], 0)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line that a wrong command prints."""
    assert run_line(["status", "--timeout", "0.3", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs to know whom to ask, but got neither --coordinator HOST:PORT nor --worker"),
        (["--coordinator", "host"], "--coordinator needs HOST:PORT such as 10.0.0.1:7000"),
        (["--coordinator", "[::1]:7000"], "meshmend does not speak IPv6"),
        (["--worker", "::1:7000"], "--worker needs HOST:PORT with a name or an IPv4 address"),
        (["--coordinator", "127.0.0.1:70000"], "but got '127.0.0.1:70000'"),
        (["--state", "no such file"], "cannot read the coordinator's record no such file: No such"),
        (["--timeout", "0"], "Invalid value for '--timeout'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, *arguments)


def test_a_coordinator_that_is_not_there_is_one_line_that_says_what_to_give(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refusal(capsys, "--coordinator", f"127.0.0.1:{free_port()}")

    assert "Connection refused" in line
    assert "name a worker with --worker HOST:PORT, or the coordinator's record with" in line


def test_no_secret_another_secret_and_another_job_are_one_line_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served() as where:
        assert "belongs to job 'x'" in refusal(capsys, "--coordinator", where, "--job", "x")
        monkeypatch.setenv("MESHMEND_SECRET", "another secret of enough bytes")
        assert "does not know the job's secret" in refusal(capsys, "--coordinator", where)
        monkeypatch.delenv("MESHMEND_SECRET")
        assert "MESHMEND_SECRET is not set" in refusal(capsys, "--coordinator", where)


def test_a_file_that_is_no_record_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a record.json"
    path.write_text("[]")
    assert "is no record of a coordinator: its version is None" in refusal(
        capsys, "--state", str(path)
    )


def test_the_record_says_where_the_workers_listen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever listens there may answer: here it is a coordinator."""
    path = tmp_path / "a record.json"
    with served() as where:
        host, port = where.split(":")
        begun = BegunGeneration(3, (((0, 0, 0), (host, int(port))),))
        RecordFile(path).save(CoordinatorRecord("ours", (begun,)))

        nobody = f"127.0.0.1:{free_port()}"
        assert run_line(["status", "--coordinator", nobody, "--state", str(path)]) == 0
    assert "job 'ours'" in capsys.readouterr().out


def test_the_cache_of_workers_may_be_damaged_or_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served() as where:
        file = tmp_path / "cache" / "meshmend" / "status" / f"{where.replace(':', '-')}.json"
        file.parent.mkdir(parents=True)
        for text in ("", "{}", "[1]", '[["host"]]', '[["host", "x"]]'):
            file.write_text(text)
            assert run_line(["status", "--coordinator", where]) == 0
        monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
        assert run_line(["status", "--coordinator", where]) == 0
    assert not capsys.readouterr().err


# A process of its own: one that is forked from this would keep the coordinator's socket open.
INTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from meshmend.cli.main import main; main()"
)


class Watch:
    """A `meshmend status --watch` under way; what it prints goes to files."""

    def __init__(self, folder: Path, where: str, *options: str) -> None:
        self._out, self._err = folder / "out", folder / "err"
        folder.mkdir()
        line = [sys.executable, "-c", INTERRUPTIBLE, "status", "--watch", "--coordinator", where]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen([*line, *options], stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def interrupt(self) -> int:
        """Press Ctrl-C, and return the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(HANG_S)


def test_watching_survives_a_restart_of_the_coordinator_and_ends_with_ctrl_c(
    tmp_path: Path,
) -> None:
    address = ("127.0.0.1", free_port())
    where = f"127.0.0.1:{address[1]}"
    with ExitStack() as stack:
        with served(address=address):
            watch, plain = Watch(tmp_path / "w", where, "--json"), Watch(tmp_path / "p", where)
            for each in (watch, plain):
                stack.callback(each.process.kill)
            until(lambda: watch.out.count("\n") >= 2 and "gathering" in plain.out)
        until(lambda: "nobody answers" in watch.err and "no answer for" in plain.out)
        n_before, shown_before = watch.out.count("\n"), plain.out.count("gathering")
        with served(address=address):
            until(lambda: watch.out.count("\n") > n_before + 1)
            until(lambda: plain.out.count("gathering") > shown_before)
            assert [watch.interrupt(), plain.interrupt()] == [130, 130]
    assert all(json.loads(line)["job"] == "ours" for line in watch.out.splitlines())
    assert "Traceback" not in watch.err + plain.err


def test_status_imports_neither_numpy_nor_numba_nor_torch(tmp_path: Path) -> None:
    """It must answer within half a second, and most of that is imports."""
    program = (
        "import sys; from meshmend.cli.main import run_line; code = run_line(sys.argv[1:]); "
        "print(sorted({'numpy', 'numba', 'scipy', 'torch'} & set(sys.modules)), code)"
    )
    with served() as where:
        done = subprocess.run(
            [sys.executable, "-c", program, "status", "--coordinator", where],
            capture_output=True,
            text=True,
            check=True,
        )
    assert re.search(r"^\[\] 0$", done.stdout, re.MULTILINE), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ("9090", "--metrics needs HOST:PORT such as 10.0.0.1:7000, but got '9090'"),
        ("[::1]:9090", "meshmend does not speak IPv6"),
        ("PORT", "cannot listen on 127.0.0.1:"),
    ],
)
def test_metrics_where_nothing_can_listen_are_one_line(
    metrics: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}" if metrics == "PORT" else metrics
        line = ["coordinator", "--mesh", "2x2", "--listen", "127.0.0.1:0", "--metrics", where]

        assert run_line(line) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert words in said
