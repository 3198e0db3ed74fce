"""How long training stands still when a board dies: us and others; what readiness costs.

    python benchmarks/recovery.py [--quick] [--no-write] [--runs 5] [--part ours] ...

One run, one machine, the same model (a ResNet of 20 thousand parameters on digits), the same
global batch of 64 on 16 workers, the same SIGKILL of the four workers of board 2x2@0,2. A job has
recovered when the last worker that lives has finished its next step; torchrun, when the last has
finished a step that was not done before. The contenders take turns. torchft is installed into
`.venv-torchft` if it is not there; a contender that fails is shown with the reason.

`cost` compares the step time of a job that is ready for failures with the static backend.
"""

import datetime
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import ready_cost
import recovery_ours
import recovery_torchft
import recovery_torchrun
from meshmend.errors import BenchmarkError
from record import RESULTS, parser_of, record
from recovery_marks import BATCH, BOARD, MESH

CONTENDERS = ("ours", "torchft", "torchrun")
PARTS = (*CONTENDERS, "cost")
MOST_COST = 1.03
MEDIAN_S, WORST_S = 1.0, 3.0

Figures = dict[str, Any]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one run of each, fewer steps, print only"
    )
    parser.add_argument("--runs", type=int, default=5, help="kills per contender")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of runs for the cost")
    parser.add_argument("--steps", type=int, default=200, help="steps of each run for the cost")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; repeat")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended first
    if options.quick:
        options.runs, options.pairs, options.steps, options.no_write = 1, 1, 40, True
    parts = options.part or list(PARTS)
    load_before = os.getloadavg()
    results: Figures = kills([part for part in CONTENDERS if part in parts], options.runs)
    if "cost" in parts:
        results["cost"] = cost(options.pairs, options.steps)
    print("\n" + "\n".join(table(results)))
    if not options.no_write:
        print(record("recovery", document(results, load_before)))


def kills(contenders: Sequence[str], n_runs: int) -> Figures:
    """Return the figures of each contender after so many kills each, in turns."""
    results: Figures = {name: {"how": HOW[name], "runs": [], "failed": []} for name in contenders}
    for turn in range(n_runs):
        for name in contenders:
            result = results[name]
            if turn > 0 and not result["runs"]:
                continue  # it failed with everything that could be tried
            try:
                result["runs"].append(RUN[name](result))
                say(f"{name}: recovered in {result['runs'][-1]['recovered_s']:.2f} s")
            except BenchmarkError as error:
                result["failed"].append(str(error))
                say(f"{name}: failed: {error}")
    for result in results.values():
        if times := sorted(run["recovered_s"] for run in result["runs"]):
            result |= {"median_s": median(times), "worst_s": times[-1]}
    return results


def run_torchft(result: Figures) -> Figures:
    """Kill torchft's workers once; the first time with the shortest timeouts that it tolerates."""
    python = recovery_torchft.torchft_python()
    if "timeout_s" in result:
        return recovery_torchft.torchft_recovery(python, result["timeout_s"])
    timeout_s, refused, figures = recovery_torchft.tolerated_timeout(python)
    result |= {"timeout_s": timeout_s, "shorter_timeouts": refused}
    result["how"] += f"; timeouts of {timeout_s:g} s (collective, heartbeat, join)"
    return figures


HOW = {
    "ours": recovery_ours.HOW,
    "torchft": recovery_torchft.HOW,
    "torchrun": recovery_torchrun.HOW,
}
RUN: dict[str, Callable[[Figures], Figures]] = {
    "ours": lambda result: recovery_ours.our_recovery(len(result["runs"])),
    "torchft": run_torchft,
    "torchrun": lambda result: recovery_torchrun.torchrun_recovery(),
}


def cost(n_pairs: int, n_steps: int) -> Figures:
    """Return what readiness costs, or why it could not be measured."""
    try:
        return {"how": ready_cost.HOW, **ready_cost.ready_cost(n_pairs, n_steps, say)}
    except BenchmarkError as error:
        say(f"cost: failed: {error}")
        return {"how": ready_cost.HOW, "failed": [str(error)]}


def table(results: Figures) -> list[str]:
    """Return the lines of the table that all this is for."""
    head = f"SIGKILL of board {BOARD} of {MESH}, tiny ResNet, global batch {BATCH}"
    lines = [head, f"{'':<10}{'median':>9}{'worst':>9}{'runs':>6}{'steps lost':>12}{'step':>10}"]
    lines += [row(name, results[name]) for name in CONTENDERS if name in results]
    if "ours" in results and "median_s" in results["ours"]:
        ours = results["ours"]
        is_met = ours["median_s"] <= MEDIAN_S and ours["worst_s"] <= WORST_S
        lines.append(
            f"asked of ours: median {MEDIAN_S:g} s, worst {WORST_S:g} s: {verdict(is_met)}"
        )
    if "cost" in results:
        lines += ["", *cost_lines(results["cost"])]
    for name in results:
        lines += [f"{name}: {results[name]['how']}"]
        lines += phases(name, results[name].get("runs", ()))
        lines += [f"{name}: failed: {why}" for why in results[name].get("failed", ())]
        lines += [f"{name}: {why}" for why in results[name].get("shorter_timeouts", ())]
    return lines


def row(name: str, result: Figures) -> str:
    """Return a contender's line."""
    runs = result["runs"]
    if not runs:
        return f"{name:<10}  did not recover; the reason is below"
    lost = sorted(run["steps_lost"] for run in runs)
    span = f"{lost[0]}" if lost[0] == lost[-1] else f"{lost[0]} to {lost[-1]}"
    count = f"{len(runs)}/{len(runs) + len(result['failed'])}"
    step_ms = 1e3 * median(run["step_s"] for run in runs)
    return (
        f"{name:<10}{result['median_s']:>7.2f} s{result['worst_s']:>7.2f} s{count:>6}{span:>12}"
        f"{step_ms:>7.1f} ms"
    )


def phases(name: str, runs: Sequence[Figures]) -> list[str]:
    """Return a line on where the time went, for a contender that tells."""
    if name == "ours":
        return [f"{name}: {', '.join(run['faults'])}: {run['recovered_s']:.2f} s" for run in runs]
    if name != "torchrun" or not runs:
        return []
    last = {what: median(run["phases_s"][what] for run in runs) for what in runs[0]["phases_s"]}
    told = ", ".join(f"{what} {at_s:.1f} s" for what, at_s in last.items())
    return [f"{name}: the last worker had, after the kill: {told}"]


def cost_lines(figures: Figures) -> list[str]:
    """Return what the table says of the cost of readiness."""
    if "failed" in figures:
        return ["cost of being ready: not measured; the reason is below"]
    pairs, error = figures["ratio_of_pairs"], figures["standard_error"]
    spread = f"pairs {min(pairs):.3f} to {max(pairs):.3f}"
    if error is not None:
        spread += f", standard error {error:.3f}"
    return [
        f"cost of being ready: elastic {1e3 * figures['elastic_s']:.2f} ms a step, static "
        f"{1e3 * figures['static_s']:.2f} ms: ratio {figures['ratio']:.3f} ({spread}; "
        f"processor time {figures['cpu_ratio']:.3f})",
        f"asked: at most {MOST_COST}: {verdict(figures['ratio'] <= MOST_COST)}",
    ]


def verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


def say(line: str) -> None:
    print(line, flush=True)


def document(results: Figures, load_before: tuple[float, float, float]) -> Figures:
    """Return what the result file holds: today's other parts stay as they were."""
    path = RESULTS / f"recovery-{datetime.date.today().isoformat()}.json"
    return {
        **_parts_in(path),
        "torch": version("torch"),
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "targets": {"median_s": MEDIAN_S, "worst_s": WORST_S, "cost": MOST_COST},
        **results,
        "table": table({**_parts_in(path), **results}),
    }


def _parts_in(path: Path) -> Figures:
    """Return the parts of a result file, if there is one."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {part: before[part] for part in PARTS if part in before}


if __name__ == "__main__":
    main()
