"""The supervisor: real processes that die, fall silent, fail again and again, or finish."""

import fcntl
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import pytest

from meshmend.errors import TerminatedError
from meshmend.launch import slurm, supervisor
from meshmend.launch.slurm import StepCommand, SupervisedJob, supervise
from meshmend.launch.supervisor import (
    Child,
    Ending,
    KeptProcess,
    ProcessSpec,
    RestartPolicy,
    Supervisor,
)
from meshmend.launch.termination import terminable
from meshmend.launch.worker import Place
from waiting import HANG_S, until

ALIVE = "print('meshmend-agent alive', flush=True)"
FINISHED = "print('meshmend-agent ended 0', flush=True)"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", f"import os, time\n{program}"]


def step(program: str, starts_within_s: float = 60.0) -> Callable[[], StepCommand]:
    return lambda: StepCommand(python(program), os.environ, starts_within_s)


def once(marker: Path, first: str, then: str) -> str:
    """Return a program that does one thing at its first run, and another later."""
    return (
        f"if os.path.exists({str(marker)!r}):\n    {then}\n"
        f"else:\n    open({str(marker)!r}, 'w')\n    {first}\n"
    )


def when_exists(marker: Path, then: str) -> str:
    """Return a program that does something as soon as a file is there."""
    return f"while not os.path.exists({str(marker)!r}): time.sleep(0.01)\n{then}"


def waiting_for(marker: Path, code: int = 0) -> list[str]:
    """Return the command of a coordinator that ends when a file is there."""
    return python(when_exists(marker, f"os._exit({code})"))


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_exit_code_is_that_of_the_coordinator(code: int, tmp_path: Path) -> None:
    over = tmp_path / "over"
    program = f"{ALIVE}\nopen({str(over)!r}, 'w')\n{FINISHED}"

    ends: list[bool] = []
    job = SupervisedJob(
        lambda: waiting_for(over, code), {"a": step(program)}, on_over=lambda: ends.append(True)
    )

    assert supervise(job) == code
    assert ends == [True]


def test_a_coordinator_that_is_killed_is_started_again(tmp_path: Path) -> None:
    over = tmp_path / "over"
    killed = once(tmp_path / "killed", "os.kill(os.getpid(), 9)", f"open({str(over)!r}, 'w')")
    program = f"{ALIVE}\n{when_exists(over, FINISHED)}"
    starts: list[float] = []

    def coordinator() -> list[str]:
        starts.append(time.monotonic())
        return python(killed)

    assert supervise(SupervisedJob(coordinator, {"a": step(program)})) == 0
    assert len(starts) == 2


def test_a_coordinator_that_hangs_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_ASK_AFTER_S", 0.1)
    monkeypatch.setattr(supervisor, "_ASK_EVERY_S", 0.01)
    hung, over = tmp_path / "hung", tmp_path / "over"
    program = once(hung, "os.kill(os.getpid(), 19)", f"open({str(over)!r}, 'w')")
    starts: list[list[str]] = []

    def coordinator() -> list[str]:
        starts.append(python(program))
        return starts[-1]

    job = SupervisedJob(
        coordinator,
        {"a": step(f"{ALIVE}\n{when_exists(over, FINISHED)}")},
        is_answered=lambda: len(starts) > 1 or not hung.exists(),
    )

    assert supervise(job) == 0
    assert len(starts) == 2


def test_a_step_that_ends_without_an_agents_last_line_is_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    over = tmp_path / "over"
    again = f"print('hello'); open({str(over)!r}, 'w'); {FINISHED}"
    program = once(tmp_path / "died", f"{ALIVE}; os._exit(0)", again)

    assert supervise(SupervisedJob(lambda: waiting_for(over), {"host 0,0": step(program)})) == 0
    out, err = capfd.readouterr()
    assert out == "hello\n"
    assert "host 0,0 ended: exit code 0; it is started again in" in err


def test_a_step_that_falls_silent_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_SILENT_S", 0.5)
    over = tmp_path / "over"
    again = f"open({str(over)!r}, 'w'); {FINISHED}"
    program = once(tmp_path / "died", f"{ALIVE}; time.sleep(600)", again)
    killed: list[str] = []

    job = SupervisedJob(lambda: waiting_for(over), {"a": step(program)}, killed.append)

    assert supervise(job) == 0
    assert killed == ["a"]


def test_a_step_that_never_says_a_word_is_started_again(tmp_path: Path) -> None:
    over = tmp_path / "over"
    again = f"open({str(over)!r}, 'w'); {FINISHED}"
    program = once(tmp_path / "died", "time.sleep(600)", again)

    job = SupervisedJob(lambda: waiting_for(over), {"a": step(program, starts_within_s=1.0)})

    assert supervise(job) == 0


def test_a_job_all_of_whose_steps_fail_again_and_again_ends_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm, "_POLICY", RestartPolicy(0.05, 0.05, 5, 60.0))
    job = SupervisedJob(lambda: waiting_for(tmp_path / "never"), {"a": step("os._exit(1)")})

    assert supervise(job) == 1
    assert "every step has failed again and again; the job ends" in capfd.readouterr().err


def test_a_job_all_of_whose_agents_have_given_up_ends_at_once(tmp_path: Path) -> None:
    gives_up = "print('meshmend-agent ended 1', flush=True)"
    program = once(tmp_path / "started", gives_up, "time.sleep(600)")

    job = SupervisedJob(lambda: waiting_for(tmp_path / "never"), {"a": step(program)})

    assert supervise(job) == 1


def test_sigterm_ends_all_processes(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    note = f"open(os.path.join({str(pids)!r}, str(os.getpid())), 'w')"
    job = SupervisedJob(
        lambda: python(f"{note}\ntime.sleep(600)"),
        {"a": step(f"{note}\n{ALIVE}\ntime.sleep(600)")},
    )

    def terminate() -> None:
        until(lambda: len(list(pids.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    with pytest.raises(TerminatedError), terminable():
        supervise(job)
    thread.join()
    assert not [path for path in pids.iterdir() if Path(f"/proc/{path.name}/fd").exists()]


def kept_until_over(
    program: str, judge: Callable[[Child], Ending], policy: RestartPolicy
) -> tuple[KeptProcess, list[str]]:
    """Keep a program running until it is not started again; return it, and the lines about it."""
    told: list[str] = []
    processes = Supervisor()
    kept = processes.keep(
        ProcessSpec("it", lambda: processes.spawn(python(program)), judge, policy, tell=told.append)
    )
    try:
        while not kept.is_done and not kept.has_given_up:
            processes.serve(0.01)
            processes.restart_due()
    finally:
        processes.end_all()
    return kept, told


def test_a_process_that_fails_is_started_again_until_it_has_failed_too_often() -> None:
    policy = RestartPolicy(0.01, 0.02, most_failures=3)
    kept, told = kept_until_over("os._exit(7)", lambda child: Ending.FAILED, policy)

    assert kept.n_failures == 3
    assert told == ["it ended: exit code 7; it is started again in 0.0 s"] * 2


def test_a_process_that_is_killed_from_outside_does_not_give_up() -> None:
    ends: list[str] = []

    def judge(child: Child) -> Ending:
        ends.append(child.how_it_ended)
        return Ending.KILLED if len(ends) < 5 else Ending.DONE

    program = "os.kill(os.getpid(), 9)"
    kept, _ = kept_until_over(program, judge, RestartPolicy(0.01, 0.02, most_failures=2))

    assert kept.is_done
    assert ends == ["killed by SIGKILL"] * 5


@pytest.mark.parametrize(
    ("code", "words", "is_killed"),
    [(0, "exit code 0", False), (255, "exit code 255", False), (143, "killed by SIGTERM", True)],
)
def test_an_exit_code_names_the_signal_if_there_is_one(
    code: int, words: str, is_killed: bool
) -> None:
    processes = Supervisor()
    child = processes.fork("", lambda pipes, parent: os._exit(code))
    until(lambda: processes.serve(0.1) and child.code is not None)
    processes.end_all()

    assert (child.code, child.how_it_ended, bool(child.killed_by)) == (code, words, is_killed)


def test_after_the_last_process_the_collector_sees_all_objects_again() -> None:
    """Else this process would end without freeing what it had imported."""
    processes = Supervisor()
    processes.fork("", lambda pipes, parent: os._exit(0))
    assert gc.get_freeze_count() > 0

    processes.end_all()

    assert gc.get_freeze_count() == 0


def test_what_a_process_wrote_last_is_read_before_its_end_is_judged() -> None:
    """Its pipe holds more than is read at once when its end is noticed."""
    lines: list[bytes] = []

    def take(line: bytes) -> bool:
        lines.append(line)
        return True

    enlarge = f"import fcntl\nfcntl.fcntl(1, {fcntl.F_SETPIPE_SZ}, 1 << 20)\n"
    written = "os.write(1, b'x\\n' * 200_000)\nos.write(1, b'last words\\n')"
    processes = Supervisor()
    child = processes.spawn(python(enlarge + written), take=take)
    time.sleep(1.0)  # it has ended meanwhile, most likely
    while child.code is None:
        processes.serve(None)
    assert lines[-1] == b"last words"
    processes.end_all()


def test_a_stopped_process_is_ended_by_sigterm_all_the_same(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        # A signal that comes just before a sleep begins does not end it: so it sleeps often. And
        # what a handler raises while the end of a file object closes it is lost: so a folder.
        f"os.mkdir({str(ready)!r})\nwhile True: time.sleep(0.05)"
    )
    processes = Supervisor()
    child = processes.spawn(python(program))
    until(ready.exists)
    child.signal(signal.SIGSTOP)
    processes.end_all()

    assert child.code == 5


def code_of_worker(body: Callable[[], object]) -> int | None:
    """Return the exit code of a worker that does something and succeeds."""
    processes = Supervisor()
    child = processes.fork_worker(lambda: 0 if body() is None else 1, Place((0, 0)))
    until(lambda: processes.serve(0.01) and child.code is not None)
    processes.end_all()
    return child.code


@pytest.mark.parametrize("stream", [None, io.BytesIO()], ids=["none", "closed"])
def test_a_worker_that_has_closed_its_standard_output_ends_well(stream: IO[bytes] | None) -> None:
    def replace() -> None:
        if stream is not None:
            stream.close()
        setattr(sys, "stdout", stream)  # noqa: B010  # of another type than the stubs want

    assert code_of_worker(replace) == 0


def test_what_a_worker_prints_past_its_own_standard_output_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As scripts do that copy their output to a file."""

    def print_beside() -> None:
        sys.stdout = io.StringIO()
        print("to both", file=sys.__stdout__, end="")

    assert code_of_worker(print_beside) == 0
    assert "[0,0] to both" in capfd.readouterr().out


@pytest.mark.parametrize("in_pool", [False, True], ids=["thread", "pool"])
def test_a_worker_waits_for_the_threads_of_its_script(tmp_path: Path, *, in_pool: bool) -> None:
    """Python does so, and scripts rely on it: what they trained may be written by a thread."""
    written = tmp_path / "written"

    def write() -> None:
        time.sleep(0.2)
        written.touch()

    def begin_to_write() -> None:
        if in_pool:
            ThreadPoolExecutor(1).submit(write)
        else:
            threading.Thread(target=write).start()

    assert code_of_worker(begin_to_write) == 0
    assert written.exists()


def test_a_process_that_was_just_forked_and_has_done_nothing_yet_is_killed() -> None:
    """On a busy machine it may take seconds until it makes itself a process group."""
    processes = Supervisor()

    def sleep(pipes: object, parent: int) -> None:
        time.sleep(HANG_S)
        os._exit(0)

    child = processes.fork("", sleep)
    child.signal(signal.SIGKILL)
    until(lambda: processes.serve(0.01) and child.code is not None)

    assert child.killed_by is signal.SIGKILL
    processes.end_all()


def test_a_second_sigterm_takes_no_time_from_the_processes_that_end(tmp_path: Path) -> None:
    """`timeout` sends two."""
    ready, again = tmp_path / "ready", tmp_path / "again"
    program = (
        "import os, signal, sys\n"
        f"def end(*_):\n    os.kill({os.getpid()}, signal.SIGTERM)\n"
        f"    open({str(again)!r}, 'w')\n    sys.exit(5)\n"
        f"signal.signal(signal.SIGTERM, end)\nos.mkdir({str(ready)!r})\ntime.sleep(600)"
    )
    processes = Supervisor()
    child = processes.spawn(python(program))
    until(ready.exists)
    with terminable():
        processes.end_all()

    assert again.exists()
    assert child.code == 5
