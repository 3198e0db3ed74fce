"""How near an all-to-all comes to its limit, what a hole costs it by its place, and Gloo beside it.

    python benchmarks/all_to_all.py [--large] [--map] [--testbed 50Mbit] [--no-write]

Simulated cells are the same on every machine. `--large` adds meshes of 572 and 1020 chips, and
what planning them takes of a processor. `--map` moves a 2x2 hole over 8x8 and prints what the
all-to-all takes there, next to the full mesh. `--testbed` runs `all_to_all_single` of our backend
and of Gloo in turns, in one job on the emulated network of 4x4 less 2x2, and prints both next to
the limit; it needs what `meshmend doctor` asks for a testbed.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshmend import Mesh, limit, plan
from meshmend.topology.fabric import fabric
from meshmend.units import parse_bandwidth
from record import parser_of, record

CELLS = (
    Mesh((8, 8)),
    Mesh((8, 8), (True, True)),
    Mesh((8, 8)).without("2x2@2,2"),
    Mesh((8, 8), (True, True)).without("2x2@2,2"),
    Mesh((16, 16)).without("4x2@4,4"),
    Mesh((4, 4)).without("2x2@1,1"),
)
LARGE_CELLS = (
    Mesh((24, 24)).without("2x2@8,8"),
    Mesh((32, 32)).without("2x2@14,14"),
    Mesh((32, 32), (True, True)).without("2x2@14,14"),
)
BLOCK_BYTES = 1e6
HOLE = "2x2@1,1"
TESTBED_BLOCK = 1 << 18

WORKER = """
import json, os, statistics, sys, time
import torch, torch.distributed as dist
dist.init_process_group("meshmend")
gloo = dist.new_group(backend="gloo")
n, rank = dist.get_world_size(), dist.get_rank()
given = torch.arange(n * {block} // 4, dtype=torch.float32) + rank
output, wanted = torch.empty_like(given), torch.empty_like(given)
times = {{"meshmend": [], "gloo": []}}
for turn in range(6):
    for name, group, result in (("meshmend", None, output), ("gloo", gloo, wanted)):
        dist.barrier()
        began = time.perf_counter()
        dist.all_to_all_single(result, given, group=group)
        dist.barrier()
        times[name].append(time.perf_counter() - began)
assert torch.equal(output, wanted)
if rank == 0:
    medians = {{name: statistics.median(each[1:]) for name, each in times.items()}}
    open(sys.argv[1], "w").write(json.dumps(medians))
dist.destroy_process_group()
"""


def simulated(mesh: Mesh) -> dict[str, Any]:
    """Return the ratios to the limit of `auto` and of blocks that go straight."""
    payload = BLOCK_BYTES * mesh.n_live
    least_s = limit(mesh, payload, collective="all-to-all").time_s
    began = time.process_time()
    best = plan(mesh, collective="all-to-all", payload=payload)
    planning_s = time.process_time() - began
    straight = plan(mesh, "pairs", collective="all-to-all", payload=payload)
    return {
        "mesh": str(mesh),
        "algorithm": best.schedule.algorithm,
        "auto": best.predicted().time_s / least_s,
        "pairs": straight.predicted().time_s / least_s,
        "time_s": best.predicted().time_s,
        "planning_cpu_s": planning_s,
    }


def hole_map() -> list[list[float]]:
    """Return what an all-to-all takes on 8x8 with a 2x2 hole at each place, of the full mesh's."""
    full_s = plan(CELLS[0], collective="all-to-all", payload=64 * BLOCK_BYTES).predicted().time_s
    rows = []
    for row in range(7):
        times = []
        for column in range(7):
            broken = CELLS[0].without(f"2x2@{row},{column}")
            made = plan(broken, collective="all-to-all", payload=BLOCK_BYTES * broken.n_live)
            times.append(made.predicted().time_s / full_s)
        rows.append(times)
        print("  ".join(f"{each:.2f}" for each in times), flush=True)
    return rows


def on_testbed(rate: str) -> dict[str, Any]:
    """Return what our backend and Gloo take in one job, next to the limit of that network."""
    mesh = Mesh((4, 4)).without(HOLE)
    network = replace(fabric("reference"), link_bandwidth_bytes_per_s=parse_bandwidth(rate))
    least_s = limit(mesh, mesh.n_live * TESTBED_BLOCK, network, collective="all-to-all").time_s
    with tempfile.TemporaryDirectory() as folder:
        script, result = Path(folder, "worker.py"), Path(folder, "times.json")
        script.write_text(WORKER.format(block=TESTBED_BLOCK), encoding="utf-8")
        command = [sys.executable, "-m", "meshmend", "run", "--mesh", "4x4", "--fail", HOLE]
        subprocess.run([*command, "--testbed", rate, str(script), str(result)], check=True)
        times = json.loads(result.read_text(encoding="utf-8"))
    return {
        "mesh": str(mesh),
        "rate": rate,
        "limit_s": least_s,
        **{f"{name}_s": seconds for name, seconds in times.items()},
        "meshmend_to_limit": times["meshmend"] / least_s,
        "gloo_to_meshmend": times["gloo"] / times["meshmend"],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--map", action="store_true")
    parser.add_argument("--testbed", metavar="RATE")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"cells": []}
    print("1 MB a pair, of the limit: auto, and every block straight")
    for mesh in CELLS + LARGE_CELLS * arguments.large:
        cell = simulated(mesh)
        results["cells"].append(cell)
        print(
            f"{cell['mesh']:<30} {cell['auto']:.3f} ({cell['algorithm']})   {cell['pairs']:.3f}   "
            f"planned in {cell['planning_cpu_s']:.1f} cpu s",
            flush=True,
        )
    if arguments.map:
        print("8x8 with a 2x2 hole whose first chip is there, of the full mesh's time")
        results["map"] = hole_map()
    if arguments.testbed:
        found = results["testbed"] = on_testbed(arguments.testbed)
        print(
            f"testbed {found['rate']}, {found['mesh']}: {found['meshmend_to_limit']:.3f} of the "
            f"limit; Gloo takes {found['gloo_to_meshmend']:.2f} times as long"
        )
    if not arguments.no_write:
        print(f"wrote {record('all-to-all', results)}")


if __name__ == "__main__":
    main()
