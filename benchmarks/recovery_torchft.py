"""Recovery by torchft: replica groups vote on every step, and go on with who is left.

It lives in an environment of its own, made here on demand: nothing else of this project needs it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshmend.errors import BenchmarkError
from recovery_marks import (
    N_WORKERS,
    SURVIVORS,
    Mark,
    Strike,
    await_step,
    await_that,
    marks_in,
    output_of,
    started,
    step_s,
    strike,
)

VERSION = "0.2.0"
KILL_AT = 25
TIMEOUTS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # tried in this order
HOW = (
    f"torchft {VERSION}: 16 replica groups of one worker, Manager and lighthouse, its Gloo group, "
    "synchronous quorum, heartbeats every 0.1 s; its DDP wrapper is not used: with torch 2.13 it "
    "ends all workers by itself ('Future' object has no attribute '_fut')"
)
_INSTALL_S = 1800.0
_START_S = 180.0
_RECOVERY_S = 60.0
_ROOT = Path(__file__).resolve().parent.parent
_HOME = _ROOT / ".venv-torchft"

Figures = dict[str, Any]


def torchft_python() -> Path:
    """Return the interpreter of an environment that has torchft, made now if it is not there.

    Raises:
        BenchmarkError: it cannot be installed.
    """
    python = _HOME / "bin" / "python"
    check = [str(python), "-c", "import torchft, transformers, sklearn, meshmend"]
    if python.exists() and subprocess.run(check, capture_output=True, check=False).returncode == 0:
        return python
    print(f"torchft: installing {VERSION} into {_HOME.name} ...", flush=True)
    try:
        _install(python)
        output_of(check, for_s=_INSTALL_S)
    except BenchmarkError as error:
        raise BenchmarkError(f"it cannot be installed: {error}") from None
    return python


def _install(python: Path) -> None:
    output_of([sys.executable, "-m", "venv", str(_HOME)], for_s=_INSTALL_S)
    (_HOME / ".gitignore").write_text("*\n", encoding="utf-8")
    output_of(
        [
            *(str(python), "-m", "pip", "install", "--quiet"),
            *("--constraint", str(_ROOT / "constraints.txt")),
            *("--editable", f"{_ROOT}[train]", f"torchft=={VERSION}"),
        ],
        for_s=_INSTALL_S,
    )


def tolerated_timeout(python: Path) -> tuple[float, list[str], Figures]:
    """Return the shortest timeout with which a run goes well, why shorter ones do not, and the run.

    Raises:
        BenchmarkError: none is tolerated.
    """
    refused: list[str] = []
    for timeout_s in TIMEOUTS_S:
        try:
            figures = torchft_recovery(python, timeout_s)
            if not figures["votes_lost_before"]:
                return timeout_s, refused, figures
            raise BenchmarkError(
                f"{figures['votes_lost_before']} steps given up while nothing failed"
            )
        except BenchmarkError as error:
            refused.append(f"timeout {timeout_s:g} s: {error}")
            print(f"torchft: {refused[-1]}", flush=True)
    raise BenchmarkError("; ".join(refused))


def torchft_recovery(python: Path, timeout_s: float) -> Figures:
    """Return how long torchft takes from the kill to a step that all survivors have committed.

    Raises:
        BenchmarkError: it did not get there.
    """
    with tempfile.TemporaryDirectory(prefix="torchft-") as name:
        folder = Path(name)
        worker = Path(__file__).with_name("torchft_worker.py")
        command = [str(python), str(worker), str(folder), str(timeout_s)]
        with started(command, folder) as leader:
            try:
                await_step(folder, KILL_AT, leader=leader, for_s=_START_S)
                kill = strike(folder)
                await_that(
                    lambda: len(_again(folder, kill)) == len(SURVIVORS),
                    f"a step committed by all {len(SURVIVORS)} survivors",
                    leader=leader,
                    for_s=_RECOVERY_S,
                )
                return _figures(folder, kill)
            except BenchmarkError as error:
                raise BenchmarkError(_with_deaths(error, folder / "output")) from None


def _with_deaths(error: BenchmarkError, output: Path) -> str:
    words = output.read_text(errors="replace")
    told = [line for line in words.splitlines() if line.startswith("worker ")]
    why = f"{error}; {len(told)} workers ended by themselves"
    return f"{why}, the first: {told[0][:200]}" if told else why


def _again(folder: Path, kill: Strike) -> dict[int, float]:
    """Return when each survivor committed its first step without the dead."""
    done: dict[int, float] = {}
    for mark in marks_in(folder, SURVIVORS):
        if mark.what == "step" and mark.at > kill.at and mark.among <= len(SURVIVORS):
            done.setdefault(mark.rank, mark.at)
    return done


def _figures(folder: Path, kill: Strike) -> Figures:
    marks = marks_in(folder, SURVIVORS)
    after = [mark for mark in marks if mark.at > kill.at]
    first = min(m.step for m in after if m.what == "step" and m.among <= len(SURVIVORS))
    whole = min(m.at for m in marks if m.what == "step" and m.among == N_WORKERS)
    in_vain = [m for m in marks if m.what == "no commit" and m.at > whole]
    return {
        "recovered_s": max(_again(folder, kill).values()) - kill.at,
        "steps_lost": max(0, kill.step - (first - 1)),
        "chips": len(SURVIVORS),
        "step_s": step_s(marks, until=kill.at),
        "votes_lost_before": max(_counts([m for m in in_vain if m.at < kill.at])),
        "votes_lost_after": max(_counts([m for m in in_vain if m.at >= kill.at])),
    }


def _counts(in_vain: list[Mark]) -> list[int]:
    """Return how many of these are each survivor's."""
    return [sum(mark.rank == rank for mark in in_vain) for rank in SURVIVORS]
