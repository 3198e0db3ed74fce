"""Recovery by torchrun: all workers are ended and started again from the last checkpoint."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from meshmend.errors import BenchmarkError
from recovery_marks import (
    ENVIRONMENT,
    N_WORKERS,
    Strike,
    await_step,
    await_that,
    marks_in,
    started,
    step_s,
    strike,
)

SAVE_EVERY = 10
KILL_AT = 25
MONITOR_S = 0.1
HOW = (
    f"torchrun --standalone --max-restarts 3 --monitor-interval {MONITOR_S} on one node, Gloo, "
    f"DDP, a checkpoint every {SAVE_EVERY} steps; it starts all {N_WORKERS} again: the number of "
    "workers of one node cannot change. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which "
    "new workers may find the addresses of the dead in the store, call them, and fail"
)
_START_S = 300.0
_ENVIRONMENT = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

Figures = dict[str, Any]


def torchrun_recovery() -> Figures:
    """Return how long torchrun takes from the kill to the first step that was not done before.

    Raises:
        BenchmarkError: it did not get there.
    """
    with tempfile.TemporaryDirectory(prefix="torchrun-") as name:
        folder = Path(name)
        with started(_command(folder), folder, _ENVIRONMENT) as leader:
            try:
                await_step(folder, KILL_AT, leader=leader, for_s=_START_S)
                kill = strike(folder)
                await_that(
                    lambda: len(_again(folder, kill)) == N_WORKERS,
                    f"step {kill.step + 1} on all workers",
                    leader=leader,
                    for_s=_START_S,
                )
                return _figures(folder, kill)
            except BenchmarkError as error:
                last = (folder / "output").read_text(errors="replace").strip().splitlines()[-1:]
                raise BenchmarkError(f"{error}; its last words: {' '.join(last)}") from None


def _command(folder: Path) -> list[str]:
    worker = Path(__file__).with_name("torchrun_worker.py")
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={N_WORKERS}", "--max-restarts=3"),
        f"--monitor-interval={MONITOR_S}",
        *(str(worker), str(folder), str(SAVE_EVERY)),
    ]


def _again(folder: Path, kill: Strike) -> dict[int, float]:
    """Return when each worker did the first step that none had done before the kill."""
    done: dict[int, float] = {}
    for mark in marks_in(folder):
        if mark.what == "step" and mark.at > kill.at and mark.step == kill.step + 1:
            done.setdefault(mark.rank, mark.at)
    return done


def _figures(folder: Path, kill: Strike) -> Figures:
    marks = [mark for mark in marks_in(folder) if mark.at > kill.at]
    # A survivor may still end the step in flight; what counts is where the new processes began.
    begun = {mark.pid for mark in marks if mark.what == "started"}
    first = min(mark.step for mark in marks if mark.what == "step" and mark.pid in begun)

    def last(what: str) -> float:
        return max(mark.at for mark in marks if mark.what == what) - kill.at

    return {
        "recovered_s": max(_again(folder, kill).values()) - kill.at,
        "steps_lost": kill.step - (first - 1),
        "chips": N_WORKERS,
        "step_s": step_s(marks_in(folder), until=kill.at),
        "phases_s": {what: last(what) for what in ("started", "imported", "joined")},
    }
