"""The thousand kills: their checks find what is planted, and the driver gets through a handful."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from gloo_kills import Meeting, dist
from ledgers import BATCH, LedgerJob
from meshmend.membership.events import (
    Event,
    FaultHappened,
    FaultRecovered,
    GenerationBegan,
    RunEnded,
    RunStarted,
    StepFinished,
    TimedEvent,
    event_line,
)
from meshmend.membership.faults.fault import IN_LOOP, Fault, FaultKind
from meshmend.topology.failures import Chip
from meshmend.topology.text import parse_mesh
from meshmend.torch.versions import HAS_PYTHON_BACKENDS
from random_faults import FaultDriver, FaultSource
from thousand_kills import figures, noted_history, table
from thousand_kills_picture import picture

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "thousand_kills.py"
CHIPS: tuple[Chip, ...] = ((0, 0), (0, 1), (0, 2))
N_STEPS = 40
STEP_S, RECOVERED_S = 0.1, 1.5


def loss_of(step: int) -> float:
    return 4.0 * math.exp(-step / 20) + 1.0


def events(loss: Callable[[int], float], *, is_hit: bool) -> Iterable[tuple[float, Event]]:
    """Yield the events of a run that loses a chip after step 10, or of one that does not."""
    yield 0.0, RunStarted("4x4", N_STEPS, BATCH)
    yield 0.0, GenerationBegan(1, CHIPS, 0)
    at, chips = 0.0, CHIPS
    for step in range(1, N_STEPS + 1):
        if step == 11 and is_hit:
            yield at + 0.05, FaultHappened("kill 0,2", 10, FaultKind.KILL, CHIPS[2:])
            chips = CHIPS[:2]
            at += RECOVERED_S
            yield at, GenerationBegan(2, chips, 10)
        at += STEP_S
        yield at, StepFinished(step, 2 if len(chips) == 2 else 1, len(chips), loss(step), BATCH)
        if step == 11 and is_hit:
            took_s = RECOVERED_S + STEP_S - 0.05
            kill = FaultRecovered("kill 0,2", 10, 0.2, took_s, FaultKind.KILL, CHIPS[2:])
            yield at, kill
    yield at, RunEnded(N_STEPS)


def write_run(
    folder: Path, *, is_hit: bool, loss: Callable[[int], float] = loss_of, lost_step: int = 0
) -> None:
    """Write the events and the ledgers of a run; the ledgers may leave out the share of a chip."""
    (folder / "ledger").mkdir(parents=True)
    lines = [event_line(TimedEvent(at, event)) for at, event in events(loss, is_hit=is_hit)]
    (folder / "events.jsonl").write_text("".join(lines))
    job = LedgerJob(folder / "ledger")
    job.run(1, (0, 1, 2), after=0, to=10 if is_hit else N_STEPS)
    if is_hit:
        job.run(2, (0, 1), after=10, to=N_STEPS)
    job.close()
    if lost_step:
        ledger = next((folder / "ledger").glob("0-1.*"))
        kept = [
            line
            for line in ledger.read_text().splitlines(keepends=True)
            if not line.startswith(f"try {lost_step} ")
        ]
        ledger.write_text("".join(kept))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("kills", "kills64"):
        write_run(tmp_path / name, is_hit=True)
    for name in ("calm", "calm64"):
        write_run(tmp_path / name, is_hit=False)
    return tmp_path


def test_a_run_like_the_undisturbed_one_is_as_asked(runs: Path) -> None:
    found = figures(runs, 1, {})

    assert found["trouble"] == []
    ours = found["ours"]
    assert (ours["faults"], ours["repairs"], ours["workers_killed"]) == (1, 0, 1)
    assert ours["lost_median_s"] == pytest.approx(RECOVERED_S)
    assert ours["goodput"] == pytest.approx(N_STEPS * STEP_S / (N_STEPS * STEP_S + RECOVERED_S))
    assert ours["samples"] == {"used": BATCH * N_STEPS, "lost": 0, "repeated": 0}
    assert ours["mean_off"] == 0 == found["float64"]["loss_off"]
    assert "all as asked" in table(found | {"seed": 1})
    assert "1 kills" in picture(found | {"seed": 1})


def test_a_lost_sample_is_found(runs: Path) -> None:
    write_run(runs / "again", is_hit=True, lost_step=20)
    _replace(runs / "kills", runs / "again")

    (words,) = figures(runs, 1, {})["trouble"]

    assert "samples lost" in words


@pytest.mark.parametrize(
    ("part", "factor", "words"),
    [
        ("kills", 1.015, "the running mean of the loss is off by"),
        ("kills64", 1 + 1e-8, "the loss in float64 is off by"),
        ("kills", math.nan, "the running mean of the loss is off by"),
    ],
)
def test_a_wrong_loss_is_found(runs: Path, part: str, factor: float, words: str) -> None:
    write_run(
        runs / "again",
        is_hit=True,
        loss=lambda step: loss_of(step) * (factor if step > 5 else 1),
    )
    _replace(runs / part, runs / "again")

    (found,) = figures(runs, 1, {})["trouble"]

    assert words in found


def test_a_sound_link_that_counts_as_cut_is_told(runs: Path) -> None:
    path = runs / "kills" / "events.jsonl"
    path.write_text(path.read_text().replace('"cut":[]', '"cut":["link:0,0-0,1"]'))

    found = figures(runs, 1, {})

    assert found["ours"]["links_cut_by_nobody"] == ["link:0,0-0,1"]
    assert any("sound links" in line for line in table(found | {"seed": 1}))


def test_too_few_faults_and_a_part_that_failed_are_told(runs: Path) -> None:
    found = figures(runs, 2, {"calm": "no step for 180 s"})["trouble"]

    assert found == ["calm: no step for 180 s", "ours: 1 of 2 faults were injected"]


def test_what_was_interrupted_is_told_as_far_as_it_is_known(runs: Path) -> None:
    path = runs / "kills" / "events.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-20]) + '{"event":"st')
    for name in ("calm", "kills64", "calm64"):
        (runs / name / "events.jsonl").unlink()

    found = figures(runs, 1, {"interrupted": "this run was interrupted"})

    assert found["ours"]["faults"] == 1
    assert any("interrupted" in line for line in table(found | {"seed": 1}))


def driven(n_faults: int, pause_s: float, can_do: Callable[[Fault], bool]) -> list[Fault]:
    """Return the faults of a job that recovers at once and does a step in so many seconds."""
    mesh = parse_mesh("4x4")
    driver = FaultDriver(FaultSource(mesh, (2, 2), random.Random(5)), n_faults, can_do)
    found: list[Fault] = []
    for step in range(100_000):
        faults = driver.next_faults(step, pause_s * step, has_recovered=True)
        if faults is None:
            return found
        found += faults
    raise AssertionError("it does not end")


def test_the_same_seed_gives_the_same_faults_whatever_the_pace() -> None:
    slow, fast = (driven(300, pause_s, lambda fault: True) for pause_s in (1.0, 0.01))

    assert [str(fault) for fault in slow] == [str(fault) for fault in fast]
    hits = [fault for fault in slow if fault.kind is not FaultKind.REPAIR]
    assert 300 <= len(hits) <= 301  # two may come at once
    assert {fault.kind for fault in slow} == set(FaultKind) - IN_LOOP


def test_faults_that_cannot_be_done_are_left_out_and_the_others_stay() -> None:
    every = driven(100, 0.1, lambda fault: True)
    some = driven(100, 0.1, lambda fault: bool(fault.chips()))

    kept = [str(fault) for fault in every if fault.chips()]
    assert [str(fault) for fault in some][: len(kept)] == kept


def test_no_fault_comes_before_the_job_has_recovered_unless_that_takes_too_long() -> None:
    driver = FaultDriver(FaultSource(parse_mesh("4x4"), (2, 2), random.Random(0)), 10)
    assert driver.next_faults(10, 1.0, has_recovered=True)

    assert driver.next_faults(20, 2.0, has_recovered=False) == ()
    assert driver.next_faults(21, 10.0, has_recovered=False) == ()
    assert driver.next_faults(22, 32.0, has_recovered=False) == ()  # a step or two more
    assert driver.next_faults(24, 32.1, has_recovered=False)


def test_the_last_chips_that_train_are_spared() -> None:
    """The others may have been waiting, and have an old state or none."""
    trains = frozenset([(0, 2), (0, 3), (1, 3)])
    driver = FaultDriver(FaultSource(parse_mesh("4x4"), (2, 2), random.Random(1)), 500)
    dead: set[Chip] = set()

    for step in range(10, 10_000):
        drawn = driver.next_faults(step, float(step), has_recovered=True, holders=trains)
        for fault in drawn or ():
            if fault.kind is FaultKind.REPAIR:
                dead.difference_update(fault.chips())
            elif fault.kind is FaultKind.KILL:
                dead.update(fault.chips())
        assert trains - dead

    assert driver.n_faults >= 500


def _replace(folder: Path, other: Path) -> None:
    folder.rename(folder.with_name("before"))
    other.rename(folder)


def _command(folder: Path, *more: str) -> list[str]:
    line = [sys.executable, str(SCRIPT), "--seed", "1", "--no-write", "--json", *more]
    return [*line, "--folder", str(folder)]


def test_what_another_program_has_lost_is_found(tmp_path: Path) -> None:
    path = tmp_path / "done.jsonl"

    def noted(*done: tuple[str, int, int]) -> dict[str, Any]:
        lines = [json.dumps([0.0, 0, [what, step, 2, 0, 1.0, crc]]) for what, step, crc in done]
        path.write_text("\n".join(lines))
        return noted_history(path)

    sound = noted(("step", 1, 7), ("step", 1, 7), ("no commit", 1, 0), ("step", 2, 8))
    assert sound["samples"]["lost"] == 0
    assert sound["replicas_equal"]
    assert sound["votes_lost"] == 1
    assert noted(("step", 1, 7), ("step", 3, 8))["samples"]["lost"] > 0
    assert not noted(("step", 1, 7), ("step", 1, 8))["replicas_equal"]


def test_a_group_on_gloo_waits_for_whoever_lives_and_for_nobody_else() -> None:
    store = dist.HashStore()
    meeting = Meeting(store, timeout_s=1000.0)
    meeting.heard_at[0] = meeting.heard_at[1] = time.monotonic()
    pids = {0: 70, 1: 71, 2: 72}
    meeting.decide(pids)
    assert not meeting.is_wanted.value  # nobody waits: all train

    meeting.waits[0], meeting.waits[2] = 70, 62  # an earlier process of rank 2 waited
    meeting.decide(pids)
    assert meeting.is_wanted.value
    assert meeting.number.value == 0  # rank 1 is on its way

    meeting.waits[1] = 71
    meeting.decide(pids)
    assert json.loads(store.get("group 1")) == [[0, 70], [1, 71]]
    assert not meeting.is_wanted.value
    assert list(meeting.waits[:2]) == [0, 0]


@pytest.mark.slow
def test_a_job_on_gloos_own_reconfigure_gets_through_faults_or_says_what_it_needs(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        _command(tmp_path, "--kills", "2", "--part", "gloo"),
        capture_output=True,
        text=True,
        timeout=600,
    )

    if not HAS_PYTHON_BACKENDS:
        assert "gloo: failed: torch" in done.stdout + done.stderr
        assert "it needs torch 2.14 or newer" in done.stdout + done.stderr
        return
    own = json.loads(done.stdout)["gloo"]
    assert own["faults"] == 2
    assert own["samples"]["lost"] == 0
    assert own["replicas_equal"]


@pytest.mark.slow
def test_a_job_gets_through_a_handful_of_faults(tmp_path: Path) -> None:
    parts = ("--part", "kills", "--part", "calm")

    done = subprocess.run(
        _command(tmp_path, "--kills", "5", *parts), capture_output=True, text=True, timeout=600
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["trouble"] == []
    assert found["ours"]["faults"] >= 5
    assert found["ours"]["mean_off"] < 0.01
    assert found["ours"]["replicas_equal"] is True


@pytest.mark.slow
def test_an_interrupted_run_prints_what_it_has_and_leaves_no_process(tmp_path: Path) -> None:
    command = _command(tmp_path, "--kills", "1000", "--part", "kills")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as running:
        log, until = tmp_path / "kills" / "events.jsonl", time.monotonic() + 300
        while not (log.exists() and '"event":"recovered"' in log.read_text()):
            assert running.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text()
        running.send_signal(signal.SIGTERM)
        printed, _ = running.communicate(timeout=60)

    assert running.returncode == 1
    assert json.loads(printed)["ours"]["faults"] >= 1
    assert children
    for pid in map(int, children.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
