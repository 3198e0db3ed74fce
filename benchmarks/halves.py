"""How near the halves and the sharded update come to their limits around random holes.

    python benchmarks/halves.py [--meshes 30] [--seed 34] [--no-write]

Draws meshes and tori from 4x4 to 16x16 that lost a block, or one chip in twenty. Prints for each
collective and payload the median and the worst ratio to the limit, and the mesh of the worst.
Times are simulated, and the same on every machine.
"""

import random
from collections.abc import Iterator
from statistics import median
from typing import Any

from meshmend.planning.comparison import compared
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import fabric
from meshmend.topology.failures import Block
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.units import format_bytes
from record import parser_of, record

PAYLOADS = (2.5e6, 3.3e7, 1e8)
COLLECTIVES = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.SHARDED_UPDATE)
REFERENCE = fabric("reference")


def meshes(n_meshes: int, seed: int) -> Iterator[Mesh]:
    """Yield random broken meshes, each in one part."""
    rng = random.Random(seed)
    for number in range(n_meshes):
        shape = (rng.randint(4, 16), rng.randint(4, 16))
        mesh = Mesh(shape, (number % 3 == 2,) * 2)
        if number % 2:
            size = tuple(rng.randint(1, side // 3 + 1) for side in shape)
            corner = tuple(rng.randint(0, s - b) for s, b in zip(shape, size, strict=True))
            yield largest_part(mesh.without(Block(size, corner)))
        else:
            dead = rng.sample(mesh.live, max(1, round(mesh.n_chips / 20)))
            yield largest_part(mesh.without(*(",".join(map(str, chip)) for chip in dead)))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--meshes", type=int, default=30)
    parser.add_argument("--seed", type=int, default=34)
    arguments = parser.parse_args()
    drawn = list(meshes(arguments.meshes, arguments.seed))
    rows: list[dict[str, Any]] = []
    for collective in COLLECTIVES:
        for payload_bytes in PAYLOADS:
            ratios = []
            for mesh in drawn:
                result = compared(mesh, REFERENCE, payload_bytes, ["auto"], collective=collective)
                ratios.append((result.ratio(result.prices[0]), str(mesh), result.prices[0].detail))
            worst, where, what = max(ratios)
            middle = median(ratio for ratio, *_ in ratios)
            rows.append(
                {
                    "collective": str(collective),
                    "payload_bytes": payload_bytes,
                    "median": middle,
                    "worst": worst,
                    "worst_mesh": where,
                }
            )
            print(
                f"{collective:<15} {format_bytes(payload_bytes):>7}  median {middle:.3f}  worst "
                f"{worst:.3f}  {where}: {what}",
                flush=True,
            )
    if not arguments.no_write:
        print(f"wrote {record('halves', {'rows': rows})}")


if __name__ == "__main__":
    main()
