"""Runs the protocol under a simulated clock: `python tests/helpers/simulate_protocol.py --seed 7`.

With `--trace` it prints all that happened: the time, who, and what. The same seed gives the same
history, always.
"""

import argparse
import sys
from time import process_time

from simulation.runs import simulate
from simulation.world import Scenario


def main() -> int:
    """Run one seed or some, and say how they went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--sharded", action="store_true", help="share the optimizer's state")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--split", action="store_true", help="let both sides live on")
    kinds.add_argument("--tiles", action="store_true", help="let a replica be several chips")
    kinds.add_argument("--few-tiles", action="store_true", help="short jobs of few tiles")
    kinds.add_argument("--moments", action="store_true", help="kill at the worst moments")
    kinds.add_argument("--large", action="store_true", help="train on 1024 chips")
    parser.add_argument("--plans", action="store_true", help="swap plans between steps")
    parser.add_argument("--links", action="store_true", help="let links be slow for a while")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    chosen = parser.parse_args()
    scenario_of = Scenario.of_split if chosen.split else Scenario.of
    if chosen.large:
        scenario_of = Scenario.of_large
    if chosen.tiles:
        scenario_of = Scenario.of_tiles
    if chosen.moments:
        scenario_of = Scenario.of_moments
    if chosen.few_tiles:
        scenario_of = Scenario.of_few_tiles
    began = process_time()
    runs = []
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        run = simulate(
            seed,
            scenario_of=scenario_of,
            traces=chosen.trace,
            is_sharded=chosen.sharded,
            swaps_plans=chosen.plans,
            watches_links=chosen.links,
        )
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
