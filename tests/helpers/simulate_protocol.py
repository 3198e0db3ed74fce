"""Runs the protocol under a simulated clock: `python tests/helpers/simulate_protocol.py --seed 7`.

With `--trace` it prints all that happened: the time, who, and what. The same seed gives the same
history, always.
"""

import argparse
import sys
from time import process_time

from simulation.runs import simulate


def main() -> int:
    """Run one seed or some, and say how they went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--sharded", action="store_true", help="share the optimizer's state")
    parser.add_argument("--split", action="store_true", help="let both sides live on")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    chosen = parser.parse_args()
    began = process_time()
    runs = []
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        run = simulate(seed, traces=chosen.trace, is_sharded=chosen.sharded, is_split=chosen.split)
        runs.append(run)
        print(*run.trace, sep="\n", end="\n" if run.trace else "")
        if run.problem:
            print(f"seed {run.seed}: {run.problem}", flush=True)
    bad = sum(bool(run.problem) for run in runs)
    failed = sum(run.is_failed_job for run in runs)
    restores = sum(run.n_restores for run in runs)
    print(
        f"{len(runs)} runs in {process_time() - began:.1f} s of one core: {bad} with a "
        f"problem, {failed} jobs that failed as they should, {restores} restores, "
        f"{sum(run.n_generations for run in runs)} generations"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
