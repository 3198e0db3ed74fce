"""How fast the simulator is: messages a second by algorithm, and how time grows with the mesh.

    python benchmarks/simulator.py [--no-write]

Prints a table and writes `results/simulator-DATE.json` beside this file. Times are CPU time of
one thread in a process that has compiled everything, the best of two runs; `prepare` is hazards,
routes and tables, made once for all payloads and numbers of slices.
"""

import argparse
import time
from typing import Any

from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import Collective
from meshmend.simulator.network_program import Program, program_of
from meshmend.simulator.rules import simulate
from meshmend.simulator.slices import best_slices
from meshmend.topology.fabric import fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from record import record

PAYLOAD_BYTES = 100e6

CASES: tuple[tuple[str, str, str, int], ...] = (
    ("ring-1d", "8x8", "", 8),
    ("ring-1d", "16x16", "", 8),
    ("ring-1d", "32x32", "", 1),
    ("ring-1d", "32x32", "4x2@14,14", 2),
    ("row-pair", "8x8", "", 16),
    ("row-pair", "16x16", "", 16),
    ("row-pair", "32x32", "", 8),
    ("row-pair", "64x64", "", 2),
    ("two-d", "8x8", "", 16),
    ("two-d", "16x16", "", 16),
    ("two-d", "32x32", "", 8),
    ("two-d", "64x64", "", 1),
    ("ft-two-d", "16x16", "4x2@6,6", 16),
    ("ft-two-d", "32x32", "4x2@14,14", 8),
    ("ft-two-d", "64x64", "4x2@30,30", 2),
    ("rank-ring", "16x16", "4x2@6,6", 4),
    ("rank-ring", "32x32", "4x2@14,14", 1),
)


def program_named(name: str, mesh: Mesh) -> Program:
    schedule = algorithm(name).build(mesh, Collective.ALLREDUCE)
    return program_of(schedule, hazards_of(schedule), placed(mesh, schedule).routes)


def measure(name: str, mesh: Mesh, slices: int) -> dict[str, Any]:
    """Return one row of the table."""
    start = time.process_time()
    program = program_named(name, mesh)
    prepare_s = time.process_time() - start
    runs_s = []
    for _ in range(2):
        start = time.process_time()
        result = simulate(program, fabric("reference"), payload_bytes=PAYLOAD_BYTES, slices=slices)
        runs_s.append(time.process_time() - start)
    return {
        "algorithm": name,
        "mesh": str(mesh),
        "rows": program.n_rows,
        "slices": slices,
        "messages": result.n_messages,
        "hops": program.n_hops * slices,
        "prepare_s": prepare_s,
        "run_s": min(runs_s),
        "messages_per_s": result.n_messages / min(runs_s),
        "simulated_s": result.time_s,
        "max_link_utilisation": result.max_link_utilisation,
    }


def measure_search(name: str, mesh: Mesh) -> dict[str, Any]:
    """Return how long the search for slices takes, everything included."""
    start = time.process_time()
    best = best_slices(program_named(name, mesh), fabric("reference"), payload_bytes=PAYLOAD_BYTES)
    return {
        "algorithm": name,
        "mesh": str(mesh),
        "search_s": time.process_time() - start,
        "slices": best.slices,
        "simulated_s": best.time_s,
    }


def main() -> None:
    """Measure every case, print, and write the result down unless told not to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    measure("ring-1d", parse_mesh("2x2"), 2)  # compiles
    measure("rank-ring", parse_mesh("4x4", fail=["1,1"]), 2)
    rows = []
    for name, shape, hole, slices in CASES:
        row = measure(name, parse_mesh(shape, fail=[hole] if hole else []), slices)
        rows.append(row)
        print(
            f"{name:9} {row['mesh']:24} {row['rows']:8} rows x {slices:2}  "
            f"{row['messages_per_s'] / 1e6:6.2f} M messages/s  run {row['run_s']:6.3f} s  "
            f"prepare {row['prepare_s']:6.3f} s  simulated {row['simulated_s'] * 1e6:9.2f} us",
            flush=True,
        )
    broken = parse_mesh("32x32", fail=["4x2@14,14"])
    searches = [measure_search(name, broken) for name in ("ring-1d", "ft-two-d", "rank-ring")]
    for row in searches:
        print(
            f"{row['algorithm']:9} {row['mesh']:24} search for slices {row['search_s']:6.2f} s: "
            f"{row['slices']} slices, {row['simulated_s'] * 1e6:.2f} us",
            flush=True,
        )
    if not arguments.no_write:
        path = record(
            "simulator",
            {
                "fabric": str(fabric("reference")),
                "payload_bytes": PAYLOAD_BYTES,
                "rows": rows,
                "searches": searches,
            },
        )
        print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
