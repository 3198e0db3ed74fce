"""Recovery by meshmend: the command that users run, and what it says of itself.

The kills take turns in when they come: after a step, and in the middle of each part of one. The
last of them kills the board, and then a chip while the others recover from that.
"""

import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from meshmend.errors import BenchmarkError
from recovery_marks import BATCH, BOARD, MESH, output_of

KILL_AT = 25
STEPS = 45
FAULTS = (
    (f"kill {BOARD} at {KILL_AT}",),
    (f"kill {BOARD} at {KILL_AT} in forward",),
    (f"kill {BOARD} at {KILL_AT} in reduce",),
    (f"kill {BOARD} at {KILL_AT} in update",),
    (f"kill {BOARD} at {KILL_AT}", f"kill 2,1 at {KILL_AT} in recovery"),
)
HOW = (
    f'meshmend train --mesh {MESH} --batch {BATCH} --json --inject "kill {BOARD} at {KILL_AT}"; '
    'also "... in forward", "in reduce", "in update", and with a chip killed "in recovery"'
)
_RUN_S = 300.0

Figures = dict[str, Any]


def our_recovery(turn: int) -> Figures:
    """Return how long `meshmend train` takes from the kill to the last chip's next step.

    Several kills: from the first to the end of the last.

    Raises:
        BenchmarkError: the run failed, lost a step, or its replicas differ.
    """
    with tempfile.TemporaryDirectory(prefix="ours-") as name:
        folder = Path(name) / "run"
        command = [
            *(sys.executable, "-m", "meshmend", "train", "resnet", "--size", "tiny"),
            *("--mesh", MESH, "--batch", str(BATCH), "--steps", str(STEPS), "--save-every", "0"),
            *("--run-dir", str(folder), "--json"),
        ]
        faults = FAULTS[turn % len(FAULTS)]
        for fault in faults:
            command += ["--inject", fault]
        answer = json.loads(output_of(command, for_s=_RUN_S))
        _check(answer, len(faults))
        return {
            "faults": faults,
            "recovered_s": max(fault["recovered_s"] for fault in answer["faults"]),
            "detected_s": answer["faults"][0]["detected_s"],
            "steps_lost": 0,
            "chips": answer["chips"][-1],
            "step_s": _step_s(folder / "events.jsonl"),
        }


def _check(answer: Figures, n_faults: int) -> None:
    """Raise BenchmarkError unless the run got over exactly its faults, with nothing lost."""
    samples = answer["samples"]
    is_whole = answer["steps"] == STEPS and not samples["lost"] and not samples["repeated"]
    recovered = [fault["recovered_s"] for fault in answer["faults"]]
    is_over = len(recovered) == n_faults and all(recovered)
    if not is_whole or not answer["replicas_equal"] or not is_over:
        raise BenchmarkError(f"the run did not end as it should: {json.dumps(answer)}")


def _step_s(events: Path) -> float:
    """Return the median time between two steps of the first chip before the kill."""
    told = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    steps = [event for event in told if event["event"] == "step"]
    ends = [float(step["t"]) for step in steps if 3 <= step["step"] <= KILL_AT]
    return median(after - before for before, after in pairwise(ends))
