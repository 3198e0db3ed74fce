"""The largest box of a mesh or torus without a failed chip or link, found again and again.

Works on three axes; a mesh of fewer has extents of 1 in front. Chips lie on even places of a grid
twice as fine, the links between them on odd ones, so a failed link is an obstacle like a block. On
an axis that wraps, a box may lie across the end.

`state` is the array of `walk_arrays`. FOUND holds the box that was found last. A hole outside of it
changes nothing; one inside leaves parts of it, which are a good first guess. NONE_OF is a number of
chips: no intact box has as many, but for FOUND and for those that reach into the hole CAME_BACK,
which was repaired.

Few holes are cut away one after the other. A part of the mesh with a hole in it is cut: a box in it
that is intact lies before or behind the hole on one of the axes. Parts that are smaller than the
best box so far are dropped. Where there are many holes, the grid is swept instead, in a time that
does not grow with their number.

No box is met twice. What is cut on a later axis need only have boxes that reach into the hole on
all earlier axes, because the others are in the parts that those axes left. So a part knows, for
each axis, where its boxes start at the latest and where they end at the earliest.

Which holes are in a part is a set of bits, one for each hole. Two tables give those that reach into
a range of an axis: the holes that end at a chip or behind it, and those that begin at it or before.
"""

from meshmend.forecast.machine import Ints
from meshmend.forecast.walk_arrays import (
    BIT_OF,
    BITS_USED,
    CAME_BACK,
    CUT_HOLES,
    CUT_PARTS,
    CUT_TABLES,
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
    TABLE_SIZE,
    WRAP,
)
from meshmend.kernels import inlined, inner_kernel, plain_kernel

# A part is four numbers: one for each axis, and the holes in it. That of an axis holds, from its
# highest bit on: whether it is a ring, a whole axis with the link from its end to its beginning;
# its first chip; its length; and, counted from its first chip, where a box in it starts at the
# latest and ends at the earliest. Of a ring the last two are what a box has to reach: one more than
# its last chip, or 0 if there is nothing, and its first chip.
_PART = 4
_BITS = 15
_MASK = (1 << _BITS) - 1
_RING = 1 << 4 * _BITS
# A hole on one axis: its first and its last chip, the extent of the axis, and how many chips the
# part has across it.
HoleOnAxis = tuple[int, int, int, int]
# What is not cut of a part: the axis behind the one that is, the axis behind that, the holes in it,
# the fewest chips that count, and the tables of the axis that is cut, with their size.
Rest = tuple[int, int, int, int, int, int]
_SLOTS = 67  # powers of 2 below 2**66 leave different remainders


@inlined
def chips_of(state: Ints, box: int) -> int:
    """Return the chips of a box, which is three starts and three lengths."""
    return state[box + 3] * state[box + 4] * state[box + 5]


@inner_kernel
def offer_box(state: Ints, box: int) -> None:
    """Keep a box in FOUND if it beats the one there."""
    size, found = chips_of(state, box), chips_of(state, FOUND)
    if size == found:
        for place in range(6):
            if state[box + place] != state[FOUND + place]:
                size -= state[box + place] > state[FOUND + place]
                break
    if size >= found:
        for place in range(6):
            state[FOUND + place] = state[box + place]


@inner_kernel
def tabulate_holes(state: Ints) -> None:
    """Give every hole that has none a bit, and enter it into the tables."""
    for i in range(state[N_HOLES]):
        hole = state[state[HOLES] + i]
        if state[state[BIT_OF] + hole] == 0:
            bit = ~state[BITS_USED] & (state[BITS_USED] + 1)
            state[BITS_USED] |= bit
            state[state[BIT_OF] + hole] = bit
            _tabulate(state, hole, bit)


@inner_kernel
def release_bit(state: Ints, hole: int) -> None:
    """Let another hole have the bit of one that is repaired; in the tables it stays until then."""
    state[BITS_USED] &= ~state[state[BIT_OF] + hole]
    state[state[BIT_OF] + hole] = 0


@inner_kernel
def _tabulate(state: Ints, hole: int, bit: int) -> None:
    """Write the place of a hole in chips, and its bit into the two tables of each axis."""
    slot, size = state[CUT_HOLES] + 6 * (bit % _SLOTS), state[TABLE_SIZE]
    for axis in range(3):
        place = state[HOLE_BOXES] + 6 * hole + 2 * axis
        # A link lies between two chips: a box that reaches it ends behind it.
        first, last = (state[place] + 1) >> 1, state[place + 1] >> 1
        state[slot + axis], state[slot + 3 + axis] = first, last
        ending = state[CUT_TABLES] + 2 * axis * size
        for at in range(state[SHAPE + axis]):
            others = state[ending + at] & ~bit
            state[ending + at] = others | bit if at <= last else others
            others = state[ending + size + at] & ~bit
            state[ending + size + at] = others | bit if at >= first else others


@inlined
def _axis(start: int, length: int, latest: int, earliest: int) -> int:
    """Return the number of an axis; 0 is that of a part without chips."""
    return ((start << _BITS | length) << _BITS | latest) << _BITS | earliest


@inlined
def _length(axis: int) -> int:
    return axis >> 2 * _BITS & _MASK


@inlined
def _reaching(state: Ints, axis: int, start: int, length: int) -> int:
    """Return the holes that reach into these chips of an axis."""
    ending = state[CUT_TABLES] + 2 * axis * state[TABLE_SIZE]
    beginning, last = ending + state[TABLE_SIZE], start + length - 1
    wraps = last >= state[SHAPE + axis]
    behind = state[ending + start]
    before = state[beginning + last - (state[SHAPE + axis] if wraps else 0)]
    return behind | before if wraps else behind & before


@inner_kernel
def cut_mesh(state: Ints, least: int, back: int) -> None:
    """Put the largest intact box into FOUND, if it has `least` chips and beats that.

    Only boxes are looked at that reach into the hole `back`, which is one no longer, if it is not
    negative.
    """
    for axis in range(3):
        extent, wraps = state[SHAPE + axis], state[WRAP + axis]
        latest, earliest = 0 if wraps else extent - 1, 0
        if back >= 0:
            place = state[HOLE_BOXES] + 6 * back + 2 * axis
            latest, earliest = (
                (state[place + 1] >> 1) + (1 if wraps else 0),
                (state[place] + 1) >> 1,
            )
        whole = _axis(0, extent, latest, earliest)
        state[state[CUT_PARTS] + axis] = whole | _RING if wraps else whole
    state[state[CUT_PARTS] + 3] = state[BITS_USED]
    _cut_up(state, least)


@inner_kernel
def cut_found(state: Ints) -> None:
    """Put the largest intact box inside of FOUND into FOUND."""
    inside = state[BITS_USED]
    for axis in range(3):
        start, length = state[FOUND + axis], state[FOUND + 3 + axis]
        state[state[CUT_PARTS] + axis] = _axis(start, length, length - 1, 0)
        inside &= _reaching(state, axis, start, length)
    state[state[CUT_PARTS] + 3] = inside
    for place in range(6):
        state[FOUND + place] = 0
    _cut_up(state, 1)


@inner_kernel
def _cut_up(state: Ints, least: int) -> None:
    """Put the largest box in the first part of CUT_PARTS into FOUND, if it is better than that.

    Behind that part is a stack of those that wait. A part is cut at its first hole: to look for a
    better one takes longer than it saves.
    """
    # The array is read here and not below, because every write may change what was read before.
    first, size, holes = state[CUT_PARTS], state[TABLE_SIZE], state[CUT_HOLES]
    table0 = state[CUT_TABLES]
    table1, table2 = table0 + 2 * size, table0 + 4 * size
    extent0, extent1, extent2 = state[SHAPE], state[SHAPE + 1], state[SHAPE + 2]
    top = first + _PART
    while top > first:
        top -= _PART
        part0, part1, part2, inside = state[top], state[top + 1], state[top + 2], state[top + 3]
        wide0, wide1, wide2 = _length(part0), _length(part1), _length(part2)
        if wide0 * wide1 * wide2 < least:
            continue
        if inside == 0:
            least = _offer_part(state, part0, part1, part2)
            continue
        hole = holes + 6 * ((inside & -inside) % _SLOTS)
        hole0, hole1, hole2 = state[hole], state[hole + 1], state[hole + 2]
        last0, last1, last2 = state[hole + 3], state[hole + 4], state[hole + 5]
        rest = (part1, part2, inside, least, table0, size)
        top, part0 = _cut(state, 0, part0, (hole0, last0, extent0, wide1 * wide2), rest, top)
        rest = (part2, part0, inside, least, table1, size)
        top, part1 = _cut(state, 1, part1, (hole1, last1, extent1, wide0 * wide2), rest, top)
        rest = (part0, part1, inside, least, table2, size)
        top, _ = _cut(state, 2, part2, (hole2, last2, extent2, wide0 * wide1), rest, top)


@inner_kernel
def _offer_part(state: Ints, part0: int, part1: int, part2: int) -> int:
    """Keep a part without holes in FOUND if it beats the box there; return the chips of FOUND."""
    box = state[CUT_HOLES] + 6 * _SLOTS
    state[box], state[box + 3] = part0 >> 3 * _BITS & _MASK, _length(part0)
    state[box + 1], state[box + 4] = part1 >> 3 * _BITS & _MASK, _length(part1)
    state[box + 2], state[box + 5] = part2 >> 3 * _BITS & _MASK, _length(part2)
    offer_box(state, box)
    return chips_of(state, FOUND)


@inlined
def _push(state: Ints, axis: int, cut: int, extent: int, rest: Rest, top: int) -> int:
    """Put a part on the stack: one axis is cut, and two stay; return its end."""
    next_part, after_next, inside, _, table, size = rest
    state[top + axis], state[top + (axis + 1) % 3], state[top + (axis + 2) % 3] = (
        cut,
        next_part,
        after_next,
    )
    start, last = cut >> 3 * _BITS & _MASK, (cut >> 3 * _BITS & _MASK) + _length(cut) - 1
    if last >= extent:
        inside &= state[table + start] | state[table + size + last - extent]
    else:
        inside &= state[table + start] & state[table + size + last]
    state[top + 3] = inside
    return top + _PART


@inlined
def _cut(
    state: Ints, axis: int, part: int, hole: HoleOnAxis, rest: Rest, top: int
) -> tuple[int, int]:
    """Put what a cut leaves of a part on the stack if the best box may be in it.

    Returns the end of the stack, and what later axes need to reach on this one.
    """
    if part >= _RING:
        return _cut_ring(state, axis, part, hole, rest, top)
    return _cut_range(state, axis, part, hole, rest, top)


@inlined
def _cut_ring(
    state: Ints, axis: int, part: int, hole: HoleOnAxis, rest: Rest, top: int
) -> tuple[int, int]:
    first, last, extent, across = hole
    start = 0 if last + 1 == extent else last + 1
    length = extent - (last - first + 1)
    must_last, must_first = (part >> _BITS & _MASK) - 1, part & _MASK
    if length * across >= rest[3]:
        latest = must_last - start
        latest += extent if latest < 0 else 0
        earliest = latest - (must_last - must_first)
        # Nothing is to be reached, or it reaches in from both ends.
        if must_last < 0 or (earliest < 0 and earliest + extent < length):
            latest, earliest = length, 0
        if earliest < length:
            cut = _axis(start, length, min(latest, length - 1), max(earliest, 0))
            top = _push(state, axis, cut, extent, rest, top)
    return top, part if must_last >= 0 else _RING | _axis(0, extent, last + 1, first)


@inlined
def _cut_range(
    state: Ints, axis: int, part: int, hole: HoleOnAxis, rest: Rest, top: int
) -> tuple[int, int]:
    first, last, extent, across = hole
    start, length = part >> 3 * _BITS & _MASK, _length(part)
    latest, earliest = part >> _BITS & _MASK, part & _MASK
    around = extent if last < start else 0  # then it lies behind the end of the axis
    first, last = first - start + around, last - start + around
    if (first * across >= rest[3]) & (earliest < first):
        cut = _axis(start, first, min(latest, first - 1), earliest)
        top = _push(state, axis, cut, extent, rest, top)
    end = min(length, first + extent)  # less if it lies across the start and before the end
    left = end - last - 1
    if (left * across >= rest[3]) & (latest > last) & (earliest < end):
        start_behind = start + last + 1
        start_behind -= extent if start_behind >= extent else 0
        latest_behind, earliest_behind = min(latest - last, left) - 1, max(earliest - last - 1, 0)
        cut = _axis(start_behind, left, latest_behind, earliest_behind)
        top = _push(state, axis, cut, extent, rest, top)
    kept = _axis(start, length, min(latest, last), max(earliest, first))
    return top, kept if end == length else part


@plain_kernel
def largest_box(state: Ints, least: int) -> int:
    """Return the chips of the largest intact box, if it has `least` or more; FOUND is that box.

    If not, it returns less than `least`, and FOUND is any intact box. Among equals the largest is
    the one whose first chip comes first, then the one of smaller lengths.
    """
    size = chips_of(state, FOUND)
    if state[IS_HIT] or state[CAME_BACK] >= 0 or state[NONE_OF] > max(size, least):
        if state[N_HOLES] <= MOST_CUT:
            by_cuts(state, least)
        else:
            by_sweep(state)
    return chips_of(state, FOUND)


@inner_kernel
def forget_box(state: Ints) -> None:
    """Begin without holes: the box is the mesh."""
    for axis in range(3):
        state[FOUND + axis], state[FOUND + 3 + axis] = 0, state[SHAPE + axis]
    state[IS_HIT], state[CAME_BACK], state[NONE_OF] = 0, -1, state[N_CHIPS]
    state[BITS_USED] = 0
    state[state[BIT_OF] : state[BIT_OF] + state[N_ALL_HOLES]] = 0


@inner_kernel
def note_failure(state: Ints, hole: int) -> None:
    """Note that there is a new hole."""
    if is_in(state, FOUND, state[HOLE_BOXES] + 6 * hole):
        # Others may be as large as FOUND was; that they lost to it counts no more.
        state[IS_HIT], state[NONE_OF] = 1, max(state[NONE_OF], chips_of(state, FOUND) + 1)


@inner_kernel
def note_repair(state: Ints, hole: int) -> None:
    """Note that there is a hole less."""
    if state[CAME_BACK] >= 0:  # boxes may be larger by two holes: too much to remember
        state[NONE_OF] = state[N_CHIPS] + 1
    state[CAME_BACK] = hole
    release_bit(state, hole)


@inner_kernel
def reaches_into(state: Ints, axis: int, start: int, length: int, box_at: int) -> bool:
    """Whether the obstacle at this place of the array reaches into these chips of an axis."""
    first, last = state[box_at + 2 * axis] - 2 * start, state[box_at + 2 * axis + 1] - 2 * start
    if last < 0 and state[WRAP + axis]:
        first, last = first + 2 * state[SHAPE + axis], last + 2 * state[SHAPE + axis]
    return last >= 0 and first <= 2 * length - 2


@inner_kernel
def is_in(state: Ints, box: int, box_at: int) -> bool:
    """Whether an obstacle reaches into a box, which is three starts and three lengths."""
    for axis in range(3):
        if not reaches_into(state, axis, state[box + axis], state[box + 3 + axis], box_at):
            return False
    return True


@plain_kernel
def by_cuts(state: Ints, least: int) -> None:
    """Put the largest box into FOUND, if it has `least` chips or more, cutting at the holes."""
    tabulate_holes(state)
    if state[IS_HIT]:
        cut_found(state)
    least = max(1, least)
    enough = max(least, chips_of(state, FOUND))
    cut_mesh(state, enough, state[CAME_BACK] if state[NONE_OF] <= enough else -1)
    state[IS_HIT], state[CAME_BACK], state[NONE_OF] = 0, -1, max(least, chips_of(state, FOUND))


@plain_kernel
def by_sweep(state: Ints) -> None:
    """Put the largest box into FOUND, looking at every range of axes 0 and 1."""
    extent0, extent1, extent2 = state[SHAPE], state[SHAPE + 1], state[SHAPE + 2]
    wide1, wide2 = 2 * extent1, 2 * extent2
    _paint(state)
    for place in range(6):
        state[FOUND + place] = 0
    best, box = 1, state[CUT_PARTS]
    for start0 in range(extent0):
        for length0 in range(1, (extent0 if state[WRAP] else extent0 - start0) + 1):
            _add_row(
                state, state[GRID], state[PLANE], wide1 * wide2, 2 * start0, length0, 2 * extent0
            )
            if length0 * extent1 * extent2 < best:
                continue
            for start1 in range(extent1):
                most1 = extent1 if state[WRAP + 1] else extent1 - start1
                for length1 in range(1, most1 + 1):
                    if length0 * most1 * extent2 < best:
                        break
                    _add_row(state, state[PLANE], state[LINE], wide2, 2 * start1, length1, wide1)
                    if length0 * length1 * extent2 < best:
                        continue
                    start2, length2 = _longest_run(state)
                    state[box], state[box + 1], state[box + 2] = start0, start1, start2
                    state[box + 3], state[box + 4], state[box + 5] = length0, length1, length2
                    offer_box(state, box)
                    best = max(best, chips_of(state, FOUND))
    state[IS_HIT], state[CAME_BACK], state[NONE_OF] = 0, -1, chips_of(state, FOUND)


@inner_kernel
def _paint(state: Ints) -> None:
    wide1, wide2 = 2 * state[SHAPE + 1], 2 * state[SHAPE + 2]
    for at in range(2 * state[SHAPE] * wide1 * wide2):
        state[state[GRID] + at] = 0
    for i in range(state[N_HOLES]):
        box = state[HOLE_BOXES] + 6 * state[state[HOLES] + i]
        for x in range(state[box], state[box + 1] + 1):
            for y in range(state[box + 2], state[box + 3] + 1):
                for z in range(state[box + 4], state[box + 5] + 1):
                    state[state[GRID] + (x * wide1 + y) * wide2 + z] = 1


@inner_kernel
def _add_row(
    state: Ints, rows: int, total: int, size: int, start: int, length: int, n_rows: int
) -> None:
    """Add to the first chips of a run the next one: its own row, and the link that leads to it."""
    chip = rows + (start + 2 * length - 2) % n_rows * size
    link = rows + (start + 2 * length - 3) % n_rows * size if length > 1 else chip
    for at in range(size):
        before = state[total + at] if length > 1 else 0
        state[total + at] = before | state[chip + at] | state[link + at]


@inner_kernel
def _longest_run(state: Ints) -> tuple[int, int]:
    """Return the start and length of the longest run of free chips, joined by free links."""
    n_chips, line = state[SHAPE + 2], state[LINE]
    best_start, best_length, length = 0, 0, 0
    for at in range(2 * n_chips if state[WRAP + 2] else n_chips):
        if state[line + 2 * at % (2 * n_chips)]:
            length = 0
            continue
        if at > 0 and state[line + (2 * at - 1) % (2 * n_chips)]:
            length = 0
        length += 1
        if length > best_length:
            best_start, best_length = at - length + 1, length
        if best_length == n_chips:
            break
    return best_start % n_chips, best_length
