"""How near plans come to the limit where links are slow, and what plans cost that do not know it.

    python benchmarks/slow_links.py [--seeds 10] [--payload 100MB] [--no-write]

Draws tori with 5 % of their links at 0.25 to 0.75 of the bandwidth. Prints for each the time of
`auto` over the weighted limit, that of the plan which `auto` makes without knowing the speeds, and
how much slower the plan becomes if one slow link gets faster. Times are simulated, on `reference`.

    python benchmarks/slow_links.py --fabric testbed-50mbit

prints instead what the sums of a job without a fabric take over those of a job that is given this
one, simulated on it. Below that, what plans take whose delays are left out over what they take with
them.
"""

from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from meshmend.planning.catalogue import (
    Catalogue,
    CollectiveCall,
    auto_on,
    payload_class,
    planned_pipeline,
)
from meshmend.planning.plan import AUTO, equal_links_plan, plan
from meshmend.planning.proof import prove
from meshmend.schedule.priority import remaining_hops
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import simulate
from meshmend.simulator.slices import best_slices
from meshmend.topology.fabric import fabric as fabric_named
from meshmend.topology.failures import Link, SlowLink
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.units import parse_bytes
from record import parser_of, record

SHAPES = ((8, 4), (16, 16))
SLOW_PART = 0.05
LEAST, MOST = 0.25, 0.75


def slow_torus(shape: tuple[int, ...], seed: int) -> Mesh:
    """Return a torus with some slow links."""
    mesh, rng = Mesh(shape, (True,) * len(shape)), np.random.default_rng(seed)
    n_slow = max(1, round(SLOW_PART * len(mesh.links)))
    chosen = mesh.links[rng.choice(len(mesh.links), n_slow, replace=False)].tolist()
    return mesh.slowed(
        *(
            SlowLink(Link(mesh.live[one], mesh.live[other]), round(rng.uniform(LEAST, MOST), 3))
            for one, other in chosen
        )
    )


def with_faster_link(mesh: Mesh, seed: int) -> Mesh:
    """Return a mesh one of whose slow links gets faster, perhaps as fast as the others."""
    rng = np.random.default_rng((seed, 1))
    slow = sorted(mesh.slow)
    link = slow[int(rng.integers(len(slow)))]
    return mesh.slowed(replace(link, speed=round(rng.uniform(link.speed, 1.0), 3)))


def given_fabric(name: str) -> None:
    """Print what a job gains that is told its fabric."""
    meshes = [parse_mesh("4x4", fail=["2x2@0,2"]), parse_mesh("4x4", slow=["link:0,0-0,1=0.25"])]
    sizes = [1 << shift for shift in (16, 18, 20, 22)]
    meshes.append(parse_mesh("8x8", fail=["2x2@2,2"]))

    def of_fabrics(mesh: Mesh, n: int) -> float:
        return _time_s(mesh, n, AUTO, name) / _time_s(mesh, n, auto_on(name), name)

    def of_delays(mesh: Mesh, n: int) -> float:
        return _without_delays(mesh, n, name)

    for head, ratio in (
        ("without / with fabric", of_fabrics),
        ("without / with delays", of_delays),
    ):
        print(f"{head:<30}", *(f"{size >> 10:>6} KiB" for size in sizes))
        for mesh in meshes:
            ratios = (ratio(mesh, n) for n in sizes)
            print(f"{mesh!s:<30}", *(f"{each:>10.2f}" for each in ratios), flush=True)


def _without_delays(mesh: Mesh, n_bytes: int, fabric: str) -> float:
    """Return what a plan takes without its delays, in the best number of slices, over its time."""
    made = plan(mesh, payload=n_bytes, fabric=fabric_named(fabric))
    program = program_of(made.schedule, made.hazards, made.placement.routes)
    predicted, figures = made.predicted(), made.target.fabric
    same = simulate(program, figures, payload_bytes=n_bytes, slices=predicted.slices)
    best = best_slices(program, figures, payload_bytes=n_bytes)
    return min(same.time_s, best.time_s) / predicted.time_s


def _time_s(mesh: Mesh, n_bytes: int, algorithm: str, fabric: str) -> float:
    call = CollectiveCall("allreduce")
    task = Catalogue(mesh, algorithm, 0, 0).task(call, n_bytes // 4, "float32")
    schedule = task.program.schedule
    proved = prove(mesh, schedule)
    program = program_of(schedule, proved.hazards, proved.placement.routes)
    pipeline = planned_pipeline(mesh, algorithm, call, payload_class(call, n_bytes))
    remaining = remaining_hops(schedule, proved.hazards, proved.placement.routes)
    return simulate(
        program,
        fabric_named(fabric),
        payload_bytes=n_bytes,
        slices=task.layout.n_slices,
        delay_slices=pipeline.delays(schedule, remaining) if pipeline else None,
    ).time_s


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--payload", default="100MB")
    parser.add_argument("--fabric")
    arguments = parser.parse_args()
    if arguments.fabric:
        given_fabric(arguments.fabric)
        return
    payload_bytes = parse_bytes(arguments.payload)
    rows: list[dict[str, Any]] = []
    head = ("of the weighted limit", "auto", "auto, speeds unknown", "slower if a link gets faster")
    print("{:<26} {:>7} {:>22} {:>30}".format(*head))
    for shape in SHAPES:
        name = "x".join(map(str, shape))
        for seed in range(arguments.seeds):
            mesh = slow_torus(shape, seed)
            made = plan(mesh, payload=payload_bytes)
            limit_s, known_s = made.limit().time_s, made.predicted().time_s
            unknown_s = equal_links_plan(mesh, payload=payload_bytes).predicted().time_s
            faster_s = plan(with_faster_link(mesh, seed), payload=payload_bytes).predicted().time_s
            row = {
                "mesh": name,
                "seed": seed,
                "auto": known_s / limit_s,
                "speeds_unknown": unknown_s / limit_s,
                "slower_if_faster": faster_s / known_s - 1,
            }
            rows.append(row)
            print(
                f"{name + ' torus, seed ' + str(seed):<26} {row['auto']:>7.3f} "
                f"{row['speeds_unknown']:>22.3f} {row['slower_if_faster']:>30.1%}",
                flush=True,
            )
        own = [row for row in rows if row["mesh"] == name]
        for which in ("auto", "speeds_unknown"):
            ratios = [row[which] for row in own]
            print(f"{name}: {which} median {median(ratios):.3f}, worst {max(ratios):.3f}")
    if not arguments.no_write:
        print(f"wrote {record('slow_links', {'payload_bytes': payload_bytes, 'rows': rows})}")


if __name__ == "__main__":
    main()
