"""How many tiles fit around the holes: boxes as they are written, laid in bands.

Bands of the width of a tile go across the mesh, along one axis or another, with gaps where that is
better. In a band, tiles are laid as soon as there is room. This is the most tiles that any bands
hold; now and then a tiling that is no such bands has one more.
"""

from meshmend.forecast.machine import Ints
from meshmend.forecast.walk_arrays import BANDS, DEAD, SHAPE, TABLE_SIZE, TILE
from meshmend.kernels import inner_kernel


@inner_kernel
def most_tiles(state: Ints) -> int:
    """Return how many tiles of live chips fit."""
    best = 0
    for order in range(2 if state[SHAPE] == 1 else 6):
        slabs = order // 2
        bands = (slabs + 1 + order % 2) % 3
        best = max(best, _in_slabs(state, slabs, bands, 3 - slabs - bands))
    return best


@inner_kernel
def _in_slabs(state: Ints, axis: int, bands: int, along: int) -> int:
    """Return how many fit into slabs across one axis, in each of which there are bands."""
    width, best = state[TILE + axis], state[BANDS]
    state[best] = 0
    for end in range(1, state[SHAPE + axis] + 1):
        state[best + end] = state[best + end - 1]
        if end >= width:
            here = _in_bands(state, axis, end - width, bands, along)
            state[best + end] = max(state[best + end], state[best + end - width] + here)
    return int(state[best + state[SHAPE + axis]])


@inner_kernel
def _in_bands(state: Ints, slabs: int, slab: int, axis: int, along: int) -> int:
    """Return how many fit into the bands of one slab, which begins at `slab`."""
    width, best = state[TILE + axis], state[BANDS] + state[TABLE_SIZE]
    state[best] = 0
    for end in range(1, state[SHAPE + axis] + 1):
        state[best + end] = state[best + end - 1]
        if end >= width:
            here = _in_band(state, slabs, slab, axis, end - width, along)
            state[best + end] = max(state[best + end], state[best + end - width] + here)
    return int(state[best + state[SHAPE + axis]])


@inner_kernel
def _in_band(state: Ints, slabs: int, slab: int, bands: int, band: int, along: int) -> int:
    """Return how many fit into one band, one behind the other."""
    n, free = 0, 0
    for at in range(state[SHAPE + along]):
        free = free + 1 if _is_live(state, slabs, slab, bands, band, along, at) else 0
        if free == state[TILE + along]:
            n, free = n + 1, 0
    return n


@inner_kernel
def _is_live(
    state: Ints, slabs: int, slab: int, bands: int, band: int, along: int, at: int
) -> bool:
    """Whether all chips across a band are alive at one place along it."""
    first = slab * _stride(state, slabs) + band * _stride(state, bands) + at * _stride(state, along)
    for i in range(state[TILE + slabs]):
        for j in range(state[TILE + bands]):
            chip = first + i * _stride(state, slabs) + j * _stride(state, bands)
            if state[state[DEAD] + chip] != 0:
                return False
    return True


@inner_kernel
def _stride(state: Ints, axis: int) -> int:
    """Return by how much the numbers of two chips differ that are neighbours along an axis."""
    if axis == 2:
        return 1
    return int(state[SHAPE + 2] if axis == 1 else state[SHAPE + 1] * state[SHAPE + 2])
