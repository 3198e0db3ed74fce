"""Who sums fastest on which mesh: `auto`, ForestColl, TACOS, and the formulas of published papers.

    python benchmarks/side_by_side.py [--forestcoll DIR] [--tacos DIR] [--only "8x8,"] [--no-write]

Tables in Markdown for each mesh, an allreduce and its halves: a line for each payload, times over
the limit, the least in bold. What ForestColl and TACOS planned is read, proved and simulated like
our own plans, on the same fabric, in the number of slices that is fastest; of several plans for a
mesh the fastest one counts, for each payload anew. Columns in italics are formulas of papers: times
of perfect implementations, see `published_formulas.py`. A contender that is not there, or has
nothing for a mesh, is left out with a line that says why; `other_programs.py` says what `--tacos`
needs. Halves are compared where another program has a plan. At the end come the cells in which
another is ahead by more than 1 %.

Ratios are exact and the same on every machine; planning times are of this one. The result file is
written after every mesh, and keeps the meshes of other runs of the same day.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmend.cli.console import cache_dir
from meshmend.planning.comparison import compared
from meshmend.planning.plan import planned
from meshmend.planning.target import Target
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.units import parse_bytes
from other_programs import OtherPlans, forestcoll_plans, half_of, mesh_name, tacos_plans
from published_formulas import FORMULAS
from record import read_today, record

PAYLOADS = ("1KB", "10KB", "100KB", "1MB", "10MB", "100MB", "1GB")
SUM, HALVES = Collective.ALLREDUCE, (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
OURS = "auto"
NAMES = {OURS: "`auto`", "forestcoll": "ForestColl", "tacos": "TACOS"}
FORMULA_NAMES = {"bucket": "*bucket*", "swing": "*Swing*", "tto": "*TTO*"}
MOST_BEHIND = 1.01

Times = dict[tuple[Collective, str], float]  # by collective and payload


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

    @property
    def mesh(self) -> Mesh:
        return parse_mesh(self.shape, wrap=self.wrap, fail=self.fail.split())


CASES = (
    Case("4x4", "none", "", "reference"),
    Case("4x4", "none", "2x2@0,2", "reference"),
    Case("8x8", "none", "", "reference"),
    Case("8x8", "none", "2x2@2,2", "reference"),
    Case("4x4", "all", "", "tpu-v5e"),
    Case("8x8", "all", "", "tpu-v5e"),
    Case("8x8", "all", "2x2@2,2", "tpu-v5e"),
    Case("4x4x2", "all", "", "tpu-v4"),
    Case("4x4x4", "all", "", "tpu-v4"),
    Case("16x16", "all", "", "tpu-v5e"),
    Case("16x16", "all", "4x2@6,6", "tpu-v5e"),
    Case("8x8x8", "all", "", "tpu-v4"),
    Case("16x16x16", "all", "", "tpu-v4"),
)


def best_times_s(case: Case, plans: OtherPlans) -> Times:
    """Return the time of the fastest of these plans for each collective and payload, simulated."""
    mesh, machine = case.mesh, fabric(case.machine)
    times_s: Times = {}
    for allreduce in plans.sums:
        for collective in (SUM, *HALVES):
            schedule = allreduce if collective is SUM else half_of(allreduce, collective)
            proved = planned(mesh, schedule, Target())
            for payload in PAYLOADS:
                time_s = proved.predicted(parse_bytes(payload), machine).time_s
                key = collective, payload
                times_s[key] = min(time_s, times_s.get(key, time_s))
    return times_s


def rows_of(case: Case, others: dict[str, OtherPlans]) -> list[dict[str, Any]]:
    """Return a row for each collective and payload: the time of every contender that has one."""
    mesh, machine, rows = case.mesh, fabric(case.machine), []
    times_of = {name: best_times_s(case, plans) for name, plans in others.items()}
    for collective in (SUM, *HALVES) if any(times_of.values()) else (SUM,):
        for payload in PAYLOADS:
            n_bytes = parse_bytes(payload)
            ours = compared(
                mesh, machine, n_bytes, [OURS], collective=collective, cache_dir=cache_dir()
            )
            times_s = {OURS: ours.prices[0].time_s}
            for name, found_s in times_of.items():
                if (collective, payload) in found_s:
                    times_s[name] = found_s[collective, payload]
            for name, formula in FORMULAS.items() if collective is SUM else ():
                if (time_s := formula(mesh, machine, n_bytes)) is not None:
                    times_s[name] = time_s
            rows.append(
                {
                    "mesh": case.words,
                    "collective": str(collective),
                    "payload": payload,
                    "limit_s": ours.limit.time_s,
                    "times_s": times_s,
                    "winner": min(times_s, key=lambda name: times_s[name]),
                    "auto": ours.prices[0].detail,
                }
            )
    return rows


def show(case: Case, rows: list[dict[str, Any]], others: dict[str, OtherPlans]) -> None:
    """Print the tables of a mesh."""
    sums = [row for row in rows if row["collective"] == SUM]
    print(_line(case.words, *_heads(sums), "`auto` is"))
    print(_line(*["---"] * (len(sums[0]["times_s"]) + 2)))
    for row in sums:
        print(_line(row["payload"], *_cells(row), row["auto"].split(",")[0]))
    halves = [[row for row in rows if row["collective"] == half] for half in HALVES]
    if all(halves):
        titles = [
            f"{half}: {title}"
            for half, of in zip(HALVES, halves, strict=True)
            for title in _heads(of)
        ]
        print("\n" + _line(case.words, *titles))
        print(_line(*["---"] * (len(titles) + 1)))
        for both in zip(*halves, strict=True):
            print(_line(both[0]["payload"], *(cell for row in both for cell in _cells(row))))
    for name, other in others.items():
        if not other.sums:
            print(f"{name}: {other.why_not}")
        else:
            took = "" if other.planning_s is None else f", planned in {other.planning_s:.1f} s"
            print(f"{name}: plans {len(other.sums)}{took}")
    print(flush=True)


def _heads(rows: list[dict[str, Any]]) -> list[str]:
    return [(NAMES | FORMULA_NAMES)[name] for name in rows[0]["times_s"]]


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [f"{time_s / row['limit_s']:.2f}" for time_s in row["times_s"].values()]
    fastest = f"{row['times_s'][row['winner']] / row['limit_s']:.2f}"
    return [f"**{cell}**" if cell == fastest else cell for cell in cells]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _kept(case: Case, rows: list[dict[str, Any]], others: dict[str, OtherPlans]) -> Path:
    """Write the rows of a mesh, with those of other meshes of today; return the file."""
    figures = read_today("side_by_side")
    kept = [row for row in figures.get("rows", []) if row["mesh"] != case.words]
    order = [each.words for each in CASES]
    planning = {name: other.planning_s for name, other in others.items()}
    return record(
        "side_by_side",
        {
            "rows": sorted([*kept, *rows], key=lambda row: order.index(row["mesh"])),
            "planning_s": {**figures.get("planning_s", {}), case.words: planning},
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--forestcoll", type=Path, help="a checkout of ForestColl")
    parser.add_argument("--tacos", type=Path, help="a folder with what TACOS found")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for ForestColl")
    parser.add_argument("--only", default="", help="meshes that begin like this")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    all_rows: list[dict[str, Any]] = []
    for case in CASES:
        if not case.words.startswith(arguments.only):
            continue
        name = mesh_name(case.shape, case.wrap, case.fail)
        others = {
            "forestcoll": forestcoll_plans(
                arguments.forestcoll, case.mesh, patience_s=arguments.patience
            ),
            "tacos": tacos_plans(arguments.tacos, case.mesh, name),
        }
        rows = rows_of(case, others)
        show(case, rows, others)
        all_rows += rows
        if not arguments.no_write:
            print(f"wrote {_kept(case, rows, others)}\n")
    won = sum(row["winner"] == OURS for row in all_rows)
    print(f"auto is the fastest in {won} of {len(all_rows)} cells; another by more than 1 % in:")
    for row in all_rows:
        behind = row["times_s"][OURS] / row["times_s"][row["winner"]]
        if behind > MOST_BEHIND:
            what = f"{row['mesh']}, {row['collective']}, {row['payload']}"
            print(f"  {what}: {row['winner']} by {behind - 1:.1%}")


if __name__ == "__main__":
    main()
