"""A job on a real network finds a link that becomes slow, and takes a plan for it between steps."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from meshmend.lab.testbed.bed import Testbed
from meshmend.membership.events import Event, GenerationBegan, LinkSlow, StepFinished, read_events
from testbeds import require_testbed

LINK = "link:0-1"
Kind = TypeVar("Kind", bound=Event)


GROUP = """
import torch
import torch.distributed as dist
import meshmend.torch

dist.init_process_group("meshmend")
model = torch.nn.Linear(1, 1)
meshmend.torch.reconfigure(model)
for step in meshmend.torch.steps(2000):
    with meshmend.torch.retrying():
        dist.all_reduce(torch.ones(1 << 17))
        if dist.get_rank() == 0:
            print(f"planned for {dist.group.WORLD._catalogue._mesh}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_group", [False, True], ids=["job", "elastic group"])
def test_chips_plan_anew_for_a_link_that_becomes_slow_and_lose_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_group: bool
) -> None:
    require_testbed()
    monkeypatch.setenv("MESHMEND_TESTBED_DIR", str(tmp_path / "beds"))
    run_dir, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(GROUP)
    words = ["--mesh", "3", "--wrap", "all", "--testbed", "8Mbit"]
    words += ["--set", "sums.watch_links=true", "--run-dir", str(run_dir)]
    if is_group:
        words = ["run", "--elastic", *words, str(script)]
    else:
        words = ["train", "gpt", *words, "--steps", "2000"]
    out = tmp_path / "out"
    with out.open("w") as stream:
        job = subprocess.Popen(
            [sys.executable, "-m", "meshmend", *words], stdout=stream, env=os.environ
        )
    try:
        until(lambda: n_steps(run_dir) >= 8, job)
        assert not of_kind(run_dir, LinkSlow)
        Testbed.attach().slow(f"{LINK}=0.25")
        until(lambda: bool(of_kind(run_dir, LinkSlow)), job)
        found = n_steps(run_dir)
        until(lambda: n_steps(run_dir) >= found + 8, job)
        if is_group:
            until(lambda: f"slow {LINK}" in out.read_text(), job)
    finally:
        job.terminate()
        job.wait()

    assert {event.link for event in of_kind(run_dir, LinkSlow)} == {LINK}
    assert of_kind(run_dir, LinkSlow)[0].speed <= 0.6
    assert len(of_kind(run_dir, GenerationBegan)) == 1
    steps = [event.step for event in of_kind(run_dir, StepFinished)]
    assert steps == list(range(1, len(steps) + 1))


def of_kind(run_dir: Path, kind: type[Kind]) -> list[Kind]:
    file = run_dir / "events.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    if not lines:
        return []
    return [timed.event for timed in read_events(lines) if isinstance(timed.event, kind)]


def n_steps(run_dir: Path) -> int:
    return len(of_kind(run_dir, StepFinished))


def until(holds: Callable[[], bool], job: "subprocess.Popen[bytes]", within_s: float = 240) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert job.poll() is None, "the job has ended"
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.2)
