"""How soon a job finds a link that becomes slow, and what its steps take once it has planned anew.

    python benchmarks/slow_live.py [--repeat 2] [--no-write]

Trains over real packets, on 3x3 at 20 Mbit/s, until a link goes to a quarter of its bandwidth.
Prints how long it took to find it, and the median of later steps over that of a job that is told
the speed from the start. Needs a testbed (root), and processors that nothing else uses.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

from meshmend.lab.testbed.bed import Testbed
from meshmend.membership.events import (
    Event,
    GenerationBegan,
    LinkSlow,
    StepFinished,
    TimedEvent,
    read_events,
)
from record import parser_of, record

MESH, RATE = "3x3", "20Mbit"
SLOW = "link:0,0-0,1=0.25"
WARM, MANY = 12, 25  # steps
PLANNED_S = 6.0  # until plans for the link are surely in use
LONGEST_S = 90.0


@contextmanager
def training(run_dir: Path, *more: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Train a small GPT whose chips watch their links."""
    words = ["train", "gpt", "--mesh", MESH, "--testbed", RATE, "--steps", "5000", *more]
    words += ["--set", "sums.watch_links=true", "--run-dir", str(run_dir)]
    job = subprocess.Popen(
        [sys.executable, "-m", "meshmend", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield job
    finally:
        job.terminate()
        job.wait()


def events_of(run_dir: Path, kind: type[Event]) -> list[TimedEvent]:
    """Return the events of a kind so far."""
    file = run_dir / "events.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    return [each for each in read_events(whole) if isinstance(each.event, kind)] if whole else []


def until(holds: Callable[[], bool], job: "subprocess.Popen[bytes]") -> None:
    """Wait until something holds; exit if the job has ended or takes too long."""
    end = time.monotonic() + LONGEST_S
    while not holds():
        if job.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"slow_live: the job did not get there within {LONGEST_S:g} s")
        time.sleep(0.03)


def step_s(run_dir: Path, job: "subprocess.Popen[bytes]", n_steps: int) -> float:
    """Return the median of the next steps' times."""
    n_before = len(events_of(run_dir, StepFinished))
    until(lambda: len(events_of(run_dir, StepFinished)) > n_before + n_steps, job)
    times = [each.t for each in events_of(run_dir, StepFinished)][-n_steps - 1 :]
    return median(after - before for before, after in pairwise(times))


def measured(folder: Path) -> dict[str, float]:
    """Measure both jobs once."""
    run_dir = folder / "found"
    with training(run_dir) as job:
        before_s = step_s(run_dir, job, WARM)
        Testbed.attach().slow(SLOW)
        began = time.monotonic()
        until(lambda: bool(events_of(run_dir, LinkSlow)), job)
        found_s = time.monotonic() - began
        time.sleep(PLANNED_S)
        after_s = step_s(run_dir, job, MANY)
        told = [each.event for each in events_of(run_dir, LinkSlow)]
        assert {event.link for event in told if isinstance(event, LinkSlow)} == {SLOW[:-5]}
        assert len(events_of(run_dir, GenerationBegan)) == 1, "a generation has ended"
    run_dir = folder / "known"
    with training(run_dir, "--slow", SLOW) as job:
        step_s(run_dir, job, WARM)
        known_s = step_s(run_dir, job, MANY)
    return {
        "before_s": before_s,
        "found_after_s": found_s,
        "afterwards_s": after_s,
        "known_from_the_start_s": known_s,
        "ratio": after_s / known_s,
    }


def main() -> None:
    """Measure, print and record."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()
    runs = []
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory(prefix="slow-live-") as name:
            os.environ["MESHMEND_TESTBED_DIR"] = f"{name}/beds"
            run = measured(Path(name))
        print(
            f"found after {run['found_after_s']:.1f} s; steps {run['before_s']:.3f} s before, "
            f"{run['afterwards_s']:.3f} s afterwards, {run['ratio']:.2f} of a job that knew it; "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        runs.append(run | {"load": os.getloadavg()[0]})
    if not options.no_write:
        question = {"mesh": MESH, "testbed": RATE, "slow": SLOW}
        print(record("slow-live", {"question": question, "runs": runs}))


if __name__ == "__main__":
    main()
