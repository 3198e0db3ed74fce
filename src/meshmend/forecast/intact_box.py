"""The largest box of a mesh or torus without a failed chip or link, found again and again.

Works on three axes; a mesh of fewer has extents of 1 in front. Chips lie on even places of a grid
twice as fine, the links between them on odd ones, so a failed link is an obstacle like a block. On
an axis that wraps, a box may lie across the end.

Few holes are cut away (`box_cuts`). Where there are many, the grid is swept instead, in a time that
does not grow with their number.

`own` is the array of `walk_arrays`. FOUND holds the box that was found last. A hole outside of it
changes nothing; one inside leaves parts of it, which are a good first guess. NONE_OF is a number of
chips: no intact box has as many, but for FOUND and for those that reach into the hole CAME_BACK,
which was repaired.
"""

from meshmend.forecast.box_cuts import (
    chips_of,
    cut_found,
    cut_mesh,
    offer_box,
    release_bit,
    tabulate_holes,
)
from meshmend.forecast.walk_arrays import (
    BIT_OF,
    BITS_USED,
    CAME_BACK,
    CUT_PARTS,
    FOUND,
    GRID,
    HOLE_BOXES,
    HOLES,
    IS_HIT,
    LINE,
    MOST_CUT,
    N_ALL_HOLES,
    N_CHIPS,
    N_HOLES,
    NONE_OF,
    PLANE,
    SHAPE,
    WRAP,
    Ints,
)
from meshmend.kernels import inner_kernel, plain_kernel


@plain_kernel
def largest_box(own: Ints, least: int) -> int:
    """Return the chips of the largest intact box, if it has `least` or more; FOUND is that box.

    If not, it returns less than `least`, and FOUND is any intact box. Among equals the largest is
    the one whose first chip comes first, then the one of smaller lengths.
    """
    size = chips_of(own, FOUND)
    if own[IS_HIT] or own[CAME_BACK] >= 0 or own[NONE_OF] > max(size, least):
        if own[N_HOLES] <= MOST_CUT:
            by_cuts(own, least)
        else:
            by_sweep(own)
    return chips_of(own, FOUND)


@inner_kernel
def forget_box(own: Ints) -> None:
    """Begin without holes: the box is the mesh."""
    for axis in range(3):
        own[FOUND + axis], own[FOUND + 3 + axis] = 0, own[SHAPE + axis]
    own[IS_HIT], own[CAME_BACK], own[NONE_OF] = 0, -1, own[N_CHIPS]
    own[BITS_USED] = 0
    own[own[BIT_OF] : own[BIT_OF] + own[N_ALL_HOLES]] = 0


@inner_kernel
def note_failure(own: Ints, hole: int) -> None:
    """Note that there is a new hole."""
    if is_in(own, FOUND, own[HOLE_BOXES] + 6 * hole):
        # Others may be as large as FOUND was; that they lost to it counts no more.
        own[IS_HIT], own[NONE_OF] = 1, max(own[NONE_OF], chips_of(own, FOUND) + 1)


@inner_kernel
def note_repair(own: Ints, hole: int) -> None:
    """Note that there is a hole less."""
    if own[CAME_BACK] >= 0:  # boxes may be larger by two holes: too much to remember
        own[NONE_OF] = own[N_CHIPS] + 1
    own[CAME_BACK] = hole
    release_bit(own, hole)


@inner_kernel
def reaches_into(own: Ints, axis: int, start: int, length: int, box_at: int) -> bool:
    """Whether the obstacle at this place of the array reaches into these chips of an axis."""
    first, last = own[box_at + 2 * axis] - 2 * start, own[box_at + 2 * axis + 1] - 2 * start
    if last < 0 and own[WRAP + axis]:
        first, last = first + 2 * own[SHAPE + axis], last + 2 * own[SHAPE + axis]
    return last >= 0 and first <= 2 * length - 2


@inner_kernel
def is_in(own: Ints, box: int, box_at: int) -> bool:
    """Whether an obstacle reaches into a box, which is three starts and three lengths."""
    for axis in range(3):
        if not reaches_into(own, axis, own[box + axis], own[box + 3 + axis], box_at):
            return False
    return True


@plain_kernel
def by_cuts(own: Ints, least: int) -> None:
    """Put the largest box into FOUND, if it has `least` chips or more, cutting at the holes."""
    tabulate_holes(own)
    if own[IS_HIT]:
        cut_found(own)
    least = max(1, least)
    enough = max(least, chips_of(own, FOUND))
    cut_mesh(own, enough, own[CAME_BACK] if own[NONE_OF] <= enough else -1)
    own[IS_HIT], own[CAME_BACK], own[NONE_OF] = 0, -1, max(least, chips_of(own, FOUND))


@plain_kernel
def by_sweep(own: Ints) -> None:
    """Put the largest box into FOUND, looking at every range of axes 0 and 1."""
    extent0, extent1, extent2 = own[SHAPE], own[SHAPE + 1], own[SHAPE + 2]
    wide1, wide2 = 2 * extent1, 2 * extent2
    _paint(own)
    for place in range(6):
        own[FOUND + place] = 0
    best, box = 1, own[CUT_PARTS]
    for start0 in range(extent0):
        for length0 in range(1, (extent0 if own[WRAP] else extent0 - start0) + 1):
            _add_row(own, own[GRID], own[PLANE], wide1 * wide2, 2 * start0, length0, 2 * extent0)
            if length0 * extent1 * extent2 < best:
                continue
            for start1 in range(extent1):
                most1 = extent1 if own[WRAP + 1] else extent1 - start1
                for length1 in range(1, most1 + 1):
                    if length0 * most1 * extent2 < best:
                        break
                    _add_row(own, own[PLANE], own[LINE], wide2, 2 * start1, length1, wide1)
                    if length0 * length1 * extent2 < best:
                        continue
                    start2, length2 = _longest_run(own)
                    own[box], own[box + 1], own[box + 2] = start0, start1, start2
                    own[box + 3], own[box + 4], own[box + 5] = length0, length1, length2
                    offer_box(own, box)
                    best = max(best, chips_of(own, FOUND))
    own[IS_HIT], own[CAME_BACK], own[NONE_OF] = 0, -1, chips_of(own, FOUND)


@inner_kernel
def _paint(own: Ints) -> None:
    wide1, wide2 = 2 * own[SHAPE + 1], 2 * own[SHAPE + 2]
    for at in range(2 * own[SHAPE] * wide1 * wide2):
        own[own[GRID] + at] = 0
    for i in range(own[N_HOLES]):
        box = own[HOLE_BOXES] + 6 * own[own[HOLES] + i]
        for x in range(own[box], own[box + 1] + 1):
            for y in range(own[box + 2], own[box + 3] + 1):
                for z in range(own[box + 4], own[box + 5] + 1):
                    own[own[GRID] + (x * wide1 + y) * wide2 + z] = 1


@inner_kernel
def _add_row(
    own: Ints, rows: int, total: int, size: int, start: int, length: int, n_rows: int
) -> None:
    """Add to the first chips of a run the next one: its own row, and the link that leads to it."""
    chip = rows + (start + 2 * length - 2) % n_rows * size
    link = rows + (start + 2 * length - 3) % n_rows * size if length > 1 else chip
    for at in range(size):
        before = own[total + at] if length > 1 else 0
        own[total + at] = before | own[chip + at] | own[link + at]


@inner_kernel
def _longest_run(own: Ints) -> tuple[int, int]:
    """Return the start and length of the longest run of free chips, joined by free links."""
    n_chips, line = own[SHAPE + 2], own[LINE]
    best_start, best_length, length = 0, 0, 0
    for at in range(2 * n_chips if own[WRAP + 2] else n_chips):
        if own[line + 2 * at % (2 * n_chips)]:
            length = 0
            continue
        if at > 0 and own[line + (2 * at - 1) % (2 * n_chips)]:
            length = 0
        length += 1
        if length > best_length:
            best_start, best_length = at - length + 1, length
        if best_length == n_chips:
            break
    return best_start % n_chips, best_length
