"""Our simulator next to SimGrid on neighbour-only schedules: times must agree within 5 %.

    python benchmarks/simgrid_compare.py [--no-write]

SimGrid (Debian's python3-simgrid) belongs to the system's Python, so the play itself runs there:
`simgrid_side.py`. Where it is not installed this says so and compares nothing. Each case is
played twice: with one message at a time on a link, as in our rules, and with SimGrid's own
sharing of a link among all messages that are ready. The first must agree; the second shows how
much the order on links matters.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.table import Collective
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import simulate
from meshmend.topology.fabric import fabric
from meshmend.topology.routes import routes_for
from meshmend.topology.text import parse_mesh
from record import parser_of, record

SYSTEM_PYTHON = "/usr/bin/python3"
TOLERANCE = 0.05

# Algorithm, mesh, wrap, hole, payload, slices: every hop goes to a neighbour.
CASES: tuple[tuple[str, str, str, str, float, int], ...] = (
    ("ring-1d", "4x4", "none", "", 1e4, 1),
    ("ring-1d", "4x4", "none", "", 1e6, 1),
    ("ring-1d", "4x4", "none", "", 1e6, 4),
    ("ring-1d", "4x4", "none", "", 1e8, 8),
    ("ring-1d", "4x4", "none", "2x2@0,2", 1e6, 4),
    ("ring-1d", "8x8", "none", "2x2@2,2", 1e6, 1),
    ("ring-1d", "8x8", "none", "2x2@2,2", 1e8, 2),
    ("two-d", "4x4", "all", "", 1e6, 1),
    ("two-d", "4x4", "all", "", 1e6, 4),
    ("two-d", "4x4", "all", "", 1e8, 16),
    ("two-d", "8x8", "all", "", 1e6, 1),
    ("two-d", "8x8", "all", "", 1e8, 2),
)


def simgrid_version() -> str | None:
    """Return the version of the system's SimGrid, or None where there is none."""
    try:
        answer = subprocess.run(
            [SYSTEM_PYTHON, "-c", "import simgrid; print(simgrid.simgrid_version)"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def compare(
    name: str, shape: str, wrap: str, hole: str, payload_bytes: float, slices: int
) -> dict[str, Any]:
    """Return one row of the table: our time and SimGrid's two."""
    mesh = parse_mesh(shape, wrap=wrap, fail=[hole] if hole else [])
    schedule = algorithm(name).build(mesh, Collective.ALLREDUCE)
    hazards, routes = hazards_of(schedule), routes_for(mesh, schedule.src, schedule.dst)
    assert routes.max_hops == 1, f"{name} on {mesh} is not neighbour-only"
    figures = fabric("reference")
    ours = simulate(
        program_of(schedule, hazards, routes), figures, payload_bytes=payload_bytes, slices=slices
    )
    transfer_s = payload_bytes / slices / figures.link_bandwidth_bytes_per_s
    case = {
        "n_ranks": schedule.n_ranks,
        "src": schedule.src.tolist(),
        "dst": schedule.dst.tolist(),
        "before_send": [hazards.before_send(row) for row in range(schedule.n_rows)],
        "before_write": [hazards.before_write(row) for row in range(schedule.n_rows)],
        "hold_s": (figures.message_overhead_s + schedule.row_fractions() * transfer_s).tolist(),
        "slices": slices,
        "bandwidth": figures.link_bandwidth_bytes_per_s,
        "latency": figures.hop_latency_s,
    }
    start = time.perf_counter()
    queued_s, shared_s = (played({**case, "queue": queue}) for queue in (True, False))
    return {
        "algorithm": name,
        "mesh": str(mesh),
        "payload_bytes": payload_bytes,
        "slices": slices,
        "messages": ours.n_messages,
        "ours_s": ours.time_s,
        "simgrid_s": queued_s,
        "ratio": ours.time_s / queued_s,
        "simgrid_sharing_s": shared_s,
        "ratio_to_sharing": ours.time_s / shared_s,
        "simgrid_wall_s": time.perf_counter() - start,
    }


def played(case: dict[str, Any]) -> float:
    """Return the time that SimGrid gives a case."""
    answer = subprocess.run(
        [SYSTEM_PYTHON, str(Path(__file__).parent / "simgrid_side.py")],
        input=json.dumps(case),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(answer.stdout)


def main() -> int:
    """Compare every case; return 1 if one is off by more than the tolerance."""
    parser = parser_of(__doc__)
    arguments = parser.parse_args()
    version = simgrid_version()
    if version is None:
        print(f"skipped: {SYSTEM_PYTHON} has no simgrid; install Debian's python3-simgrid")
        return 0
    rows = []
    for case in CASES:
        row = compare(*case)
        rows.append(row)
        print(
            f"{row['algorithm']:8} {row['mesh']:20} {row['payload_bytes']:8.0e} B "
            f"x {row['slices']:2}  ours {row['ours_s'] * 1e6:9.3f} us  SimGrid "
            f"{row['simgrid_s'] * 1e6:9.3f} us ({row['ratio'] - 1:+.2%}), sharing links "
            f"{row['simgrid_sharing_s'] * 1e6:9.3f} us ({row['ratio_to_sharing'] - 1:+.2%})",
            flush=True,
        )
    worst = max(abs(row["ratio"] - 1) for row in rows)
    print(f"largest difference {worst:.3%}, tolerance {TOLERANCE:.0%}")
    if not arguments.no_write:
        figures = {
            "simgrid": version,
            "fabric": str(fabric("reference")),
            "largest_difference": worst,
            "tolerance": TOLERANCE,
            "rows": rows,
        }
        print(f"wrote {record('simgrid_compare', figures)}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
