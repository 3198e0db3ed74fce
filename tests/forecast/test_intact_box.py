"""The largest intact box, by cuts, by sweep and from the last one, against every box there is."""

import itertools
import math

import numpy as np
import pytest

from meshmend.forecast.intact_box import by_cuts, by_sweep, forget_box, largest_box
from meshmend.forecast.machine import Ints
from meshmend.forecast.walk import add_hole, remove_hole
from meshmend.forecast.walk_arrays import (
    BIT_OF,
    CAME_BACK,
    CUT_HOLES,
    CUT_PARTS,
    CUT_TABLES,
    DEAD,
    FOUND,
    GRID,
    HOLE_AT,
    HOLE_BOXES,
    HOLE_CHIPS,
    HOLE_FIRST,
    HOLES,
    IN_LARGEST_BOX,
    IS_HIT,
    LINE,
    LINK_OF,
    N_ALL_HOLES,
    N_CHIPS,
    N_CUT_HOLES,
    N_CUT_PARTS,
    N_HOLES,
    NONE_OF,
    ON_HOLES,
    PLANE,
    SHAPE,
    TABLE_SIZE,
    WRAP,
    packed,
)
from meshmend.kernels import kernel

Box = tuple[int, ...]


def array_of(shape: Box, wrap: Box, obstacles: list[list[int]]) -> Ints:
    """Return an array in which all obstacles are holes, and the box found last was the mesh."""
    n_chips, n = int(np.prod(shape)), len(obstacles)
    singles = {SHAPE + i: extent for i, extent in enumerate(shape)}
    singles |= {WRAP + i: on for i, on in enumerate(wrap)}
    singles |= {FOUND + 3 + i: extent for i, extent in enumerate(shape)}
    singles |= {N_HOLES: n, IS_HIT: 1, NONE_OF: n_chips + 1, CAME_BACK: -1}
    singles |= {
        N_CHIPS: n_chips,
        N_ALL_HOLES: n,
        ON_HOLES: IN_LARGEST_BOX,
        TABLE_SIZE: max(shape) + 1,
    }
    sizes = {CUT_PARTS: N_CUT_PARTS, GRID: 8 * n_chips, PLANE: 4 * shape[1] * shape[2]}
    sizes |= {CUT_HOLES: N_CUT_HOLES, CUT_TABLES: 6 * (max(shape) + 1)}
    sizes |= {LINE: 2 * shape[2], HOLE_AT: n, HOLE_FIRST: n + 1, HOLE_CHIPS: 0, DEAD: n_chips}
    sizes |= {BIT_OF: n}
    return packed(
        singles,
        {
            HOLE_BOXES: [place for obstacle in obstacles for place in obstacle],
            HOLES: range(n),
            LINK_OF: [-1] * n,
            **{part: np.zeros(size, dtype=np.int64) for part, size in sizes.items()},
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

        cut, swept = (array_of(shape, wrap, obstacles) for _ in range(2))
        by_cuts(cut, 1)
        by_sweep(swept)
        for state in (cut, swept):
            assert state[FOUND : FOUND + 6].tolist() == best


@kernel
def boxes_of(state: Ints, changes: Ints, boxes: Ints) -> None:
    """Add or remove holes, begin again at -1, and write down the largest box where it is asked.

    A box of less chips than are asked for is written as zeros.
    """
    for at in range(len(changes)):
        hole, is_up, least = changes[at]
        if hole < 0:
            state[N_HOLES] = 0
            forget_box(state)
        elif is_up:
            remove_hole(state, hole)
        else:
            add_hole(state, hole)
        if least > 0 and largest_box(state, least) >= least:
            boxes[at] = state[FOUND : FOUND + 6]


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
        state = array_of(shape, wrap, obstacles)

        boxes_of(state, np.array(changes), boxes)

        assert boxes.tolist() == expected


def test_a_box_that_lost_to_an_equal_one_counts_when_that_is_hit() -> None:
    """Of eleven chips in a line 2 to 5 and 7 to 10 are intact; then 3 fails and 1 is repaired."""
    state = array_of((1, 1, 11), (0, 0, 0), [[0, 0, 0, 0, 2 * at, 2 * at] for at in (1, 6, 3)])
    changes = np.array([(-1, 0, 0), (0, 0, 0), (1, 0, 1), (2, 0, 0), (0, 1, 4)])
    boxes = np.zeros((len(changes), 6), dtype=np.int64)

    boxes_of(state, changes, boxes)

    assert boxes[2].tolist() == [0, 0, 2, 1, 1, 4]
    assert boxes[4].tolist() == [0, 0, 7, 1, 1, 4]
