"""How long the packing number takes, and how tight it is, from 4x4 to 256x256.

    python benchmarks/limit.py [--no-write]

Prints a table and writes `results/limit-DATE.json` beside this file. Times are of one run in a
process that has compiled everything; no cache answers.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.packing_number import (
    PackingNumber,
    exact_packing_number,
    packing_bracket,
    packing_number,
)
from meshmend.topology.text import parse_mesh
from record import parser_of, record

MESHES: tuple[tuple[str, str, list[str]], ...] = (
    ("4x4", "none", []),
    ("4x4", "none", ["2x2@1,1"]),
    ("8x8", "none", []),
    ("8x8", "none", ["2x2@2,2"]),
    ("8x8", "none", ["4x2@2,2"]),
    ("8x8", "none", ["2x2@0,2"]),
    ("8x8", "none", ["2x2@0,0"]),
    ("16x16", "none", []),
    ("16x16", "none", ["4x2@6,6"]),
    ("16x32", "none", []),
    ("16x32", "none", ["4x2@6,14"]),
    ("32x32", "none", []),
    ("32x32", "none", ["4x2@14,14"]),
    ("32x32", "none", ["4x2@14,14", "4x2@6,20"]),
    ("32x32", "none", ["4x2@2,2", "4x2@14,14"]),
    ("32x32", "all", ["4x2@14,14"]),
    ("16x16x16", "all", ["2x2x1@3,3,3"]),
    ("64x64", "none", []),
    ("64x64", "none", ["4x2@20,20"]),
    ("128x128", "none", ["4x2@20,20"]),
    ("256x256", "none", []),
)


def scattered(shape: str, share: float) -> Mesh:
    """Return a mesh that lost this share of its chips, one by one, anywhere."""
    mesh = parse_mesh(shape)
    dead = np.random.default_rng(0).permutation(mesh.n_live)[: round(share * mesh.n_live)]
    chips = (",".join(map(str, mesh.live[rank])) for rank in sorted(dead))
    return largest_part(mesh.without(*chips))


def timed(solve: Callable[[Mesh], PackingNumber], mesh: Mesh) -> tuple[PackingNumber, float]:
    """Return the answer and how many seconds it took."""
    start = time.perf_counter()
    answer = solve(mesh)
    return answer, time.perf_counter() - start


def measure(name: str, mesh: Mesh) -> dict[str, Any]:
    """Return one row of the table."""
    bracket, bracket_s = timed(packing_bracket, mesh)
    packing_bracket.cache_clear()
    answer, answer_s = timed(packing_number, mesh)
    return {
        "mesh": name,
        "chips": mesh.n_live,
        "lower": answer.lower,
        "upper": answer.upper,
        "exact": answer.exact,
        "time_s": answer_s,
        "bracket_lower": bracket.lower,
        "bracket_upper": bracket.upper,
        "bracket_time_s": bracket_s,
        "binds": answer.describe(),
    }


def main() -> None:
    """Measure every mesh, print, and write the result down unless told not to."""
    parser = parser_of(__doc__)
    arguments = parser.parse_args()
    exact_packing_number(parse_mesh("3x3"))  # compiles
    written = [parse_mesh(shape, wrap=wrap, fail=fail) for shape, wrap, fail in MESHES]
    named = [(str(mesh), mesh) for mesh in written]
    named += [
        (f"{shape} less {share:.1%} of its chips", scattered(shape, share))
        for shape, share in (("32x32", 0.02), ("64x64", 0.01), ("128x128", 0.003))
    ]
    rows = []
    for name, mesh in named:
        row = measure(name, mesh)
        rows.append(row)
        kind = "exact  " if row["exact"] else "bracket"
        print(
            f"{name:36} {row['chips']:6} chips  {kind} {row['lower']:.6f} {row['upper']:.6f} "
            f"{row['time_s'] * 1e3:9.1f} ms   by trees {row['bracket_lower']:.4f} "
            f"{row['bracket_upper']:.4f} {row['bracket_time_s'] * 1e3:8.1f} ms   {row['binds']}",
            flush=True,
        )
    if not arguments.no_write:
        path = record("limit", {"rows": rows})
        print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
