"""How many wrong numbers --check-shares finds, whom it names, and whether the loss is right after.

    python benchmarks/wrong_numbers.py --flips 25 --steady 20 --quiet 10000

Each run trains a small model in float64 on 2x2 chips. `--flips`: one bit flips, of the gradients in
a step that is checked, or of the weights, the optimizer's state or the sums in any step, on any
chip. It must be found, the right chip named, and no other chip turned away. `--steady`: a chip is
wrong in every fifth step, from any step on. It must be out within 7 K steps, and the final loss be
that of a run without it, to 1e-9, because the job goes back to a checkpoint from before. `--quiet`:
as many steps without a fault must raise no alarm. `--cost`: what a check in one of 16 steps costs
on 4x4 chips whose shares take a while, as on accelerators, by the steps of one run.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

from elastic_job import elastic, losses, of_kind
from meshmend.train.core.share_checks import is_check_step

EVERY, STEPS = 5, 110
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


def flips(n_runs: int, chance: random.Random) -> None:
    """Flip one bit in each of some runs."""
    found = right = others = 0
    for number in range(n_runs):
        part = ("gradient", "weights", "state", "sum")[number % 4]
        chip = chance.choice(CHIPS)
        steps = [step for step in range(2, 30) if part != "gradient" or is_check_step(step, EVERY)]
        fault = f"flip {part} {words(chip)} at {chance.choice(steps)}"
        result = run(40, [fault])
        found += bool(named(result))
        right += named(result) == [list(chip)]
        others += any(each != list(chip) for each in away(result)) or not result["finished"]
        print(json.dumps([fault, named(result), away(result), result["finished"], result["why"]]))
        sys.stdout.flush()
    print(f"{n_runs} flips: found {found}, right chip named {right}, others harmed {others}")


def steady(n_runs: int, chance: random.Random) -> None:
    """Let one chip be wrong in every fifth step, in each of some runs."""
    undisturbed = losses(run(STEPS, []))[STEPS]
    out = same = 0
    for _ in range(n_runs):
        chip, first = chance.choice(CHIPS), chance.randrange(50, 65)
        result = run(STEPS, [f"wrong {words(chip)} from {first}"])
        steps = [event["step"] for event in of_kind(result, "wrong-result")]
        out += away(result) == [list(chip)] and steps[0] - first <= 7 * EVERY
        difference = abs(losses(result)[STEPS] - undisturbed)
        same += difference <= 1e-9
        went_back = [event["step"] for event in of_kind(result, "restored")]
        print(json.dumps([words(chip), first, steps, went_back, difference]))
        sys.stdout.flush()
    print(f"{n_runs} steady: out within 7 K {out}, final loss within 1e-9 {same}")


def quiet(n_steps: int) -> None:
    """Train without a fault."""
    result = run(n_steps, [], every=16)
    alarms = [event for kind in ALARMS for event in of_kind(result, kind)]
    print(f"{n_steps} undisturbed steps: {len(alarms)} alarms, finished {result['finished']}")


def cost() -> None:
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
    print(
        f"a step {usual:.3f} s, {len(checked)} of {len(took)} with a check "
        f"{statistics.median(checked):.3f} s: checks cost {share:.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--steady", type=int, default=20)
    parser.add_argument("--quiet", type=int, default=10_000)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    if options.flips:
        flips(options.flips, chance)
    if options.steady:
        steady(options.steady, chance)
    if options.cost:
        cost()
    if options.quiet:
        quiet(options.quiet)


if __name__ == "__main__":
    main()
