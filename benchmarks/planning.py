"""How long a plan takes, step by step, and how that grows from 8x8 to 64x64.

    python benchmarks/planning.py [--no-write] [--largest 32]

Each case runs in a process of its own, which first plans an 8x8 mesh so that compiled code is
loaded: compilation is excluded. Memory is that process's peak. Algorithms that need a full mesh
get one; the others lose a 4x2 block in the middle.
"""

import argparse
import json
import resource
import subprocess
import sys
from typing import Any

from meshmend import Mesh, plan
from record import record

ALGORITHMS = ("ring-1d", "two-d", "row-pair", "ft-two-d", "rank-ring")
SIDES = (8, 16, 32, 64)
FULL_ONLY = {"two-d", "row-pair"}


def mesh_for(side: int, algorithm: str) -> Mesh:
    """Return the square mesh of a case."""
    middle = side // 2 - side // 2 % 2
    full = Mesh((side, side))
    return full if algorithm in FULL_ONLY else full.without(f"4x2@{middle - 2},{middle - 2}")


def measured(side: int, algorithm: str) -> dict[str, Any]:
    """Return one case's figures, planned in this process."""
    plan(mesh_for(8, algorithm), algorithm)
    result = plan(mesh_for(side, algorithm), algorithm)
    return {
        "mesh": str(result.mesh),
        "algorithm": algorithm,
        "rows": result.schedule.n_rows,
        "seconds": result.seconds,
        "total_s": sum(result.seconds.values()),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--largest", type=int, default=64, help="largest side")
    parser.add_argument("--case", nargs=2, metavar=("SIDE", "ALGORITHM"), help="one, as JSON")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measured(int(arguments.case[0]), arguments.case[1])))
        return
    cases = []
    head = ("mesh", "algorithm", "rows", "build", "hazards", "route", "verify", "deadlock", "total")
    print("{:<22} {:<10} {:>11}".format(*head), *(f"{word:>9}" for word in head[3:]), "  peak MB")
    for side in (side for side in SIDES if side <= arguments.largest):
        for algorithm in ALGORITHMS:
            command = [sys.executable, __file__, "--case", str(side), algorithm]
            case = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            cases.append(case)
            times = [*case["seconds"].values(), case["total_s"]]
            print(
                f"{case['mesh']:<22} {algorithm:<10} {case['rows']:>11,}",
                *(f"{took:>8.3f}s" for took in times),
                f"  {case['peak_mb']:>7}",
                flush=True,
            )
    if not arguments.no_write:
        print(record("planning", {"cases": cases}))


if __name__ == "__main__":
    main()
