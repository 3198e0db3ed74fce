"""What the sums of tiles cost, next to their limit, and how fast meshes are tiled.

    python benchmarks/tiles.py [--no-write] [--quick]

Ratios are simulated on the fabric `reference` and exact; seconds are of this machine, and
exclude compilation. `--quick` leaves out meshes of a thousand chips.
"""

import time
from typing import Any

from meshmend.planning.colour_comparison import compared_colours
from meshmend.planning.plan import plan
from meshmend.topology.fabric import fabric
from meshmend.topology.text import parse_mesh
from meshmend.units import format_bytes
from record import parser_of, record

REFERENCE = fabric("reference")
SUMS = (
    ("8x8", ("2x2@2,2",), "2x2"),
    ("16x16", ("4x2@6,6",), "2x2"),
    ("8x8", (), "2x2"),
    ("8x8", ("1,1", "5,6"), "2x2"),
    ("8x8", ("2x2@2,2",), "1x4"),
    ("16x16", ("4x2@6,6",), "4x2"),
    ("32x32", ("4x2@14,14",), "2x2"),
)
QUICK_CHIPS = 256
PAYLOADS = (1e6, 1e7, 1e8)
TILED = (
    ("8x8", ("1,1", "5,6"), "2x2"),
    ("32x32", ("4x2@13,13",), "2x2"),
    ("32x32", ("4x2@13,13", "5,6", "20,27", "2x2@27,4"), "2x2"),
    ("32x32", ("4x2@13,13", "5,6", "20,27", "2x2@27,4"), "1x4"),
    ("32x32", ("4x2@13,13", "5,6", "20,27", "2x2@27,4"), "4x2"),
)


def sums(*, quick: bool) -> list[dict[str, Any]]:
    """Print and return what each way to sum costs, as times the limit."""
    plan(parse_mesh("2x4"), tile="2x2")  # compiles
    print("time over the limit\n")
    print("| mesh | tile | payload | limit | colours | independent | all chips |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = []
    for shape, fail, tile in SUMS:
        mesh = parse_mesh(shape, fail=fail)
        if quick and mesh.n_chips > QUICK_CHIPS:
            continue
        for payload in PAYLOADS:
            found = compared_colours(mesh, tile, REFERENCE, payload)
            ratio = {price.name: found.ratio(price) for price in found.prices}
            rows.append(
                {
                    "mesh": str(mesh),
                    "tile": tile,
                    "payload_bytes": payload,
                    "limit_s": found.limit.time_s,
                    "ratios": ratio,
                    "details": {price.name: price.detail for price in found.prices},
                }
            )
            cells = [f"{ratio[name]:.3f}" for name in ("colours", "independent", "all-chips")]
            limit = f"{found.limit.time_s * 1e6:.1f} us"
            words = [str(mesh), tile, format_bytes(payload), limit, *cells]
            print(f"| {' | '.join(words)} |", flush=True)
    return rows


def tilings() -> list[dict[str, Any]]:
    """Print and return how many tiles are found, and how long that takes."""
    print("\n| mesh | tile | tiles | spares | seconds |\n| --- | --- | --- | --- | --- |")
    rows = []
    for shape, fail, tile in TILED:
        mesh = parse_mesh(shape, fail=fail)
        start = time.perf_counter()
        tiling = mesh.tiles(tile)
        took = time.perf_counter() - start
        spares = len(tiling.spares)
        print(f"| {mesh} | {tile} | {tiling.n_tiles} | {spares} | {took:.2f} |")
        figures = {"tiles": tiling.n_tiles, "spares": spares, "seconds": took}
        rows.append({"mesh": str(mesh), "tile": tile, "is_most": tiling.is_most, **figures})
    return rows


def main() -> None:
    """Run all parts and record them."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out meshes of a thousand chips")
    options = parser.parse_args()
    figures = {"sums": sums(quick=options.quick), "tilings": tilings()}
    if not options.no_write:
        print(f"\nwritten to {record('tiles', figures)}")


if __name__ == "__main__":
    main()
