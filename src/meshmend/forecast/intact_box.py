"""The largest box of a mesh or torus without a failed chip or link, found again and again.

Works on three axes; a mesh of fewer has extents of 1 in front. Chips lie on even places of a grid
twice as fine, the links between them on odd ones, so a failed link is an obstacle like a block. On
an axis that wraps, a box may lie across the end.

A box with an obstacle in it is cut: what is intact lies before or behind the obstacle on one of the
axes. The mesh is cut that way until no obstacle is left, and parts that are smaller than the best
box so far are dropped. Where there are many obstacles, the grid is swept instead, in a time that
does not grow with their number.

`own` is the array of `walk_arrays`. FOUND holds the box that was found last, and FOUND_IS what has
become of it since: a hole outside of it changes nothing, and one inside leaves parts of it, which
are a good first guess.
"""

from meshmend.forecast.walk_arrays import (
    CAME_BACK,
    CUT_PARTS,
    FOUND,
    FOUND_IS,
    GRID,
    HIT,
    HOLE_BOXES,
    HOLES,
    LARGEST,
    LINE,
    MOST_CUT,
    N_HOLES,
    PLANE,
    SHAPE,
    WRAP,
    Ints,
)
from meshmend.kernels import inlined, inner_kernel, plain_kernel

_RING = -1  # the start of a range that is a whole axis with the link from its end to its beginning
_PART = 7  # numbers of a part: three starts, three lengths, the first hole not yet looked at


@plain_kernel
def largest_box(own: Ints) -> int:
    """Return the chips of the largest intact box; FOUND holds its starts and lengths.

    Among equals it is the one whose first chip comes first, then the one of smaller lengths.
    """
    if own[FOUND_IS] != LARGEST:
        if own[N_HOLES] <= MOST_CUT:
            by_cuts(own)
        else:
            by_sweep(own)
        own[FOUND_IS] = LARGEST
    return _n_chips(own, FOUND)


@inner_kernel
def forget_box(own: Ints) -> None:
    """Begin without holes: the box is the mesh."""
    for axis in range(3):
        own[FOUND + axis], own[FOUND + 3 + axis] = 0, own[SHAPE + axis]
    own[FOUND_IS] = LARGEST


@inlined
def _n_chips(own: Ints, box_at: int) -> int:
    return own[box_at + 3] * own[box_at + 4] * own[box_at + 5]


@inner_kernel
def reaches_into(own: Ints, axis: int, start: int, length: int, box_at: int) -> bool:
    """Whether the obstacle at this place of the array reaches into these chips of an axis."""
    if start == _RING:
        return True
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
def by_cuts(own: Ints) -> None:
    """Put the largest box into FOUND, cutting the mesh at one hole after the other."""
    first = own[CUT_PARTS] + _PART
    if own[FOUND_IS] == HIT:  # its largest part is a first guess
        own[CAME_BACK] = -1
        for place in range(6):
            own[first + place], own[FOUND + place] = own[FOUND + place], 0
        _cut_up(own)
    for axis in range(3):
        own[first + axis] = _RING if own[WRAP + axis] else 0
        own[first + 3 + axis] = own[SHAPE + axis]
    _cut_up(own)


@inner_kernel
def _cut_up(own: Ints) -> None:
    """Put the largest box in the first part that waits into FOUND, if it is better than that.

    The first place of CUT_PARTS is for the part in hand, behind it is a stack of those that wait.
    A part is cut at its first obstacle: to look for a better one takes longer than it saves.
    """
    part, n_holes = own[CUT_PARTS], own[N_HOLES]
    top = part + 2 * _PART
    own[top - 1] = 0
    least = max(1, _n_chips(own, FOUND))
    while top > part + _PART:
        top -= _PART
        if _n_chips(own, top) < least:
            continue
        hole, is_cut = own[top + 6], False
        while hole < n_holes and not is_cut:
            box_at = own[HOLE_BOXES] + 6 * own[own[HOLES] + hole]
            hole += 1
            first0, last0 = _relative(own, 0, top, box_at)
            first1, last1 = _relative(own, 1, top, box_at)
            first2, last2 = _relative(own, 2, top, box_at)
            is_cut = (  # no `and`: one branch, for it is hard to predict
                _is_within(own, 0, top, first0, last0)
                & _is_within(own, 1, top, first1, last1)
                & _is_within(own, 2, top, first2, last2)
            )
        if not is_cut:
            for axis in range(3):
                own[top + axis] = max(0, own[top + axis])
            _offer(own, top)
            least = _n_chips(own, FOUND)
            continue
        for place in range(6):
            own[part + place] = own[top + place]
        own[part + 6] = hole
        wide0, wide1, wide2 = own[part + 3], own[part + 4], own[part + 5]
        top = _cut(own, 0, box_at, first0, last0, top, least, wide1 * wide2)
        top = _cut(own, 1, box_at, first1, last1, top, least, wide0 * wide2)
        top = _cut(own, 2, box_at, first2, last2, top, least, wide0 * wide1)


@inlined
def _relative(own: Ints, axis: int, part: int, box_at: int) -> tuple[int, int]:
    """Return the places of an obstacle from the start of a part; a ring starts behind it."""
    start = own[part + axis]
    around = 2 * own[SHAPE + axis] if own[WRAP + axis] else 0
    first, last = own[box_at + 2 * axis], own[box_at + 2 * axis + 1]
    start = (last >> 1) + 1 if start == _RING else start
    first, last = first - 2 * start, last - 2 * start
    around = around if last < 0 else 0
    return first + around, last + around


@inlined
def _is_within(own: Ints, axis: int, part: int, first: int, last: int) -> bool:
    """Whether an obstacle at these places from the start of a part reaches into it."""
    return (own[part + axis] == _RING) | ((last >= 0) & (first <= 2 * own[part + 3 + axis] - 2))


@inlined
def _is_new(own: Ints, axis: int, start: int, length: int) -> bool:
    """Whether chips of an axis may be of a box that was not intact when FOUND was the largest."""
    back = own[CAME_BACK]
    return back < 0 or reaches_into(own, axis, start, length, own[HOLE_BOXES] + 6 * back)


@inlined
def _cut(
    own: Ints, axis: int, box_at: int, first: int, last: int, top: int, least: int, across: int
) -> int:
    """Put what a cut leaves of a part on the stack if the best box may be in it; return its end.

    `first` and `last` are places from the start of the part; `across` chips lie side by side.
    """
    part, extent = own[CUT_PARTS], own[SHAPE + axis]
    start, end = own[part + axis], own[part + 3 + axis]
    if start == _RING:
        start = (own[box_at + 2 * axis + 1] >> 1) + 1
        start -= extent if start == extent else 0
    before, behind = (first + 1) >> 1, (last >> 1) + 1
    if before * across >= least and _is_new(own, axis, start, before):
        top = _push(own, axis, start, before, top)
    if own[WRAP + axis] and first < 0:  # it lies across the start, and so perhaps before the end
        end = min(end, (first + 2 * extent + 1) >> 1)
    if (end - behind) * across >= least:
        start += behind
        start -= extent if start >= extent else 0
        if _is_new(own, axis, start, end - behind):
            top = _push(own, axis, start, end - behind, top)
    return top


@inlined
def _push(own: Ints, axis: int, start: int, length: int, top: int) -> int:
    """Put these chips of the part in hand on the stack; return its end."""
    part = own[CUT_PARTS]
    for place in range(_PART):
        own[top + place] = own[part + place]
    own[top + axis], own[top + 3 + axis] = start, length
    return top + _PART


@inner_kernel
def _offer(own: Ints, box_at: int) -> None:
    """Keep a box, three starts and three lengths, if it beats the one found."""
    size, found = _n_chips(own, box_at), _n_chips(own, FOUND)
    if size == found:
        for place in range(6):
            if own[box_at + place] != own[FOUND + place]:
                size -= own[box_at + place] > own[FOUND + place]
                break
    if size >= found:
        for place in range(6):
            own[FOUND + place] = own[box_at + place]


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
                    _offer(own, box)
                    best = max(best, _n_chips(own, FOUND))


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
