"""How many wrong numbers --check-shares finds, whom it names, and whether the loss is right after.

    python benchmarks/wrong_numbers.py --flips 100 --steady 20 --quiet 10000 --cost --off 3

Each run trains a small model in float64 on 2x2 chips. `--flips`: one bit flips, of the gradients in
a step that is checked, or of the weights, the optimizer's state or the sums in any step, on any
chip. It must be found, the right chip named, and no other chip turned away. `--steady`: a chip is
wrong in every fifth step, from any step on. It must be out within 5 K steps, and the final loss be
that of a run without it, to 1e-9, because the job goes back to a checkpoint from before. `--quiet`:
as many steps without a fault, with K = 16, must raise no alarm. `--cost`: what a check in one of 16
steps costs on 4x4 chips whose shares take a while, as on accelerators, by the steps of one run.
`--off`: the step time of a job without checks, next to that of one without their code, in as many
runs; the step is short and four processes share two cores, so one run is not sure enough.
`--checksum`: what checksums on the data of sums cost on loopback, where a sum is bound by the
processor: the most they can.

After each run the file of the day in `results/` is written; runs that it has are not made again.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

from elastic_job import elastic, losses, of_kind
from meshmend.train.core.share_checks import is_check_step
from record import read_today, record

EVERY, STEPS, QUIET_STEPS = 5, 110, 1000
CHIPS = ((0, 0), (0, 1), (1, 0), (1, 1))
ALARMS = ("wrong-result", "state-mended", "turned away", "states-differ")


def run(steps: int, inject: list[str], every: int = EVERY) -> dict[str, Any]:
    """Train with checks; return what happened."""
    with tempfile.TemporaryDirectory() as folder:
        return elastic(
            Path(folder),
            mesh="2x2",
            steps=steps,
            dtype="float64",
            check_shares=every,
            save_every=5,
            inject=inject,
        )


def named(result: dict[str, Any]) -> list[list[int]]:
    """Return the chips that were found wrong, in whatever way."""
    kinds = ("wrong-result", "state-mended")
    return [event["chip"] for kind in kinds for event in of_kind(result, kind)]


def away(result: dict[str, Any]) -> list[list[int]]:
    """Return the chips that were turned away."""
    return [event["chip"] for event in of_kind(result, "turned away")]


def words(chip: tuple[int, ...]) -> str:
    """Return a chip as `--inject` reads it."""
    return ",".join(map(str, chip))


def flip(number: int, chance: random.Random) -> dict[str, Any]:
    """Flip one bit in a run."""
    part = ("gradient", "weights", "state", "sum")[number % 4]
    chip = chance.choice(CHIPS)
    steps = [step for step in range(2, 30) if part != "gradient" or is_check_step(step, EVERY)]
    fault = f"flip {part} {words(chip)} at {chance.choice(steps)}"
    result = run(40, [fault])
    return {
        "fault": fault,
        "named": named(result),
        "is_right": named(result) == [list(chip)],
        "others_away": [each for each in away(result) if each != list(chip)],
        "finished": result["finished"],
    }


def steady(undisturbed: float, chance: random.Random) -> dict[str, Any]:
    """Let one chip be wrong in every fifth step of a run, from some step on."""
    chip, first = chance.choice(CHIPS), chance.randrange(50, 65)
    fault = f"wrong {words(chip)} from {first}"
    result = run(STEPS, [fault])
    steps = [event["step"] for event in of_kind(result, "wrong-result")]
    return {
        "fault": fault,
        "found_after_steps": steps[0] - first if steps else None,
        "is_out": away(result) == [list(chip)] and steps[0] - first <= 5 * EVERY,
        "went_back_to": [event["step"] for event in of_kind(result, "restored")],
        "loss_difference": abs(losses(result)[STEPS] - undisturbed),
    }


def quiet(n_steps: int) -> dict[str, Any]:
    """Train without a fault, in jobs of at most a thousand steps."""
    result = run(n_steps, [], every=16)
    alarms = [event for kind in ALARMS for event in of_kind(result, kind)]
    return {"steps": n_steps, "alarms": alarms, "finished": result["finished"]}


def cost() -> dict[str, Any]:
    """Measure what a check in one of 16 steps costs; waiting takes no processor."""
    n_steps, compute_s, every = 16 * 6 + 1, 0.25, 16
    with tempfile.TemporaryDirectory() as folder:
        result = elastic(
            Path(folder),
            mesh="4x4",
            steps=n_steps,
            batch=64,
            check_shares=every,
            compute_s=compute_s,
        )
    at = {event["step"]: event["t"] for event in of_kind(result, "step")}
    took = {step: at[step] - at[step - 1] for step in range(2, n_steps + 1)}
    quiet = [took[step] for step in took if not is_check_step(step - 1, every)]
    checked = [took[step] for step in took if is_check_step(step - 1, every)]
    usual = statistics.median(quiet)
    # Noise of the machine is in both: only what checks add to the steps that have them counts.
    added = statistics.mean(checked) - usual
    share = added * len(checked) / len(took) / usual
    return {
        "step_s": usual,
        "checked_step_s": statistics.median(checked),
        "n_checked": len(checked),
        "n_steps": len(took),
        "share": share,
    }


# Trains with the code of checks and faults and without it, in turn, for some steps each. What is
# taken out asks, in a job without checks, whether there are any.
OFF = """
import json, sys, time
from pathlib import Path
import torch
from meshmend.train import Job
from meshmend.train.core.bit_flips import BitFlips
from meshmend.train.core.wrong_numbers import WrongNumbers

CHECKS = ("begin", "note_own", "compare")
FLIPS = ("in_state", "in_payload")
WITH = {(WrongNumbers, name): getattr(WrongNumbers, name) for name in CHECKS} | {
    (BitFlips, name): getattr(BitFlips, name) for name in FLIPS}

def begin(self):
    step, moved = self._job.step_number, self._loop.has_moved_state
    self._comparison.begin(step, has_moved_state=moved)
    return []

def compare(self, *, is_strange):
    self._comparison.complete(self._job.step_number, self._job.chips)

def nothing(*parts):
    pass

WITHOUT = dict.fromkeys(WITH, nothing) | {
    (WrongNumbers, "begin"): begin, (WrongNumbers, "compare"): compare}
steps, block = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
inputs = torch.randn(512, 32)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = Job(model, optimizer, dataset, batch=16, steps=steps, compare_every=10**9)
ends = []
for features, targets in job:
    loss = torch.nn.functional.mse_loss(model(features), targets)
    optimizer.zero_grad()
    loss.backward()
    job.step(loss)
    ends.append(time.perf_counter())
    for (part, name), method in (WITHOUT if job.step_number // block % 2 else WITH).items():
        setattr(part, name, method)
if job.is_leader:
    Path(sys.argv[3]).write_text(json.dumps(ends))
"""


def off(n_steps: int = 20_000, block: int = 20) -> dict[str, Any]:
    """Measure a step of 2x2 chips without checks, with and without the code that would check."""
    with tempfile.TemporaryDirectory() as folder:
        script, written = Path(folder, "script.py"), Path(folder, "ends.json")
        script.write_text(OFF)
        line = ("run", "--elastic", "--mesh", "2x2", script, str(n_steps), str(block), written)
        subprocess.run([sys.executable, "-m", "meshmend", *line], stdout=sys.stderr, check=True)
        ends = json.loads(written.read_text())
    took = [after - before for before, after in pairwise(ends)]
    # The first steps of a job and of each block are left out.
    medians = [
        statistics.median(took[at + 1 : at + block - 1])
        for at in range(4 * block, n_steps - block, block)
    ]
    with_code, without = medians[::2], medians[1::2]
    ratios = [a / b - 1 for a, b in zip(with_code, without, strict=False)]
    return {
        "step_s": statistics.median(with_code),
        "step_without_s": statistics.median(without),
        "added": statistics.median(ratios),
        # Of the median, if the ratios were normally distributed.
        "standard_error": 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5,
        "n_blocks": len(ratios),
    }


def checksum(n_elements: int = 1 << 22, n_runs: int = 15) -> dict[str, Any]:
    """Time sums of two ranks of one process, with and without checksums in turn."""
    import time

    import numpy as np

    from local_ranks import programs_of, run_all, together, transports
    from meshmend.schedule.algorithms import algorithm
    from meshmend.schedule.table import Collective
    from meshmend.topology.text import parse_mesh
    from meshmend.transport.event_loop import load_event_loop

    load_event_loop()
    programs = programs_of(algorithm("ring-1d").build(parse_mesh("1x2"), Collective.ALLREDUCE))
    arrays = [np.ones(n_elements, dtype=np.float32) for _ in range(2)]
    took: dict[bool, list[float]] = {False: [], True: []}
    with transports(2) as plain, transports(2, sums_payloads=True) as summed:
        for pair in (plain, summed):

            def connect(rank: int, pair: Any = pair) -> None:
                pair[rank].connect({1 - rank: pair[1 - rank].address})

            assert together(connect, 2) == [None, None]
        for _ in range(n_runs):
            for has_sums, pair in ((False, plain), (True, summed)):
                began = time.perf_counter()
                run_all(pair, programs, arrays, n_slices=8)
                took[has_sums].append(time.perf_counter() - began)
    without, with_sums = (statistics.median(took[each][2:]) for each in (False, True))
    ratios = [b / a for a, b in zip(took[False][2:], took[True][2:], strict=True)]
    return {
        "bytes": 4 * n_elements,
        "without_s": without,
        "with_s": with_sums,
        "added": statistics.median(ratios) - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=0)
    parser.add_argument("--steady", type=int, default=0)
    parser.add_argument("--quiet", type=int, default=0)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--off", type=int, default=0, metavar="RUNS")
    parser.add_argument("--checksum", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = read_today("wrong_numbers")

    def row(kind: str, number: int, made: Callable[[], Any]) -> Any:
        """Make one run unless the file of the day has it."""
        rows = figures.setdefault(kind, [])
        if len(rows) <= number:
            rows.append(made())
            record("wrong_numbers", figures)
            print(kind, number, json.dumps(rows[number]), flush=True)
        return rows[number]

    def chance(kind: str, number: int) -> random.Random:
        return random.Random(f"{options.seed} {kind} {number}")

    for number in range(options.flips):
        row("flips", number, lambda n=number: flip(n, chance("flip", n)))  # type: ignore[misc]
    if options.steady:
        loss = row("undisturbed_loss", 0, lambda: losses(run(STEPS, []))[STEPS])
        for number in range(options.steady):
            row("steady", number, lambda n=number: steady(loss, chance("steady", n)))  # type: ignore[misc]
    for number in range(options.quiet // QUIET_STEPS):
        row("quiet", number, lambda: quiet(QUIET_STEPS))
    if options.cost:
        row("cost", 0, cost)
    for number in range(options.off):
        row("off", number, off)
    if options.checksum:
        row("checksum", 0, checksum)
    print(json.dumps(summary(figures), indent=1))


def pooled(runs: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return what several runs of `off` say together; a run counts the more, the surer it is."""
    if not runs:
        return None
    weights = [each["standard_error"] ** -2 for each in runs]
    sums = sum(weight * each["added"] for weight, each in zip(weights, runs, strict=True))
    return {"added": sums / sum(weights), "standard_error": sum(weights) ** -0.5}


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """Return what all runs of the file come to."""
    flips, steadies, quiets = (figures.get(kind, []) for kind in ("flips", "steady", "quiet"))
    return {
        "flips": len(flips),
        "found": sum(bool(each["named"]) for each in flips),
        "right chip named, nobody else harmed": sum(
            each["is_right"] and each["finished"] and not each["others_away"] for each in flips
        ),
        "steady": len(steadies),
        "out within 5 K": sum(each["is_out"] for each in steadies),
        "longest": max((each["found_after_steps"] for each in steadies), default=None),
        "largest difference of the loss": max(
            (each["loss_difference"] for each in steadies), default=None
        ),
        "undisturbed steps": sum(each["steps"] for each in quiets if each["finished"]),
        "alarms": sum(len(each["alarms"]) for each in quiets),
        "cost": figures.get("cost"),
        "off": pooled(figures.get("off", [])),
        "checksum": figures.get("checksum"),
    }


if __name__ == "__main__":
    main()
