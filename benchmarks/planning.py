"""How much of a processor a plan of `auto` takes that nobody has made before, and how good it is.

    python benchmarks/planning.py [--no-write] [--largest 1024]

Each case runs in a process of its own, which first plans a 4x4 mesh for the same payload, so that
compiled code is loaded; no answer of an earlier run is read. Times are those of the processors, so
that other work on the machine counts little. Beside them stands what the plan takes over the limit,
because a search may also be quick by being bad.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

from meshmend.planning.plan import plan
from meshmend.topology.text import parse_mesh
from meshmend.units import format_bytes
from record import record

CASES = tuple(
    (shape, wrap, hole, payload_bytes)
    for shape, wrap, hole in (
        ("8x8", "none", "2x2@2,2"),
        ("16x16", "all", "4x2@6,6"),
        ("32x32", "none", "2x2@14,14"),
        ("16x16x16", "all", ""),
        ("64x64", "none", "4x4@30,30"),
    )
    for payload_bytes in (1_000, 10_000_000, 100_000_000)
)


def measured(shape: str, wrap: str, hole: str, payload_bytes: int) -> dict[str, Any]:
    """Return the figures of one case, planned in this process."""
    plan(parse_mesh("4x4"), payload=payload_bytes)
    mesh = parse_mesh(shape, wrap=wrap, fail=[hole] if hole else [])
    before_s = time.process_time()
    made = plan(mesh, payload=payload_bytes)
    total_s = time.process_time() - before_s
    return {
        "mesh": str(mesh),
        "chips": mesh.n_live,
        "payload_bytes": payload_bytes,
        "algorithm": made.schedule.algorithm,
        "processor_s": total_s,
        "steps_s": made.seconds,
        "of_limit": made.predicted().time_s / made.limit().time_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--largest", type=int, default=4096, help="leave out meshes of more chips")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one, in a process of its own
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measured(*json.loads(arguments.case))))
        return
    cases = []
    print(
        f"{'mesh':<28}{'payload':>8}  {'algorithm':<14}{'processor':>10}{'of limit':>10}{'peak':>9}"
    )
    for case in CASES:
        if parse_mesh(case[0]).n_live > arguments.largest:
            continue
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        done = subprocess.run(command, check=True, capture_output=True)
        found = json.loads(done.stdout)
        cases.append(found)
        print(
            f"{found['mesh']:<28}{format_bytes(found['payload_bytes']):>8}  "
            f"{found['algorithm']:<14}{found['processor_s']:>9.2f}s{found['of_limit']:>10.3f}"
            f"{found['peak_mb']:>6} MB",
            flush=True,
        )
    if not arguments.no_write:
        print(record("planning", {"cases": cases}))


if __name__ == "__main__":
    main()
