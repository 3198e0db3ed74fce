"""How near allreduces come to the limit on random meshes that no constant was tuned on.

    python benchmarks/held_out.py [--cases 200] [--first 0] [--seed 34034] [--no-write]

Each case is drawn by the seed and its number alone, so parts of a run can be made one by one. A
mesh has one to four axes, of which each may wrap, at most 200 chips, and holes, chips or links that
failed; the payload is 1 B to 1 GB, and the fabric any preset. The simulated times are the same on
every machine. What is learned from a case makes its seed one that was tuned on: take another then.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshmend.planning.comparison import compared
from meshmend.topology.fabric import FABRICS, Fabric
from meshmend.topology.graph import stranded
from meshmend.topology.mesh import Mesh
from record import parser_of, record

MOST_CHIPS = 200
MOST_WORST, MOST_MEDIAN = 1.6, 1.22  # the ratios to reach
N_SHOWN = 10
LONGEST_SIDE = {1: 24, 2: 16, 3: 7, 4: 4}


@dataclass(frozen=True)
class Case:
    """One allreduce."""

    mesh: Mesh
    fabric: Fabric
    payload_bytes: int


def drawn_case(seed: int, number: int) -> Case:
    """Return the case of this number."""
    rng = np.random.default_rng((seed, number))
    while True:
        mesh = _drawn_mesh(rng)
        if 2 <= mesh.n_live <= MOST_CHIPS and not stranded(mesh):
            break
    fabric = FABRICS[str(rng.choice(sorted(FABRICS)))]
    return Case(mesh, fabric, round(10 ** rng.uniform(0, 9)))


def _drawn_mesh(rng: np.random.Generator) -> Mesh:
    n_axes = int(rng.choice([1, 2, 3, 4], p=[0.05, 0.55, 0.35, 0.05]))
    shape = tuple(int(side) for side in rng.integers(2, LONGEST_SIDE[n_axes] + 1, n_axes))
    kind = rng.choice(["open", "torus", "mixed"])
    wrap = tuple(kind == "torus" or (kind == "mixed" and bool(rng.integers(2))) for _ in shape)
    mesh = Mesh(shape, wrap)
    failure = rng.choice(["none", "hole", "chips", "links"], p=[0.2, 0.4, 0.2, 0.2])
    if failure == "hole":
        sides = [int(rng.integers(1, max(2, side // 2 + 1))) for side in shape]
        spare = [side - hole + 1 for side, hole in zip(shape, sides, strict=True)]
        corner = [int(rng.integers(0, places)) for places in spare]
        return mesh.without("x".join(map(str, sides)) + "@" + ",".join(map(str, corner)))
    n_failed = max(1, round(float(rng.uniform(0, 0.06)) * mesh.n_live))
    if failure == "chips":
        ranks = rng.permutation(mesh.n_live)[:n_failed]
        return mesh.without(*(_words(mesh.live[rank]) for rank in ranks))
    if failure == "links":
        links = mesh.links[rng.permutation(len(mesh.links))[:n_failed]]
        ends = [(_words(mesh.live[one]), _words(mesh.live[other])) for one, other in links]
        return mesh.without(*(f"link:{one}-{other}" for one, other in ends))
    return mesh


def _words(chip: tuple[int, ...]) -> str:
    return ",".join(map(str, chip))


def measured(seed: int, number: int) -> dict[str, Any]:
    """Return what `auto` takes in a case, of the limit."""
    case, began = drawn_case(seed, number), time.process_time()
    found = compared(case.mesh, case.fabric, case.payload_bytes, ["auto"])
    best = found.winner
    return {
        "number": number,
        "mesh": str(case.mesh),
        "fabric": case.fabric.name,
        "payload_bytes": case.payload_bytes,
        "ratio": found.ratio(best),
        "detail": best.detail,
        "cpu_s": time.process_time() - began,
    }


def asked_cases(doc: str | None, *, n_cases: int, seed: int) -> argparse.Namespace:
    """Return which cases the command line asks for: so many from the first, of a seed."""
    parser = parser_of(doc)
    parser.add_argument("--cases", type=int, default=n_cases)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=seed)
    return parser.parse_args()


def main() -> None:
    asked = asked_cases(__doc__, n_cases=200, seed=34034)
    cases = []
    for number in range(asked.first, asked.first + asked.cases):
        case = measured(asked.seed, number)
        cases.append(case)
        print(
            f"{number:4} {case['ratio']:.3f}  {case['mesh']}, {case['payload_bytes']} B, "
            f"{case['fabric']}: {case['detail']} ({case['cpu_s']:.1f} cpu s)",
            flush=True,
        )
    cases.sort(key=lambda case: -case["ratio"])
    ratios = [case["ratio"] for case in cases]
    median = statistics.median(ratios)
    print(f"\n{len(cases)} cases of seed {asked.seed}; the worst:")
    for case in cases[:N_SHOWN]:
        print(
            f"  {case['ratio']:.3f}  {case['mesh']}, {case['payload_bytes']} B, {case['fabric']}: "
            f"{case['detail']}"
        )
    n_above = sum(ratio > MOST_WORST for ratio in ratios)
    print(f"median {median:.3f} (wanted: {MOST_MEDIAN})")
    print(f"worst  {ratios[0]:.3f} (wanted: {MOST_WORST}; {n_above} above)")
    if not asked.no_write:
        figures = {"seed": asked.seed, "median": median, "worst": ratios[0], "cases": cases}
        print(f"wrote {record('held-out', figures)}")


if __name__ == "__main__":
    main()
