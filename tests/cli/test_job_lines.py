"""The plain lines of a job: which events have one, and what a coordinator says of its changes."""

import time

import pytest

from meshmend.cli.job_lines import JobLines, job_line
from meshmend.membership import events
from meshmend.membership.events import TimedEvent
from training_events import at, step

HERE, THERE = (0, 0), (0, 1)


def stepped(chip: tuple[int, int], *, first: bool = True) -> events.WorkerStepped:
    return events.WorkerStepped(
        chip, 7, 1, 0.0, leads=chip == HERE, first=first, loss=1.0, samples=64
    )


def test_a_line_has_the_time_and_the_sentence() -> None:
    line = job_line(at(12.345, events.WorkerLeft(HERE, "chip (0, 0) hung up")))

    assert line == "    12.35 s  chip (0, 0) hung up"


@pytest.mark.parametrize(
    "timed", [step(1, 1, 1.0), at(1, stepped(HERE)), at(1, events.WorkerArrived(HERE))]
)
def test_what_happens_all_the_time_has_no_line(timed: TimedEvent) -> None:
    assert job_line(timed) is None


def told(capsys: pytest.CaptureFixture[str], *pairs: tuple[float, events.Event]) -> list[str]:
    """What is printed of events so many seconds from now, without the time."""
    lines, now = JobLines(2), time.monotonic()
    for after_s, event in pairs:
        lines.take(now + after_s, event)
    return [line.split(" s  ", 1)[1] for line in capsys.readouterr().err.splitlines()]


def test_a_coordinator_counts_workers_and_says_how_long_the_start_took(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = events.GenerationBegan(1, (HERE, THERE), step=0)

    lines = told(
        capsys,
        (0.0, events.WorkerArrived(HERE)),
        (1.0, events.WorkerArrived(THERE)),
        (1.1, events.GenerationForming(1, (HERE, THERE), "all are ready")),
        (1.2, both),
        (1.3, stepped(HERE)),
        (1.4, stepped(HERE, first=False)),
        (1.5, stepped(THERE)),
    )

    assert lines == [
        "chip (0, 0) connected, 1 of 2",
        "chip (0, 1) connected, 2 of 2",
        "generation 1: 2 chips from step 0 on; all are ready",
        "all 2 chips have finished step 7, 0.50 s after the last chip connected",
    ]


def test_a_loss_is_timed_from_the_first_worker_that_went(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = told(
        capsys,
        (0.0, events.WorkerArrived(HERE)),
        (1.0, events.WorkerLeft(THERE, "chip (0, 1) is gone")),
        (1.2, events.GenerationBegan(2, (HERE,), step=6)),
        (2.0, stepped(HERE)),
        (2.1, events.WorkerSaved(HERE, 7, 2.1, "a/b")),
    )

    assert lines[1:] == [
        "chip (0, 1) is gone",
        "generation 2: 1 chip from step 6 on",
        "all 1 chips have finished step 7, 1.00 s after the first chip left",
        "checkpoint of step 7 in a/b",
    ]
