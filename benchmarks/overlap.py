"""How much of the network a step hides: `Job` and DDP, on a testbed and on loopback, in turns.

    python benchmarks/overlap.py [--no-write] [--rounds 3] [--steps 20] [--compute sleep|cpu]

Two cases: 2x2 chips with links of 200 Mbit/s, 9.5 MB of gradients and 0.4 s of computing a step,
and 4x4 chips on loopback with 25 MB. DDP runs on the backend `meshmend`, with buckets of 1 MB on
the testbed and of its own size on loopback. Every round runs every kind once, in an order that
changes. A figure is the median over all steps of all rounds of the time between two steps of the
first chip; beside it stands the quickest tenth, which other programs disturb less. The testbed
needs root.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshmend.errors import BenchmarkError
from record import parser_of, record

_WORKER = Path(__file__).with_name("overlap_worker.py")
_WARM_UP = 5
_RUN_S = 600.0
_MEGABYTE = 1_000_000

Figures = dict[str, Any]
Kind = tuple[str, str]  # "job" or "ddp", and "testbed" or "loopback"

CASES: dict[str, Figures] = {
    "2x2": {
        "kinds": [("job", "testbed"), ("ddp", "testbed"), ("job", "loopback"), ("ddp", "loopback")],
        "bandwidth": "200Mbit",
        "options": {
            "bytes": int(9.5 * _MEGABYTE),
            "layers": 19,
            "chips": 4,
            "rows": 512,
            "ddp_bucket_mb": 1,
        },
    },
    "4x4": {
        "kinds": [("job", "loopback"), ("ddp", "loopback")],
        "bandwidth": "",
        "options": {
            "bytes": 25 * _MEGABYTE,
            "layers": 25,
            "chips": 16,
            "rows": 32,
            "ddp_bucket_mb": 25,
        },
    },
}


def main() -> int:
    """Measure, print and write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compute", choices=("sleep", "cpu"), default="sleep")
    parser.add_argument("--compute-s", type=float, default=0.4)
    parser.add_argument("--case", choices=tuple(CASES), action="append")
    arguments = parser.parse_args()
    figures: Figures = {"compute": arguments.compute, "rounds": arguments.rounds, "cases": {}}
    for mesh in arguments.case or CASES:
        figures["cases"][mesh] = measured(mesh, arguments)
        found = figures["cases"][mesh]
        for name in ("ratios", "ratios_of_quick_steps"):
            print(f"{mesh} {name}: {json.dumps(found[name], indent=1)}", flush=True)
    if not arguments.no_write:
        print(record("overlap", figures))
    return 0


def measured(mesh: str, arguments: argparse.Namespace) -> Figures:
    """Return the step times of each kind, and their ratios."""
    case = CASES[mesh]
    options = {
        **case["options"],
        "steps": _WARM_UP + arguments.steps,
        "compute": arguments.compute,
        "compute_s": arguments.compute_s,
    }
    pauses: dict[Kind, list[list[float]]] = {kind: [] for kind in case["kinds"]}
    cpu_s: dict[Kind, list[float]] = {kind: [] for kind in case["kinds"]}
    for number in range(arguments.rounds):
        kinds = case["kinds"][:: 1 if number % 2 == 0 else -1]
        for kind in kinds:
            bandwidth = case["bandwidth"] if kind[1] == "testbed" else ""
            ends, cpu_ends = zip(*_ends(mesh, kind[0], bandwidth, options), strict=True)
            pauses[kind].append([after - before for before, after in pairwise(ends)])
            cpu_s[kind].append((cpu_ends[-1] - cpu_ends[0]) / (len(cpu_ends) - 1))
            step_ms, cpu_ms = 1e3 * statistics.median(pauses[kind][-1]), 1e3 * cpu_s[kind][-1]
            print(f"{mesh} {' '.join(kind)}: {step_ms:.1f} ms a step, {cpu_ms:.1f} ms of processor")
    together = {kind: [each for run in runs for each in run] for kind, runs in pauses.items()}
    steps_s = {kind: statistics.median(all_s) for kind, all_s in together.items()}
    quick_s = {kind: statistics.quantiles(all_s, n=10)[0] for kind, all_s in together.items()}
    return {
        "options": options,
        "step_s": {" ".join(kind): step_s for kind, step_s in steps_s.items()},
        "quick_step_s": {" ".join(kind): step_s for kind, step_s in quick_s.items()},
        "runs_s": {
            " ".join(kind): [statistics.median(run) for run in runs]
            for kind, runs in pauses.items()
        },
        "cpu_s": {" ".join(kind): statistics.median(each) for kind, each in cpu_s.items()},
        "ratios": _ratios(steps_s),
        "ratios_of_quick_steps": _ratios(quick_s),
    }


def _ratios(steps_s: dict[Kind, float]) -> dict[str, float]:
    """Return each kind's testbed step over its loopback step, and Job's step over DDP's."""
    ratios = {}
    for kind in ("job", "ddp"):
        if (kind, "testbed") in steps_s:
            ratio = steps_s[kind, "testbed"] / steps_s[kind, "loopback"]
            ratios[f"{kind}: testbed over loopback"] = ratio
    for where in ("testbed", "loopback"):
        if ("job", where) in steps_s:
            ratios[f"job over ddp: {where}"] = steps_s["job", where] / steps_s["ddp", where]
    return ratios


def _ends(mesh: str, kind: str, bandwidth: str, options: Figures) -> list[tuple[float, float]]:
    """Run one kind once; return when its steps ended, without the first few."""
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        path = Path(folder) / "ends.json"
        command = [sys.executable, "-m", "meshmend", "run", "--mesh", mesh]
        command += ["--elastic"] if kind == "job" else []
        command += ["--testbed", bandwidth] if bandwidth else []
        command += [str(_WORKER), kind, json.dumps(options), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False)
        if done.returncode or not path.exists():
            raise BenchmarkError(f"{kind} on {mesh} failed: {done.stderr[-2000:]}")
        ends: list[tuple[float, float]] = json.loads(path.read_text(encoding="utf-8"))
    return ends[_WARM_UP - 1 :]


if __name__ == "__main__":
    sys.exit(main())
