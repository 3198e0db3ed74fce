"""`regions-2`, `regions-4`, `regions-8`: regions sum, and every chip gets the sums of all of them.

Between `trees`, which are one region, and `flood`, in which every chip is one. See
`trees/region_trees.py` for the regions. Their sums travel in scratch buffers, the first region's in
the payload, and each chip adds them in the same order, so that all have the same bits.
"""

from typing import Final

import numpy as np

from meshmend.errors import UnsupportedError
from meshmend.schedule.ring_builders import NamedRows
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, Schedule, even_cuts, schedule_of
from meshmend.topology.mesh import Mesh
from meshmend.trees.region_trees import RegionTrees, region_trees

MOST_CHIPS: Final = 1024  # more distances between chips take too much time and memory
# A link of a flat torus carries about a third as many messages. On 18 tori three quarters of it and
# one and a half times as many took 1.7 and 1.2 % longer on average.
_CHUNKS_TIMES_REGIONS: Final = 64


def n_region_chunks(n_regions: int) -> int:
    """Return in how many chunks the payload is cut."""
    return _CHUNKS_TIMES_REGIONS // n_regions


def check_regions(mesh: Mesh, *, n_regions: int) -> None:
    """Raise UnsupportedError if the mesh has too few chips for regions, or too many."""
    if not 2 * n_regions <= mesh.n_live <= MOST_CHIPS:
        raise UnsupportedError(
            f"regions-{n_regions} needs {2 * n_regions} to {MOST_CHIPS} chips, but got {mesh}"
        )


def regions(mesh: Mesh, collective: Collective, *, n_regions: int) -> Schedule:
    """Return the allreduce in which so many regions sum, and every chip adds their sums.

    Raises:
        UnsupportedError: too few chips, or too many.
    """
    check_regions(mesh, n_regions=n_regions)
    n_chunks = n_region_chunks(n_regions)
    trees = region_trees(mesh, n_regions=n_regions, n_chunks=n_chunks)
    return schedule_of(
        _phases(trees),
        algorithm=f"regions-{n_regions}",
        collective=collective,
        owners=trees.centres[:, 0],
        n_ranks=mesh.n_live,
        cuts=even_cuts(n_chunks),
    )


def _phases(trees: RegionTrees) -> list[NamedRows]:
    """Return the rows: all sum, centres put their sums away, all hand them on, all add them."""
    n_chunks, n_regions, n_ranks = trees.sources.shape
    chunk, rank = np.nonzero(trees.joins >= 0)
    far_first = np.argsort(-trees.hops_in[chunk, rank], kind="stable")
    chunk, rank = chunk[far_first], rank[far_first]
    joining = Rows(rank, trees.joins[chunk, rank], chunk, chunk + 1, REDUCE, 0 * rank, 0 * rank)

    chunk, region = (each.reshape(-1) for each in np.mgrid[0:n_chunks, 1:n_regions])
    centre = trees.centres[chunk, region]
    kept = Rows(centre, centre, chunk, chunk + 1, COPY, 0 * centre, region)

    chunk, region, rank = np.nonzero(trees.sources >= 0)
    near_first = np.argsort(trees.hops_out[chunk, region, rank], kind="stable")
    chunk, region, rank = chunk[near_first], region[near_first], rank[near_first]
    source = trees.sources[chunk, region, rank]
    handed = Rows(source, rank, chunk, chunk + 1, COPY, region, region)

    region, chunk, rank = (
        each.reshape(-1) for each in np.mgrid[1:n_regions, 0:n_chunks, 0:n_ranks]
    )
    added = Rows(rank, rank, chunk, chunk + 1, REDUCE, region, 0 * region)
    return [("join", joining), ("put away", kept), ("hand on", handed), ("add", added)]
