"""The largest intact box, by cuts, by sweep and from the last one, against every box there is."""

import itertools
import math

import numpy as np
import pytest

from meshmend.forecast.intact_box import by_cuts, by_sweep, forget_box, largest_box
from meshmend.forecast.records import Ints
from meshmend.forecast.walk import add_hole, remove_hole
from meshmend.forecast.walk_arrays import IN_LARGEST_BOX, Walk, WalkArrays, box_parts, walk_of
from meshmend.kernels import kernel

Box = tuple[int, ...]


def arrays_of(shape: Box, wrap: Box, obstacles: list[list[int]]) -> WalkArrays:
    """Return arrays in which all obstacles are holes, and the box found last was the mesh."""
    n_chips, n = math.prod(shape), len(obstacles)
    figures: dict[str, float | Box] = {
        "extents": shape,
        "wrap": wrap,
        "n_holes": n,
        "n_chips": n_chips,
        "n_all_holes": n,
        "table_size": max(shape) + 1,
        "on_holes": IN_LARGEST_BOX,
        "is_hit": 1,
        "none_of": n_chips + 1,
        "came_back": -1,
    }
    parts: dict[str, int | Ints] = {
        **box_parts(shape, n),
        "found": np.array([0, 0, 0, *shape]),
        "hole_boxes": np.ravel(obstacles),
        "holes": np.arange(n),
        "link_of": np.full(n, -1),
        "hole_first": n + 1,
        "hole_chips": 0,
        "dead": n_chips,
    }
    return walk_of(figures, parts)


def found_in(arrays: WalkArrays) -> list[int]:
    begin = arrays.walk.found
    found: list[int] = arrays.cells[begin : begin + 6].tolist()
    return found


def best_of_all(shape: Box, wrap: Box, obstacles: list[list[int]]) -> list[int]:
    """Return the starts and lengths of the largest box, trying each on the finer grid."""
    cells = np.zeros([2 * extent for extent in shape], dtype=bool)
    for o in obstacles:
        cells[o[0] : o[1] + 1, o[2] : o[3] + 1, o[4] : o[5] + 1] = True
    ranges = [
        [(a, k) for a in range(s) for k in range(1, (s if w else s - a) + 1)]
        for s, w in zip(shape, wrap, strict=True)
    ]
    found, size = [0] * 6, 0
    for box in itertools.product(*ranges):
        starts, lengths = [a for a, _ in box], [k for _, k in box]
        if (-math.prod(lengths), *starts, *lengths) > (-size, *found):
            continue
        places = [
            np.arange(2 * a, 2 * (a + k) - 1) % (2 * s)
            for (a, k), s in zip(box, shape, strict=True)
        ]
        if not cells[np.ix_(*places)].any():
            found, size = [*starts, *lengths], math.prod(lengths)
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

        cut, swept = (arrays_of(shape, wrap, obstacles) for _ in range(2))
        by_cuts(cut.walk, cut.cells, 1)
        by_sweep(swept.walk, swept.cells)
        assert found_in(cut) == found_in(swept) == best


@kernel
def boxes_of(walk: Walk, cells: Ints, changes: Ints, boxes: Ints) -> None:
    """Add or remove holes, begin again at -1, and write down the largest box where it is asked.

    A box of less chips than are asked for is written as zeros.
    """
    for at in range(len(changes)):
        hole, is_up, least = changes[at]
        if hole < 0:
            walk.n_holes = 0
            forget_box(walk, cells)
        elif is_up:
            remove_hole(walk, cells, hole)
        else:
            add_hole(walk, cells, hole)
        if least > 0 and largest_box(walk, cells, least) >= least:
            boxes[at] = cells[walk.found : walk.found + 6]


@pytest.mark.parametrize("seed", range(4))
def test_the_box_is_found_again_after_failures_and_repairs(seed: int) -> None:
    """Whatever happened since it was last asked for: what is known of the last box is still so.

    Often a box is asked for of about as many chips as the largest has.
    """
    rng = np.random.default_rng(100 + seed)
    for _ in range(8):
        shape, wrap, obstacles = random_case(rng)
        down: set[int] = set()
        changes, expected = [(-1, 0, 1)], [best_of_all(shape, wrap, [])]
        for _ in range(25):
            hole = int(rng.integers(0, len(obstacles)))
            was_down = hole in down
            down ^= {hole}
            best = best_of_all(shape, wrap, [obstacles[i] for i in down])
            size = int(np.prod(best[3:]))
            least = int(rng.choice([0, 0, 1, 1, max(1, size), size + 1]))
            changes.append((hole, int(was_down), least))
            expected.append(best if 0 < least <= size else [0] * 6)
        boxes = np.zeros((len(changes), 6), dtype=np.int64)
        arrays = arrays_of(shape, wrap, obstacles)

        boxes_of(arrays.walk, arrays.cells, np.array(changes), boxes)

        assert boxes.tolist() == expected


def test_a_box_that_lost_to_an_equal_one_counts_when_that_is_hit() -> None:
    """Of eleven chips in a line 2 to 5 and 7 to 10 are intact; then 3 fails and 1 is repaired."""
    arrays = arrays_of((1, 1, 11), (0, 0, 0), [[0, 0, 0, 0, 2 * at, 2 * at] for at in (1, 6, 3)])
    changes = np.array([(-1, 0, 0), (0, 0, 0), (1, 0, 1), (2, 0, 0), (0, 1, 4)])
    boxes = np.zeros((len(changes), 6), dtype=np.int64)

    boxes_of(arrays.walk, arrays.cells, changes, boxes)

    assert boxes[2].tolist() == [0, 0, 2, 1, 1, 4]
    assert boxes[4].tolist() == [0, 0, 7, 1, 1, 4]
