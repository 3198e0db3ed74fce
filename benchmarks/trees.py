"""How near tree packings come to the physical limit, and how fast they are packed.

    python benchmarks/trees.py [--no-write] [--quick] [--part table] [--part packing] ...

Ratios are simulated on the fabric `reference` and exact; times are of this machine, in seconds of
the wall clock and of the processor, and exclude compilation: a small mesh is packed first.
`--quick` leaves out what takes more than a few seconds: large meshes and large payloads.
"""

import datetime
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from meshmend.planning import tree_finalists
from meshmend.planning.packed_trees import Fastest, Trees
from meshmend.planning.pricing import price
from meshmend.planning.target import Question
from meshmend.planning.tree_formula import Pipeline
from meshmend.planning.tree_search import best_trees
from meshmend.schedule.trees import usual_tree_count
from meshmend.simulator.limit import limit
from meshmend.topology.fabric import fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.trees.tree_packing import tree_packing
from record import RESULTS, parser_of, record

REFERENCE = fabric("reference")
PAYLOADS = {"1KB": 1e3, "100KB": 1e5, "1MB": 1e6, "10MB": 1e7, "100MB": 1e8, "1GB": 1e9}
HOLES = {"8x8": "2x2@2,2", "16x32": "4x2@6,14", "32x32": "4x2@14,14"}
TARGETS = {
    "8x8": (1.30, 1.7, 2.5, 1.4, 1.12, 1.05),
    "16x32": (1.20, 1.4, 1.9, 1.9, 1.22, 1.07),
    "32x32": (1.18, 1.35, 1.7, 2.0, 1.25, 1.08),
}
OTHERS = (
    ("15x13", "none", ("3,4",)),
    ("31x33", "none", ()),
    ("16x16", "none", ("5,7",)),
    ("16x16", "none", ("link:3,4-3,5", "link:9,9-10,9")),
    ("16x16", "none", ("2x2@2,2", "2x2@10,4", "2x2@6,12")),
    ("8x8x8", "none", ()),
    ("8x8x8", "none", ("2x2x2@2,2,2",)),
    ("16x16", "all", ()),
    ("16x16", "all", ("4x2@6,6",)),
    ("8x8x8", "all", ("2x2x2@2,2,2",)),
    ("2x20", "none", ("0,7",)),
    ("1x16", "none", ()),
)
SHORT_OTHERS = (
    ("16x16", "none", ()),
    ("16x16", "none", ("2x2@2,2", "2x2@10,4", "2x2@6,12")),
    ("15x13", "none", ("3,4",)),
    ("8x8x8", "none", ()),
    ("6x6", "all", ()),
    ("16x16", "all", ("4x2@6,6",)),
)
Figures = list[dict[str, Any]]


def found(mesh: Mesh, payload_bytes: float) -> tuple[Fastest[Trees], dict[str, Any]]:
    """Return the best trees, and their figures as a JSON value."""
    start, cpu = time.perf_counter(), time.process_time()
    best = best_trees(Question(mesh, payload_bytes, REFERENCE))
    bound = limit(mesh, REFERENCE, payload_bytes)
    least_s = bound.bandwidth_or_latency_s  # the goals of the table were set against this one
    return best, {
        "mesh": str(mesh),
        "payload_bytes": payload_bytes,
        "time_s": best.simulation.time_s,
        "limit_s": bound.time_s,
        "ratio_to_limit": best.simulation.time_s / bound.time_s,
        "ratio": best.simulation.time_s / least_s,
        "trees": best.trees.figures.n_trees,
        "depth": best.trees.figures.depth,
        "trees_on_busiest_link": best.trees.figures.load,
        "window": best.trees.shape.window,
        "slices": best.pipeline.slices,
        "skew": best.pipeline.skew,
        "search_s": time.perf_counter() - start,
        "search_cpu_s": time.process_time() - cpu,
    }


def show(figures: dict[str, Any], target: float | None = None) -> None:
    goal = "" if target is None else f" (asked {target}{', missed' * (figures['ratio'] > target)})"
    trees = f"{figures['trees']} {'trees' if figures['window'] is None else 'disjoint trees'}"
    print(
        f"{figures['mesh']:<38} {figures['payload_bytes']:>8.0e} B  {figures['ratio']:.3f}{goal}  "
        f"{trees}, depth {figures['depth']}, {figures['slices']} slices, "
        f"skew {figures['skew']:.2f}; search {figures['search_cpu_s']:.1f} s",
        flush=True,
    )


def table(quick: bool) -> Figures:
    """Ratios to the limit on the three meshes with a hole."""
    rows = []
    for shape, fail in HOLES.items():
        if quick and shape != "8x8":
            continue
        mesh = parse_mesh(shape, fail=[fail])
        for payload_bytes, target in zip(PAYLOADS.values(), TARGETS[shape], strict=True):
            _, figures = found(mesh, payload_bytes)
            show(figures, target)
            rows.append({**figures, "target": target})
    return rows


def holes(quick: bool) -> Figures:
    """What the hole costs against the full mesh."""
    rows = []
    for shape, fail in HOLES.items():
        if quick and shape != "8x8":
            continue
        for payload_bytes in (1e8, 1e9):
            broken, _ = found(parse_mesh(shape, fail=[fail]), payload_bytes)
            full, _ = found(parse_mesh(shape), payload_bytes)
            cost = broken.simulation.time_s / full.simulation.time_s - 1
            print(f"{shape} less {fail} {payload_bytes:.0e} B: the hole costs {cost:+.1%}")
            rows.append({"mesh": shape, "hole": fail, "payload_bytes": payload_bytes, "cost": cost})
    return rows


def peers(quick: bool) -> Figures:
    """How much faster than the paper's best scheme and than twice an all-gather at its bound."""
    if quick:
        return []
    full = parse_mesh("32x32")
    broken = full.without("4x2@14,14")
    ours_s = {size: found(broken, size)[0].simulation.time_s for size in (1e8, 1e9)}
    rows = []
    for name in ("row-pair", "two-d"):
        theirs = price(Question(full, 1e8, REFERENCE), name)
        rows.append(
            {"peer": f"{name}, intact 32x32, 100 MB", "factor": theirs.time_s / ours_s[1e8]}
        )
    # A corner chip has two links: it takes in all but its own part of the payload over them.
    n = broken.n_live
    gather_s = 1e9 * (n - 1) / n / (2 * REFERENCE.link_bandwidth_bytes_per_s)
    rows.append({"peer": "2 x all-gather at its bound, 1 GB", "factor": 2 * gather_s / ours_s[1e9]})
    for row in rows:
        print(f"32x32 less 4x2@14,14 is {row['factor']:.2f} times as fast as {row['peer']}")
    return rows


def others(quick: bool) -> Figures:
    """Ratios at 1 GB on odd, scattered, linear, three-dimensional meshes and tori."""
    rows = []
    for shape, wrap, fail in OTHERS[:1] if quick else OTHERS:
        _, figures = found(parse_mesh(shape, wrap=wrap, fail=fail), 1e9)
        show(figures, 1.35)
        rows.append(figures)
    return rows


def short(quick: bool) -> Figures:
    """Disjoint trees, balanced trees and a bound for one-hop messages, at about 1 MB."""
    meshes = [parse_mesh(shape, fail=[fail]) for shape, fail in HOLES.items()]
    meshes += [parse_mesh(shape, wrap=wrap, fail=fail) for shape, wrap, fail in SHORT_OTHERS]
    rows = []
    for mesh in meshes[:1] if quick else meshes:
        for payload_bytes in (3e5, 1e6, 2e6):
            best, figures = found(mesh, payload_bytes)
            with without_disjoint_trees():
                _, balanced = found(mesh, payload_bytes)
            busy = float(best.simulation.channel_busy_s.mean() / best.simulation.time_s)
            row = {
                **{name: figures[name] for name in ("mesh", "payload_bytes", "ratio", "window")},
                "balanced_ratio": balanced["ratio"],
                "balanced_depth": balanced["depth"],
                "balanced_load": balanced["trees_on_busiest_link"] / balanced["trees"],
                "bound_ratio": one_hop_bound_s(mesh, payload_bytes) / figures["limit_s"],
                "busy": busy,
            }
            print(
                f"{row['mesh']:<38} {payload_bytes / 1e6:.1f} MB: {row['ratio']:.3f} of the limit, "
                f"balanced trees {row['balanced_ratio']:.3f} ({row['balanced_depth']} deep, load "
                f"{row['balanced_load']:.2f}), bound {row['bound_ratio']:.2f}, "
                f"links busy {busy:.0%}",
                flush=True,
            )
            rows.append(row)
    return rows


@contextmanager
def without_disjoint_trees() -> Iterator[None]:
    """Let the search find balanced trees only."""
    longest = tree_finalists._LONGEST_WINDOW_RADII
    tree_finalists._LONGEST_WINDOW_RADII = -1
    try:
        yield
    finally:
        tree_finalists._LONGEST_WINDOW_RADII = longest


def one_hop_bound_s(mesh: Mesh, payload_bytes: float) -> float:
    """Return the bound of docs/design/0002-trees.md for messages of one size and one hop.

    Each chip sends all messages over its links; the last one then goes to the chip farthest from
    it. On a mesh the corners bind.
    """
    figures, bytes_s = mesh_figures(mesh), payload_bytes / REFERENCE.link_bandwidth_bytes_per_s
    latency_s, overhead_s = REFERENCE.hop_latency_s, REFERENCE.message_overhead_s

    def time_s(n_messages: int) -> float:
        message_s = overhead_s + bytes_s / n_messages
        travel_s = figures.eccentricities * (latency_s + message_s)
        return float((travel_s + n_messages * message_s / figures.degrees).max() - message_s)

    return min(map(time_s, range(1, 4096)))


def delays(quick: bool) -> Figures:
    """What the delay of rows gains at 100 MB: the same trees and slices without it."""
    rows = []
    for shape, fail in HOLES.items():
        if quick and shape != "8x8":
            continue
        best, _ = found(parse_mesh(shape, fail=[fail]), 1e8)
        without = best.trees.simulated(REFERENCE, 1e8, Pipeline(best.pipeline.slices))
        loss = without.time_s / best.simulation.time_s - 1
        print(f"{shape} less {fail} 100 MB: without delays {loss:+.1%}", flush=True)
        rows.append({"mesh": shape, "hole": fail, "loss_without_delays": loss})
    return rows


def packing(quick: bool) -> Figures:
    """How long a packing for long payloads takes, with its proof."""
    tree_packing(parse_mesh("8x8"), n_trees=5)
    rows = []
    for side in (8, 16, 32) if quick else (8, 16, 32, 64, 128):
        mesh = parse_mesh(f"{side}x{side}", fail=[f"2x2@{side // 2},{side // 2}"])
        start, cpu = time.perf_counter(), time.process_time()
        trees = tree_packing(mesh, n_trees=usual_tree_count(mesh))
        row = {
            "mesh": str(mesh),
            "trees": trees.n_trees,
            "depth": trees.depth,
            "pack_s": time.perf_counter() - start,
            "pack_cpu_s": time.process_time() - cpu,
        }
        print(
            f"{row['mesh']:<22} {row['trees']} trees of depth {row['depth']} in "
            f"{row['pack_s']:.3f} s (cpu {row['pack_cpu_s']:.3f})",
            flush=True,
        )
        rows.append(row)
    return rows


PARTS: dict[str, Callable[[bool], Figures]] = {
    part.__name__: part for part in (table, holes, peers, others, short, delays, packing)
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="small meshes only")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this; repeat")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.part or PARTS:
        print(f"\n{name}: {PARTS[name].__doc__}")
        results[name] = PARTS[name](arguments.quick)
    if not arguments.no_write:
        print(record("trees", {"fabric": str(REFERENCE), **parts_of_today(), **results}))


def parts_of_today() -> dict[str, Figures]:
    """Return the parts that today's file has, so that a run of one part keeps the others."""
    path = RESULTS / f"trees-{datetime.date.today().isoformat()}.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: document[name] for name in PARTS if name in document}


if __name__ == "__main__":
    main()
