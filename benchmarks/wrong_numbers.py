"""How many wrong numbers --check-shares finds, whom it names, and whether the loss is right after.

    python benchmarks/wrong_numbers.py --flips 100 --steady 20 --quiet 10000 --cost --off

Each run trains a small model in float64 on 2x2 chips. `--flips`: one bit flips, of the gradients in
a step that is checked, or of the weights, the optimizer's state or the sums in any step, on any
chip. It must be found, the right chip named, and no other chip turned away. `--steady`: a chip is
wrong in every fifth step, from any step on. It must be out within 5 K steps, and the final loss be
that of a run without it, to 1e-9, because the job goes back to a checkpoint from before. `--quiet`:
as many steps without a fault, with K = 16, must raise no alarm. `--cost`: what a check in one of 16
steps costs on 4x4 chips whose shares take a while, as on accelerators, by the steps of one run.
`--off`: what a job without checks spends on not checking. `--checksum`: what checksums on the data
of sums cost on loopback, where a sum is bound by the processor: the most they can.

After each run the file of the day in `results/` is written; runs that it has are not made again.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
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


def off() -> dict[str, Any]:
    """Count how often a job of one chip without checks asks for them, and time the question."""
    import timeit

    import torch

    from meshmend.train.core.job_core import JobCore
    from meshmend.train.torch.job import Job

    asked, n_steps = 0, 200

    def ask(_: object) -> None:
        nonlocal asked
        asked += 1

    model = torch.nn.Linear(8, 1)
    data = [(torch.randn(8), torch.zeros(1)) for _ in range(8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    JobCore._checks = property(ask, lambda _, value: None)  # type: ignore[assignment]
    job = Job(model, optimizer, data, batch=8, steps=n_steps)
    for inputs, targets in job:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        job.step(loss)
    of_none = type("Holder", (), {"_checks": None})()
    question_s = timeit.timeit("holder._checks is None", globals={"holder": of_none}) / 1e6
    return {
        "questions_a_step": asked / n_steps,
        "question_s": question_s,
        "seconds_a_step": asked / n_steps * question_s,
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
    parser.add_argument("--off", action="store_true")
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
    if options.off:
        row("off", 0, off)
    if options.checksum:
        row("checksum", 0, checksum)
    print(json.dumps(summary(figures), indent=1))


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
        "off": figures.get("off"),
        "checksum": figures.get("checksum"),
    }


if __name__ == "__main__":
    main()
