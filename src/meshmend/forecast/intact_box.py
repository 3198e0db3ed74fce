"""The largest box of a mesh or torus without a failed chip or link, found again and again.

Works on three axes; a mesh of fewer has extents of 1 in front. Chips lie on even places of a grid
twice as fine, the links between them on odd ones, so a failed link is an obstacle like a block. On
an axis that wraps, a box may lie across the end.

Few obstacles are looked at one by one: a largest box begins behind an obstacle, or at the border,
and ends before one. Where there are many, the grid is swept instead, in a time that does not grow
with their number. `own` is the array of `walk_arrays`; its part OBSTACLES holds, for each, the
first and the last place on each axis of the finer grid.
"""

from meshmend.forecast.walk_arrays import (
    FOUND,
    GRID,
    LINE,
    OBSTACLES,
    PLANE,
    SHAPE,
    WRAP,
    Ints,
)
from meshmend.kernels import inner_kernel, plain_kernel

FEW = 40  # obstacles up to which they are looked at one by one


@plain_kernel
def largest_box(own: Ints, n: int) -> int:
    """Return the chips of the largest intact box; FOUND holds its starts and lengths.

    Among equals it is the one whose first chip comes first, then the one of smaller lengths.
    """
    for axis in range(3):
        own[FOUND + axis], own[FOUND + 3 + axis] = 0, 0 if n else own[SHAPE + axis]
    if n == 0:
        return own[SHAPE] * own[SHAPE + 1] * own[SHAPE + 2]
    return by_obstacles(own, n) if n <= FEW else by_sweep(own, n)


@inner_kernel
def _start(own: Ints, axis: int, j: int) -> int:
    """Return the first chip behind obstacle j - 1, 0 for j of 0, or -1 if there is none."""
    if j == 0:
        return 0
    at = own[own[OBSTACLES] + 6 * (j - 1) + 2 * axis + 1] // 2 + 1
    if at < own[SHAPE + axis]:
        return at
    return at - own[SHAPE + axis] if own[WRAP + axis] else -1


@inner_kernel
def _length(own: Ints, axis: int, start: int, j: int) -> int:
    """Return how many chips from `start` on lie before obstacle j - 1; for j of 0, all."""
    if j == 0:
        return own[SHAPE + axis] if own[WRAP + axis] else own[SHAPE + axis] - start
    ahead = own[own[OBSTACLES] + 6 * (j - 1) + 2 * axis] - 2 * start
    if own[WRAP + axis] and ahead < 0:
        ahead += 2 * own[SHAPE + axis]
    return (ahead + 1) // 2 if ahead > 0 else 0


@inner_kernel
def reaches_into(own: Ints, axis: int, start: int, length: int, box_at: int) -> bool:
    """Whether the box at this place of the array reaches into these chips of an axis."""
    first, last = own[box_at + 2 * axis] - 2 * start, own[box_at + 2 * axis + 1] - 2 * start
    if not own[WRAP + axis]:
        return last >= 0 and first <= 2 * length - 2
    around = 2 * own[SHAPE + axis]
    if first < 0:
        first, last = first + around, last + around
    return first <= 2 * length - 2 or last >= around


@inner_kernel
def _is_other_ring(own: Ints, axis: int, i: int, j: int) -> bool:
    """Whether a range of a ring need not be looked at: another one is as large, or larger.

    A ring has no border, so a range begins behind an obstacle and ends before one, or is the whole
    ring. That begins at chip 0, or behind a failed link.
    """
    if not own[WRAP + axis] or (i > 0) == (j > 0):
        return False
    return i == 0 or own[own[OBSTACLES] + 6 * (i - 1) + 2 * axis + 1] % 2 == 0


@plain_kernel
def by_obstacles(own: Ints, n: int) -> int:
    """Return the chips of the largest box, looking at every pair of obstacles on each axis."""
    best = 0
    for i in range(n + 1):
        start = _start(own, 0, i)
        for j in range(n + 1):
            length = _length(own, 0, start, j)
            if (
                start < 0
                or _is_other_ring(own, 0, i, j)
                or length * own[SHAPE + 1] * own[SHAPE + 2] < max(best, 1)
            ):
                continue
            among = 0  # the obstacles in the way, one bit each
            for o in range(n):
                if reaches_into(own, 0, start, length, own[OBSTACLES] + 6 * o):
                    among |= 1 << o
            best = _in_slab(own, n, among, start, length, best)
    return best


@inner_kernel
def _in_slab(own: Ints, n: int, among: int, start0: int, length0: int, best: int) -> int:
    """Return the best of the boxes that fill these chips of axis 0, if it is better."""
    for i in range(n + 1):
        if i > 0 and not among >> (i - 1) & 1:
            continue  # what does not reach into the slab bounds nothing in it
        start = _start(own, 1, i)
        for j in range(n + 1):
            if j > 0 and not among >> (j - 1) & 1:
                continue
            length = _length(own, 1, start, j)
            if (
                start < 0
                or _is_other_ring(own, 1, i, j)
                or length0 * length * own[SHAPE + 2] < max(best, 1)
            ):
                continue
            left = 0
            for o in range(n):
                if among >> o & 1 and reaches_into(own, 1, start, length, own[OBSTACLES] + 6 * o):
                    left |= 1 << o
            start2, length2 = _longest_gap(own, n, left)
            best = _offer(own, best, (start0, start, start2, length0, length, length2))
    return best


@inner_kernel
def _offer(own: Ints, best: int, box: tuple[int, int, int, int, int, int]) -> int:
    """Keep a box, three starts and three lengths, if it beats the best; return the best size."""
    size = box[3] * box[4] * box[5]
    if size < max(best, 1):
        return best
    if size == best:
        for place in range(6):
            if box[place] > own[FOUND + place]:
                return best
            if box[place] < own[FOUND + place]:
                break
    for place in range(6):
        own[FOUND + place] = box[place]
    return size


@inner_kernel
def _longest_gap(own: Ints, n: int, among: int) -> tuple[int, int]:
    """Return the start and length of the longest run of axis 2 between these obstacles."""
    best_start, best_length = 0, 0
    for i in range(n + 1):
        start = _start(own, 2, i)
        if start < 0 or (i > 0 and not among >> (i - 1) & 1):
            continue
        length = _length(own, 2, start, 0)
        for o in range(n):
            at = own[OBSTACLES] + 6 * o
            if not among >> o & 1:
                continue
            if reaches_into(own, 2, start, 1, at):
                length = 0
            elif own[WRAP + 2] or own[at + 4] > 2 * start:
                length = min(length, _length(own, 2, start, o + 1))
        if length > best_length or (length == best_length and start < best_start):
            best_start, best_length = start, length
    return best_start, best_length


@plain_kernel
def by_sweep(own: Ints, n: int) -> int:
    """Return the chips of the largest box, looking at every range of axes 0 and 1."""
    extent0, extent1, extent2 = own[SHAPE], own[SHAPE + 1], own[SHAPE + 2]
    wide1, wide2 = 2 * extent1, 2 * extent2
    _paint(own, n)
    best = 0
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
                    best = _offer(own, best, (start0, start1, start2, length0, length1, length2))
    return best


@inner_kernel
def _paint(own: Ints, n: int) -> None:
    wide1, wide2 = 2 * own[SHAPE + 1], 2 * own[SHAPE + 2]
    for at in range(2 * own[SHAPE] * wide1 * wide2):
        own[own[GRID] + at] = 0
    for o in range(n):
        box = own[OBSTACLES] + 6 * o
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
