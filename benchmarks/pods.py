"""How near `auto` comes to the limit on the pods of today, and what a question costs.

    python benchmarks/pods.py [--no-write] [--only 16x16x16] [--large] [--sweep]

Each row is one question to `auto` in a process of its own, with an empty cache: the ratio to the
larger of bandwidth and hops, beside the figure that was asked for, the ratio to the limit, the
processor time and the most memory. Then the same question again, from the cache. `--large` adds
128x128. `--sweep` asks for payloads between those of the table, against the limit alone. Ratios are
simulated and exact, but for trees of more than 8 million messages: their time is estimated from
their first slices, to about 1 %. Times are of this machine. The result file is written after every
row, so that a run that is broken off leaves what it has measured.
"""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from record import parser_of, record

# mesh, wrap, failures, fabric, (payload, asked ratio or None) ...
Case = tuple[str, str, str, str, tuple[tuple[str, float | None], ...]]
CASES: tuple[Case, ...] = (
    ("4x4x4", "all", "", "tpu-v4", (("1KB", 1.12), ("100KB", 1.8))),
    ("8x8x8", "all", "", "tpu-v4", (("10MB", 1.22), ("100MB", 1.02))),
    (
        "16x16",
        "all",
        "",
        "tpu-v5e",
        (("1KB", 1.12), ("10KB", 1.17), ("100KB", 1.7), ("1MB", 2.1), ("10MB", 1.2)),
    ),
    ("16x16", "all", "4x2@6,6", "tpu-v5e", (("1KB", 1.5), ("1MB", 2.3), ("10MB", 1.35))),
    (
        "32x32",
        "none",
        "4x2@14,14",
        "reference",
        (
            ("1KB", 1.06),
            ("10KB", 1.08),
            ("100KB", 1.23),
            ("1MB", 1.66),
            ("10MB", 1.95),
            ("100MB", 1.20),
            ("1GB", 1.06),
        ),
    ),
    ("32x32", "none", "1x24@15,2", "reference", (("1MB", 1.85), ("10MB", 2.3), ("100MB", 1.26))),
    (
        "16x16x16",
        "all",
        "",
        "tpu-v4",
        (
            ("1KB", None),
            ("30KB", None),
            ("100KB", None),
            ("1MB", None),
            ("10MB", 1.5),
            ("100MB", 1.04),
            ("1GB", 1.01),
        ),
    ),
    ("16x16x16", "all", "2x2x1@4,4,4", "tpu-v4", (("1MB", None), ("100MB", 1.15), ("1GB", 1.06))),
    ("16x20x28", "all", "", "tpu-v5p", (("100MB", 1.25),)),
    ("16x20x28", "all", "2x2x1@4,4,4", "tpu-v5p", (("100MB", 1.35),)),
)
LARGE: tuple[Case, ...] = (("128x128", "none", "", "reference", (("100MB", None),)),)

# mesh, wrap, failures, fabric, (payloads, asked ratio to the limit) ...
SWEEPS: tuple[tuple[str, str, str, str, tuple[tuple[str, float], ...]], ...] = (
    (
        "32x32",
        "none",
        "4x2@14,14",
        "reference",
        (
            ("1KB 3KB 10KB 30KB 100KB 300KB 500KB 700KB 1MB 1.5MB 2MB 2.5MB 3MB 3.5MB 4MB", 1.42),
            ("4.5MB 5MB 5.5MB 6MB 6.5MB 7MB 8MB 9MB 10MB 11MB 12MB 13MB 14MB 16MB 20MB", 1.42),
            ("25MB 30MB 50MB 70MB 100MB 200MB 500MB 1GB", 1.40),
        ),
    ),
    (
        "16x16x16",
        "all",
        "",
        "tpu-v4",
        (
            ("1KB 3KB 10KB 30KB", 1.5),
            ("50KB 100KB 300KB 1MB 3MB 5MB 8MB", 2.0),
            ("10MB 13MB 20MB 30MB 60MB 100MB 300MB 1GB", 1.5),
        ),
    ),
)

# Runs in the child: one question, and its figures as one line of JSON.
ASK = """
import json, resource, sys, time
start = time.process_time()
from meshmend.cli.console import cache_dir
from meshmend.planning.comparison import compared
from meshmend.topology.fabric import fabric
from meshmend.topology.text import parse_mesh
from meshmend.units import parse_bytes
shape, wrap, fail, machine, payload = sys.argv[1:]
mesh = parse_mesh(shape, wrap=wrap, fail=fail.split())
result = compared(mesh, fabric(machine), parse_bytes(payload), ["auto"], cache_dir=cache_dir())
summary = result.summary()
best = summary["results"][0]
print(json.dumps({
    "time_s": best["time_s"],
    "ratio": best["ratio_to_bandwidth_or_latency_limit"],
    "ratio_to_limit": best["ratio_to_limit"],
    "limit_kind": summary["limit_kind"],
    "detail": best["detail"],
    "slices": best["slices"],
    "cpu_s": time.process_time() - start,
    "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def asked(case: Case, payload: str, cache: str) -> dict[str, Any]:
    """Return the figures of one question, asked in a process of its own."""
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    # An installed package has its bytecode on disk. Without it each question compiles all modules.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", ASK, *case[:4], payload],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def measured(case: Case, payload: str, most: float | None) -> dict[str, Any]:
    """Return the figures of a question asked for the first time, and again."""
    shape, wrap, fail, machine, _ = case
    with tempfile.TemporaryDirectory() as cache:
        first, again = (asked(case, payload, cache) for _ in range(2))
    assert first["time_s"] == again["time_s"], "the cache changes nothing"
    mesh = f"{shape}{' torus' if wrap == 'all' else ''}{f' less {fail}' if fail else ''}"
    row = {"mesh": mesh, "fabric": machine, "payload": payload, "asked": most, **first}
    return row | {"again_cpu_s": again["cpu_s"]}


def is_missed(row: dict[str, Any]) -> bool:
    """Whether a ratio is larger than asked."""
    return row["asked"] is not None and row["ratio"] > row["asked"]


def show(row: dict[str, Any]) -> None:
    goal = ""
    if row["asked"] is not None:
        goal = f"(asked {row['asked']}{', missed' if is_missed(row) else ''})"
    print(
        f"{row['mesh']:<34} {row['payload']:>6} {row['ratio']:6.3f} {goal:<22} "
        f"limit {row['ratio_to_limit']:.3f}  {row['cpu_s']:5.1f} s, again "
        f"{row['again_cpu_s']:4.1f} s, {row['max_rss_bytes'] / 1e9:.2f} GB  {row['detail']}",
        flush=True,
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="meshes that begin like this")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="many payloads against the limit")
    arguments = parser.parse_args()
    if arguments.sweep:
        sweep(arguments.only, writes=not arguments.no_write and not arguments.only)
        return
    writes = not arguments.no_write and not arguments.only
    rows: list[dict[str, Any]] = []
    for case in (*CASES, *(LARGE if arguments.large else ())):
        if case[0].startswith(arguments.only):
            for payload, most in case[4]:
                rows.append(measured(case, payload, most))
                show(rows[-1])
                if writes:
                    record("pods", {"rows": rows})
    summarise(rows)
    if writes:
        print(f"wrote {record('pods', {'rows': rows})}")


def sweep(only: str, *, writes: bool) -> None:
    """Ask for many payloads, and print which of them are farther from the limit than asked."""
    rows: list[dict[str, Any]] = []
    for shape, wrap, fail, machine, parts in SWEEPS:
        for payloads, most in parts if shape.startswith(only) else ():
            for payload in payloads.split():
                row = measured((shape, wrap, fail, machine, ()), payload, None)
                rows.append(row | {"asked_of_limit": most})
                show(rows[-1])
    missed = [row for row in rows if row["ratio_to_limit"] > row["asked_of_limit"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} payloads are as near to the limit as asked")
    for row in missed:
        print(f"{row['mesh']:<34} {row['payload']:>6} {row['ratio_to_limit']:.3f}")
    if writes:
        print(f"wrote {record('pods-sweep', {'rows': rows})}")


def summarise(rows: list[dict[str, Any]]) -> None:
    """Print how many ratios are as asked, and the worst ratio to the limit of each mesh."""
    asked_for = [row for row in rows if row["asked"] is not None]
    missed = [row for row in asked_for if is_missed(row)]
    print(f"{len(asked_for) - len(missed)} of {len(asked_for)} ratios are as asked")
    worst: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: float(row["ratio_to_limit"])):
        worst[row["mesh"]] = row
    for mesh, row in worst.items():
        print(f"{mesh:<34} limit {row['ratio_to_limit']:.3f} at most, at {row['payload']}")


if __name__ == "__main__":
    main()
