"""What the constants of the search for trees are worth: each varied around its value.

    python benchmarks/tune_trees.py [--quick] [--no-write] [--only NAME] ...

For each value it prints how the time to the limit changes against the value in the source (the
geometric mean over meshes and payloads, the largest loss and the largest gain) and what it does
to the processor time of the search. Below zero means faster schedules, or a quicker search. A
constant is well chosen where no other value gains without making the search much longer.

Times of schedules are simulated on the fabric `reference` and exact; a change of a few tenths of
a percent is noise of the search. `--quick` takes tiny meshes only, on which constants for
large meshes have no effect: under two minutes. The full set takes hours; name constants with
`--only`. Constants inside compiled loops cannot be varied, and say so.
"""

import importlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshmend.planning.packed_trees import trees_of
from meshmend.planning.target import Question
from meshmend.planning.tree_search import best_trees
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import Collective
from meshmend.simulator.limit import limit
from meshmend.simulator.network_program import program_of
from meshmend.simulator.slices import best_slices
from meshmend.topology.fabric import fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from record import parser_of, record

REFERENCE = fabric("reference")
QUICK_MESHES = (("4x4", "all", None), ("3x4", "none", None), ("4x5", "none", "0,0"))
QUICK_PAYLOADS = (1e5, 1e6, 1e7)
MESHES = (
    ("8x8", "none", "2x2@2,2"),
    ("5x7", "none", "3,4"),
    ("6x6", "all", None),
    ("16x16", "none", "4x2@6,6"),
    ("16x32", "none", "4x2@6,14"),
    ("4x4x4", "none", None),
)
PAYLOADS = (1e3, 1e5, 3e5, 1e6, 1e7, 1e8)

Case = tuple[Mesh, float]
Timing = Callable[[Mesh, float], float]


def trees_s(mesh: Mesh, payload_bytes: float) -> float:
    """Return how long the fastest trees take that the search finds."""
    return best_trees(Question(mesh, payload_bytes, REFERENCE)).simulation.time_s


def rings_s(mesh: Mesh, payload_bytes: float) -> float:
    """Return how long one ring through all ranks takes in the slices that the search finds."""
    schedule = algorithm("rank-ring").build(mesh, Collective.ALLREDUCE)
    program = program_of(schedule, hazards_of(schedule), placed(mesh, schedule).routes)
    return best_slices(program, REFERENCE, payload_bytes=payload_bytes).time_s


@dataclass(frozen=True)
class Constant:
    """A constant of a module below `meshmend`, and other values to try for it."""

    module: str
    name: str
    others: tuple[Any, ...]
    timing: Timing = trees_s

    @property
    def value(self) -> Any:
        return getattr(importlib.import_module(f"meshmend.{self.module}"), self.name)

    @contextmanager
    def set_to(self, value: Any) -> Iterator[None]:
        """Give the constant another value within a `with` block."""
        module, before = importlib.import_module(f"meshmend.{self.module}"), self.value
        setattr(module, self.name, value)
        try:
            yield
        finally:
            setattr(module, self.name, before)


CONSTANTS = (
    Constant("trees.tree_balanced", "_RANKS_TIMES_TREES_PER_SEARCH", (15_000, 240_000)),
    Constant("trees.tree_balanced", "_MOST_ATTEMPTS", (4, 36)),
    Constant("trees.tree_balanced", "_LEAST_IDLE_ROUNDS", (1, 4)),
    Constant("trees.tree_balanced", "_MOST_MORE_IDLE_ROUNDS", (2, 18)),
    Constant("trees.tree_balanced", "_LEAST_HOPELESS_LOAD", (2, 8)),
    Constant("trees.tree_disjoint", "_MOST_SLACK_HOPS", (0, 2)),
    Constant("trees.tree_disjoint", "_ATTEMPTS_PER_DEPTH", (3, 30)),
    Constant("trees.tree_disjoint", "_MOVES_TIMES_RANKS", (1 << 20, 1 << 24)),
    Constant("trees.tree_disjoint", "_MOVES_PER_LOOK", (16, 256)),
    Constant("trees.separation", "_TEMPERATURE_HOPS", (0.3, 3.0)),
    Constant("planning.tree_finalists", "_FEW_TREES", ((1,), (1, 2, 3, 4, 5, 6, 7, 8))),
    Constant("planning.tree_finalists", "_DEPTH_SLACKS_HOPS", ((0,), (0, 1, 2, 3, 4))),
    Constant("planning.tree_finalists", "_FAR_BEHIND", (1.01, 1.16)),
    Constant("planning.tree_finalists", "_WINDOWS_PER_PAYLOAD", (1, 6)),
    Constant("planning.tree_finalists", "_LONGEST_WINDOW_RADII", (1, 6)),
    Constant("planning.tree_finalists", "MOST_FINALISTS", (3, 18)),
    Constant("planning.tree_finalists", "_PACKINGS_IF_SMALL", (5, 50)),
    Constant("planning.tree_finalists", "_PACKINGS_USUALLY", (2, 10)),
    Constant("planning.tree_search", "_LEAST_FINALISTS", (1, 4)),
    Constant("planning.tree_search", "_MESSAGES_SIMULATED_WHOLE", (30_000, 480_000)),
    Constant("planning.tree_search", "_SLICES_BEYOND_FULL", (2, 32)),
    Constant("planning.tree_search", "_SLICE_FACTORS", ((), (1.1, 0.91), (1.2, 0.83, 1.1, 0.91))),
    Constant("planning.tree_search", "_MOST_STEPS_PER_FACTOR", (1, 9)),
    Constant("planning.tree_search", "USUAL_DELAY_HOPS_PER_HOP", (0.0, 1.0, 1.6)),
    Constant("planning.tree_search", "_OTHER_DELAYS_HOPS_PER_HOP", ((), (1.0, 1.1, 1.4, 1.6, 0.5))),
    Constant("simulator.slices", "_UNSTEADY_SLICES", (2, 32), rings_s),
    Constant("simulator.slices", "_WORTH_DOUBLING", (0.97, 1.0), rings_s),
)


def measured(timing: Timing, cases: list[Case]) -> tuple[list[float], float]:
    """Return the ratio to the limit in each case, and the processor time of all searches."""
    trees_of.cache_clear()  # packings made with another value
    start = time.process_time()
    times_s = [timing(mesh, payload_bytes) for mesh, payload_bytes in cases]
    cpu_s = time.process_time() - start
    limits_s = [limit(mesh, REFERENCE, size).bandwidth_or_latency_s for mesh, size in cases]
    return [time_s / limit_s for time_s, limit_s in zip(times_s, limits_s, strict=True)], cpu_s


def compared(
    constant: Constant, cases: list[Case], usual: list[float], usual_cpu_s: float
) -> Iterator[dict[str, Any]]:
    """Yield what each other value of a constant changes, and print it."""
    print(f"{constant.module}.{constant.name} = {constant.value}", flush=True)
    for value in constant.others:
        with constant.set_to(value):
            ratios, cpu_s = measured(constant.timing, cases)
        factors = [ratio / before for ratio, before in zip(ratios, usual, strict=True)]
        mean = math.exp(sum(map(math.log, factors)) / len(factors))
        row = {
            "value": value,
            "mean_change": mean - 1,
            "largest_loss": max(0.0, max(factors) - 1),
            "largest_gain": max(0.0, 1 - min(factors)),
            "search_cpu_change": cpu_s / usual_cpu_s - 1,
        }
        print(
            f"    {value!s:<32} ratio {row['mean_change']:+7.2%}  "
            f"(loses up to {row['largest_loss']:.1%}, gains up to {row['largest_gain']:.1%})  "
            f"search {row['search_cpu_change']:+5.0%}",
            flush=True,
        )
        yield row


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="small meshes, few payloads")
    names = [constant.name for constant in CONSTANTS]
    parser.add_argument("--only", action="append", choices=names, help="this constant; repeat")
    arguments = parser.parse_args()
    meshes = [
        parse_mesh(shape, wrap=wrap, fail=[fail] if fail else [])
        for shape, wrap, fail in (QUICK_MESHES if arguments.quick else MESHES)
    ]
    payloads = QUICK_PAYLOADS if arguments.quick else PAYLOADS
    cases = [(mesh, payload_bytes) for mesh in meshes for payload_bytes in payloads]
    usual: dict[Timing, tuple[list[float], float]] = {}
    for timing in (trees_s, rings_s):
        timing(*cases[0])  # compiles
        usual[timing] = measured(timing, cases)
    results = {
        f"{constant.module}.{constant.name}": {
            "value": constant.value,
            "others": list(compared(constant, cases, *usual[constant.timing])),
        }
        for constant in CONSTANTS
        if constant.name in (arguments.only or names)
    }
    if not arguments.no_write:
        figures = {
            "fabric": str(REFERENCE),
            "quick": arguments.quick,
            "meshes": [str(mesh) for mesh in meshes],
            "payloads_bytes": payloads,
            "constants": results,
        }
        print(record("tune_trees", figures))


if __name__ == "__main__":
    main()
