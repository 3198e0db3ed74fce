"""What the sums of tiles cost, next to what one would do without a plan for all colours.

- `colours`: one plan for all colours.
- `independent`: a plan for each colour that knows nothing of the others, all run at once.
- `all-chips`: one sum of the whole payload over all chips, as without tiles; chips add nothing
  where another colour's part is.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from meshmend.planning.colour_search import (
    PackedColours,
    fastest_colours,
    independent_colours,
)
from meshmend.planning.comparison import AUTO, Comparison, compared
from meshmend.planning.pricing import Price, figures_of
from meshmend.planning.progress import ProgressCallback, no_progress
from meshmend.planning.tree_formula import Pipeline
from meshmend.simulator.colour_limit import colour_limit
from meshmend.simulator.rules import Simulation
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh
from meshmend.units import counted

COLOURS, INDEPENDENT, ALL_CHIPS = "colours", "independent", "all-chips"


def compared_colours(
    mesh: Mesh,
    tile: str,
    fabric: Fabric,
    payload_bytes: float,
    *,
    cache_dir: Path | None = None,
    progress: ProgressCallback = no_progress,
) -> Comparison:
    """Return what the sums of all colours cost, `payload_bytes` a tile, fastest first.

    Raises:
        TopologyError: the tile cannot be read, or none fits.
    """
    tiling = mesh.tiles(tile)
    question = (fabric, payload_bytes)
    progress("colours: packing")
    together = fastest_colours(tiling, *question)
    progress("independent: packing", 1 / 3)
    apart = independent_colours(tiling, *question)
    progress("all-chips: packing", 2 / 3)
    whole = compared(mesh, *question, [AUTO], cache_dir=cache_dir).prices[0]
    prices = [
        _price(COLOURS, *together, *question),
        _price(INDEPENDENT, *apart, *question),
        Price(
            ALL_CHIPS,
            whole.figures,
            whole.simulated,
            whole.n_chips,
            whole.pipeline,
            f"one sum over all chips, {whole.detail}",
        ),
    ]
    prices.sort(key=lambda price: price.time_s)
    least = colour_limit(tiling, *question)
    n_needed = tiling.n_tiles * tiling.n_colours
    return Comparison(mesh, tiling.mesh, *question, least, tuple(prices), {}, n_needed)


def _price(
    name: str, packed: PackedColours, pipeline: Pipeline, fabric: Fabric, payload_bytes: float
) -> Price:
    simulation = packed.simulated(fabric, payload_bytes, pipeline)
    trees = packed.trees
    n_each = trees.n_trees // trees.n_colours
    return Price(
        name,
        figures_of(simulation),
        _as_found(simulation),
        int(np.count_nonzero(trees.colour_of_rank >= 0)),
        pipeline,
        f"{counted(n_each, 'tree')} of each of {trees.n_colours} colours, depth {trees.depth}, "
        f"at most {trees.max_trees} on a link",
    )


def _as_found(simulation: Simulation) -> Callable[[], Simulation]:
    return lambda: simulation
