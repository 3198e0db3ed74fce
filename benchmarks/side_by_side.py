"""Who sums fastest on which mesh: `auto`, ForestColl, TACOS, and the formulas of published papers.

    python benchmarks/side_by_side.py [--forestcoll DIR] [--tacos DIR] [--only 8x8] [--no-write]

A table for each mesh: a line for each payload, times divided by the limit, the winner marked with a
star. What ForestColl and TACOS planned is read, proved and simulated like our own plans, on the
same fabric, in the number of slices that is fastest. Columns in brackets are formulas of papers:
times of perfect implementations, see `published_formulas.py`. A contender that is not there, or has
nothing for a mesh, is left out with a line that says why; `other_programs.py` says what `--tacos`
needs. Ratios are exact and the same on every machine; planning times are of this one. The result
file is written after every mesh, so that a run that is broken off leaves what it has.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmend.cli.console import cache_dir
from meshmend.planning.comparison import compared
from meshmend.topology.fabric import fabric
from meshmend.topology.text import parse_mesh
from meshmend.units import parse_bytes
from other_programs import OtherPlan, file_name, forestcoll_plan, tacos_plan
from published_formulas import FORMULAS
from record import record

PAYLOADS = ("1KB", "10KB", "100KB", "1MB", "10MB", "100MB", "1GB")
OURS = "auto"


@dataclass(frozen=True)
class Case:
    """A mesh, in the words of the command line."""

    shape: str
    wrap: str
    fail: str
    machine: str

    @property
    def words(self) -> str:
        torus, less = " torus" * (self.wrap == "all"), f" less {self.fail}" if self.fail else ""
        return f"{self.shape}{torus}{less}, {self.machine}"


CASES = (
    Case("4x4", "none", "", "reference"),
    Case("4x4", "none", "2x2@0,2", "reference"),
    Case("8x8", "none", "", "reference"),
    Case("8x8", "none", "2x2@2,2", "reference"),
    Case("4x4", "all", "", "tpu-v5e"),
    Case("8x8", "all", "", "tpu-v5e"),
    Case("8x8", "all", "2x2@2,2", "tpu-v5e"),
    Case("4x4x4", "all", "", "tpu-v4"),
    Case("16x16", "all", "", "tpu-v5e"),
    Case("16x16", "all", "4x2@6,6", "tpu-v5e"),
    Case("8x8x8", "all", "", "tpu-v4"),
    Case("16x16x16", "all", "", "tpu-v4"),
)


def rows_of(case: Case, others: dict[str, OtherPlan]) -> list[dict[str, Any]]:
    """Return a row for each payload: the time of every contender that has one."""
    mesh = parse_mesh(case.shape, wrap=case.wrap, fail=case.fail.split())
    machine, rows = fabric(case.machine), []
    for payload in PAYLOADS:
        n_bytes = parse_bytes(payload)
        ours = compared(mesh, machine, n_bytes, [OURS], cache_dir=cache_dir())
        times_s = {OURS: ours.prices[0].time_s}
        for name, other in others.items():
            if other.plan is not None:
                times_s[name] = other.plan.predicted(n_bytes, machine).time_s
        for name, formula in FORMULAS.items():
            if (time_s := formula(mesh, machine, n_bytes)) is not None:
                times_s[f"({name})"] = time_s
        rows.append(
            {
                "mesh": case.words,
                "payload": payload,
                "limit_s": ours.limit.time_s,
                "times_s": times_s,
                "winner": min(times_s, key=lambda name: times_s[name]),
                "auto": ours.prices[0].detail,
            }
        )
    return rows


def show(case: Case, rows: list[dict[str, Any]], others: dict[str, OtherPlan]) -> None:
    """Print the table of a mesh."""
    names = list(rows[0]["times_s"])
    print(f"\n{case.words}")
    print("  " + f"{'payload':>8}" + "".join(f"{name:>12}" for name in names) + "  auto is")
    for row in rows:
        cells = [
            f"{row['times_s'][name] / row['limit_s']:.3f}{'*' if name == row['winner'] else ' '}"
            for name in names
        ]
        line = "".join(f"{cell:>12}" for cell in cells)
        print(f"  {row['payload']:>8}{line}  {row['auto']}")
    for name, other in others.items():
        if other.plan is None:
            print(f"  {name}: {other.why_not}")
        elif other.planning_s is not None:
            print(f"  {name}: planned in {other.planning_s:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--forestcoll", type=Path, help="a checkout of ForestColl")
    parser.add_argument("--tacos", type=Path, help="a folder with what TACOS wrote")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for ForestColl")
    parser.add_argument("--only", default="", help="meshes that begin like this")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    writes = not arguments.no_write and not arguments.only
    all_rows: list[dict[str, Any]] = []
    planning: dict[str, dict[str, float | None]] = {}
    for case in CASES:
        if not case.words.startswith(arguments.only):
            continue
        mesh = parse_mesh(case.shape, wrap=case.wrap, fail=case.fail.split())
        name = file_name(case.shape, case.wrap, case.fail)
        others = {
            "forestcoll": forestcoll_plan(
                arguments.forestcoll, mesh, patience_s=arguments.patience
            ),
            "tacos": tacos_plan(arguments.tacos, mesh, name),
        }
        rows = rows_of(case, others)
        show(case, rows, others)
        all_rows += rows
        planning[case.words] = {name: other.planning_s for name, other in others.items()}
        if writes:
            record("side_by_side", {"rows": all_rows, "planning_s": planning})
    won = sum(row["winner"] == OURS for row in all_rows)
    print(f"\nauto is the fastest in {won} of {len(all_rows)} cases")
    if writes:
        print(f"wrote {record('side_by_side', {'rows': all_rows, 'planning_s': planning})}")


if __name__ == "__main__":
    main()
