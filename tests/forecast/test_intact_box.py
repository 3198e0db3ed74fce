"""The largest intact box, by obstacles and by sweep, against every box there is."""

import itertools

import numpy as np
import pytest

from meshmend.forecast.intact_box import by_obstacles, by_sweep, largest_box
from meshmend.forecast.walk_arrays import (
    FOUND,
    GRID,
    LINE,
    OBSTACLES,
    PLANE,
    SHAPE,
    WRAP,
    Ints,
    packed,
)

Box = tuple[int, ...]


def array_of(shape: Box, wrap: Box, obstacles: list[list[int]]) -> Ints:
    singles = {SHAPE + i: extent for i, extent in enumerate(shape)}
    singles |= {WRAP + i: on for i, on in enumerate(wrap)}
    n_chips = int(np.prod(shape))
    flat = [place for obstacle in obstacles for place in obstacle]
    zeros = np.zeros
    return packed(
        singles,
        {
            OBSTACLES: flat,
            GRID: zeros(8 * n_chips, dtype=np.int64),
            PLANE: zeros(4 * shape[1] * shape[2], dtype=np.int64),
            LINE: zeros(2 * shape[2], dtype=np.int64),
        },
    )


def best_of_all(shape: Box, wrap: Box, obstacles: list[list[int]]) -> list[int]:
    """Return the starts and lengths of the largest box, trying each on the finer grid."""
    cells = np.zeros([2 * extent for extent in shape], dtype=bool)
    for o in obstacles:
        cells[o[0] : o[1] + 1, o[2] : o[3] + 1, o[4] : o[5] + 1] = True
    ranges = [
        [(a, k) for a in range(s) for k in range(1, (s if w else s - a) + 1)]
        for s, w in zip(shape, wrap, strict=True)
    ]
    found = [0] * 6
    for box in itertools.product(*ranges):
        starts, lengths = [a for a, _ in box], [k for _, k in box]
        places = [
            np.arange(2 * a, 2 * (a + k) - 1) % (2 * s)
            for (a, k), s in zip(box, shape, strict=True)
        ]
        if cells[np.ix_(*places)].any():
            continue
        size, best = np.prod(lengths), np.prod(found[3:])
        if size > best or (size == best and [*starts, *lengths] < found):
            found = [*starts, *lengths]
    return found


def random_case(rng: np.random.Generator) -> tuple[Box, Box, list[list[int]]]:
    n_axes = int(rng.integers(1, 4))
    shape = (1,) * (3 - n_axes) + tuple(int(n) for n in rng.integers(1, 6, n_axes))
    wrap = tuple(int(extent > 2 and rng.random() < 0.5) for extent in shape)
    obstacles = []
    for _ in range(int(rng.integers(1, 9))):
        link_axis = int(rng.integers(0, 3)) if rng.random() < 0.3 else -1
        obstacle: list[int] = []
        for axis, extent in enumerate(shape):
            if axis == link_axis and extent > 1:
                at = 2 * int(rng.integers(0, extent if wrap[axis] else extent - 1)) + 1
                obstacle += [at, at]
            else:
                size = int(rng.integers(1, min(3, extent) + 1))
                at = int(rng.integers(0, extent - size + 1))
                obstacle += [2 * at, 2 * (at + size) - 2]
        obstacles.append(obstacle)
    return shape, wrap, obstacles


@pytest.mark.parametrize("seed", range(6))
def test_both_ways_find_the_box_that_trying_all_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(12):
        shape, wrap, obstacles = random_case(rng)
        best = best_of_all(shape, wrap, obstacles)

        for find in (by_obstacles, by_sweep):
            own = array_of(shape, wrap, obstacles)
            assert find(own, len(obstacles)) == np.prod(best[3:])
            if any(best[3:]):
                assert own[FOUND : FOUND + 6].tolist() == best


def test_without_an_obstacle_the_box_is_the_mesh() -> None:
    own = array_of((1, 4, 6), (0, 0, 1), [])

    assert largest_box(own, 0) == 24
    assert own[FOUND : FOUND + 6].tolist() == [0, 0, 0, 1, 4, 6]
