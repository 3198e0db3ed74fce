"""How many tiles fit around the holes: boxes as they are written, laid in bands.

Bands of the width of a tile go across the mesh, along one axis or another, with gaps where that is
better. In a band, tiles are laid as soon as there is room. This is the most tiles that any bands
hold; now and then a tiling that is no such bands has one more.
"""

from meshmend.forecast.records import Ints
from meshmend.forecast.walk_arrays import Walk
from meshmend.kernels import inner_kernel


@inner_kernel
def most_tiles(walk: Walk, cells: Ints) -> int:
    """Return how many tiles of live chips fit."""
    best = 0
    for order in range(2 if walk.extents[0] == 1 else 6):
        slabs = order // 2
        bands = (slabs + 1 + order % 2) % 3
        best = max(best, _in_slabs(walk, cells, slabs, bands, 3 - slabs - bands))
    return best


@inner_kernel
def _in_slabs(walk: Walk, cells: Ints, axis: int, bands: int, along: int) -> int:
    """Return how many fit into slabs across one axis, in each of which there are bands."""
    width, best = walk.tile[axis], walk.bands
    cells[best] = 0
    for end in range(1, walk.extents[axis] + 1):
        cells[best + end] = cells[best + end - 1]
        if end >= width:
            here = _in_bands(walk, cells, axis, end - width, bands, along)
            cells[best + end] = max(cells[best + end], cells[best + end - width] + here)
    return int(cells[best + walk.extents[axis]])


@inner_kernel
def _in_bands(walk: Walk, cells: Ints, slabs: int, slab: int, axis: int, along: int) -> int:
    """Return how many fit into the bands of one slab, which begins at `slab`."""
    width, best = walk.tile[axis], walk.bands + walk.table_size
    cells[best] = 0
    for end in range(1, walk.extents[axis] + 1):
        cells[best + end] = cells[best + end - 1]
        if end >= width:
            here = _in_band(walk, cells, slabs, slab, axis, end - width, along)
            cells[best + end] = max(cells[best + end], cells[best + end - width] + here)
    return int(cells[best + walk.extents[axis]])


@inner_kernel
def _in_band(
    walk: Walk, cells: Ints, slabs: int, slab: int, bands: int, band: int, along: int
) -> int:
    """Return how many fit into one band, one behind the other."""
    n, free = 0, 0
    for at in range(walk.extents[along]):
        free = free + 1 if _is_live(walk, cells, slabs, slab, bands, band, along, at) else 0
        if free == walk.tile[along]:
            n, free = n + 1, 0
    return n


@inner_kernel
def _is_live(
    walk: Walk, cells: Ints, slabs: int, slab: int, bands: int, band: int, along: int, at: int
) -> bool:
    """Whether all chips across a band are alive at one place along it."""
    first = slab * _stride(walk, slabs) + band * _stride(walk, bands) + at * _stride(walk, along)
    for i in range(walk.tile[slabs]):
        for j in range(walk.tile[bands]):
            chip = first + i * _stride(walk, slabs) + j * _stride(walk, bands)
            if cells[walk.dead + chip] != 0:
                return False
    return True


@inner_kernel
def _stride(walk: Walk, axis: int) -> int:
    """Return by how much the numbers of two chips differ that are neighbours along an axis."""
    if axis == 2:
        return 1
    return int(walk.extents[2] if axis == 1 else walk.extents[1] * walk.extents[2])
