"""How many tiles fit around the holes: boxes as they are written, laid in bands.

Bands of the width of a tile go across the mesh, along one axis or another, with gaps where that is
better. In a band, tiles are laid as soon as there is room. This is the most tiles that any bands
hold; now and then a tiling that is no such bands has one more.
"""

from meshmend.forecast.machine import Ints
from meshmend.forecast.walk_arrays import BANDS, DEAD, SHAPE, TABLE_SIZE, TILE
from meshmend.kernels import inner_kernel


@inner_kernel
def most_tiles(own: Ints) -> int:
    """Return how many tiles of live chips fit."""
    best = 0
    for order in range(2 if own[SHAPE] == 1 else 6):
        slabs = order // 2
        bands = (slabs + 1 + order % 2) % 3
        best = max(best, _in_slabs(own, slabs, bands, 3 - slabs - bands))
    return best


@inner_kernel
def _in_slabs(own: Ints, axis: int, bands: int, along: int) -> int:
    """Return how many fit into slabs across one axis, in each of which there are bands."""
    width, best = own[TILE + axis], own[BANDS]
    own[best] = 0
    for end in range(1, own[SHAPE + axis] + 1):
        own[best + end] = own[best + end - 1]
        if end >= width:
            here = _in_bands(own, axis, end - width, bands, along)
            own[best + end] = max(own[best + end], own[best + end - width] + here)
    return int(own[best + own[SHAPE + axis]])


@inner_kernel
def _in_bands(own: Ints, slabs: int, slab: int, axis: int, along: int) -> int:
    """Return how many fit into the bands of one slab, which begins at `slab`."""
    width, best = own[TILE + axis], own[BANDS] + own[TABLE_SIZE]
    own[best] = 0
    for end in range(1, own[SHAPE + axis] + 1):
        own[best + end] = own[best + end - 1]
        if end >= width:
            here = _in_band(own, slabs, slab, axis, end - width, along)
            own[best + end] = max(own[best + end], own[best + end - width] + here)
    return int(own[best + own[SHAPE + axis]])


@inner_kernel
def _in_band(own: Ints, slabs: int, slab: int, bands: int, band: int, along: int) -> int:
    """Return how many fit into one band, one behind the other."""
    n, free = 0, 0
    for at in range(own[SHAPE + along]):
        free = free + 1 if _is_live(own, slabs, slab, bands, band, along, at) else 0
        if free == own[TILE + along]:
            n, free = n + 1, 0
    return n


@inner_kernel
def _is_live(own: Ints, slabs: int, slab: int, bands: int, band: int, along: int, at: int) -> bool:
    """Whether all chips across a band are alive at one place along it."""
    first = slab * _stride(own, slabs) + band * _stride(own, bands) + at * _stride(own, along)
    for i in range(own[TILE + slabs]):
        for j in range(own[TILE + bands]):
            chip = first + i * _stride(own, slabs) + j * _stride(own, bands)
            if own[own[DEAD] + chip] != 0:
                return False
    return True


@inner_kernel
def _stride(own: Ints, axis: int) -> int:
    """Return by how much the numbers of two chips differ that are neighbours along an axis."""
    if axis == 2:
        return 1
    return int(own[SHAPE + 2] if axis == 1 else own[SHAPE + 1] * own[SHAPE + 2])
