"""Recovery by meshmend: the command that users run, and what it says of itself."""

import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from recovery_marks import BATCH, BOARD, MESH, BenchmarkError, output_of

KILL_AT = 25
STEPS = 45
HOW = f'meshmend train --mesh {MESH} --batch {BATCH} --inject "kill {BOARD} at {KILL_AT}" --json'
_RUN_S = 300.0

Figures = dict[str, Any]


def our_recovery() -> Figures:
    """Return how long `meshmend train` takes from the kill to the last chip's next step.

    Raises:
        BenchmarkError: the run failed, lost a step, or its replicas differ.
    """
    with tempfile.TemporaryDirectory(prefix="ours-") as name:
        folder = Path(name) / "run"
        command = [
            *(sys.executable, "-m", "meshmend", "train", "resnet", "--size", "tiny"),
            *("--mesh", MESH, "--batch", str(BATCH), "--steps", str(STEPS), "--save-every", "0"),
            *("--inject", f"kill {BOARD} at {KILL_AT}", "--run-dir", str(folder), "--json"),
        ]
        answer = json.loads(output_of(command, for_s=_RUN_S))
        _check(answer)
        fault = answer["faults"][0]
        return {
            "recovered_s": fault["recovered_s"],
            "detected_s": fault["detected_s"],
            "steps_lost": 0,
            "chips": answer["chips"][-1],
            "step_s": _step_s(folder / "events.jsonl"),
        }


def _check(answer: Figures) -> None:
    """Raise BenchmarkError unless the run got over exactly the one fault, with nothing lost."""
    samples = answer["samples"]
    is_whole = answer["steps"] == STEPS and not samples["lost"] and not samples["repeated"]
    recovered = [fault["recovered_s"] for fault in answer["faults"]]
    if not is_whole or not answer["replicas_equal"] or len(recovered) != 1 or not recovered[0]:
        raise BenchmarkError(f"the run did not end as it should: {json.dumps(answer)}")


def _step_s(events: Path) -> float:
    """Return the median time between two steps of the first chip before the kill."""
    told = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    steps = [event for event in told if event["event"] == "step"]
    ends = [float(step["t"]) for step in steps if 3 <= step["step"] <= KILL_AT]
    return median(after - before for before, after in pairwise(ends))
