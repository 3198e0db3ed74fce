"""The largest box of a mesh or torus without a failed chip or link, found again and again.

Works on three axes; a mesh of fewer has extents of 1 in front. Chips lie on even places of a grid
twice as fine, the links between them on odd ones, so a failed link is an obstacle like a block. On
an axis that wraps, a box may lie across the end.

`found` holds the box that was found last. A hole outside of it changes nothing; one inside leaves
parts of it, which are a good first guess. `none_of` is a number of chips: no intact box has as
many, but for `found` and for those that reach into the hole `came_back`, which was repaired.

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

from meshmend.forecast.records import Ints
from meshmend.forecast.walk_arrays import MOST_CUT, Walk
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
def chips_of(cells: Ints, box: int) -> int:
    """Return the chips of a box, which is three starts and three lengths."""
    return cells[box + 3] * cells[box + 4] * cells[box + 5]


@inner_kernel
def offer_box(walk: Walk, cells: Ints, box: int) -> None:
    """Keep a box in `found` if it beats the one there."""
    size, found = chips_of(cells, box), chips_of(cells, walk.found)
    if size == found:
        for place in range(6):
            if cells[box + place] != cells[walk.found + place]:
                size -= cells[box + place] > cells[walk.found + place]
                break
    if size >= found:
        for place in range(6):
            cells[walk.found + place] = cells[box + place]


@inner_kernel
def tabulate_holes(walk: Walk, cells: Ints) -> None:
    """Give every hole that has none a bit, and enter it into the tables."""
    for i in range(walk.n_holes):
        hole = cells[walk.holes + i]
        if cells[walk.bit_of + hole] == 0:
            bit = ~walk.bits_used & (walk.bits_used + 1)
            walk.bits_used |= bit
            cells[walk.bit_of + hole] = bit
            _tabulate(walk, cells, hole, bit)


@inner_kernel
def release_bit(walk: Walk, cells: Ints, hole: int) -> None:
    """Let another hole have the bit of one that is repaired; in the tables it stays until then."""
    walk.bits_used &= ~cells[walk.bit_of + hole]
    cells[walk.bit_of + hole] = 0


@inner_kernel
def _tabulate(walk: Walk, cells: Ints, hole: int, bit: int) -> None:
    """Write the place of a hole in chips, and its bit into the two tables of each axis."""
    slot, size = walk.cut_holes + 6 * (bit % _SLOTS), walk.table_size
    for axis in range(3):
        place = walk.hole_boxes + 6 * hole + 2 * axis
        # A link lies between two chips: a box that reaches it ends behind it.
        first, last = (cells[place] + 1) >> 1, cells[place + 1] >> 1
        cells[slot + axis], cells[slot + 3 + axis] = first, last
        ending = walk.cut_tables + 2 * axis * size
        for at in range(walk.extents[axis]):
            others = cells[ending + at] & ~bit
            cells[ending + at] = others | bit if at <= last else others
            others = cells[ending + size + at] & ~bit
            cells[ending + size + at] = others | bit if at >= first else others


@inlined
def _axis(start: int, length: int, latest: int, earliest: int) -> int:
    """Return the number of an axis; 0 is that of a part without chips."""
    return ((start << _BITS | length) << _BITS | latest) << _BITS | earliest


@inlined
def _length(axis: int) -> int:
    return axis >> 2 * _BITS & _MASK


@inlined
def _reaching(walk: Walk, cells: Ints, axis: int, start: int, length: int) -> int:
    """Return the holes that reach into these chips of an axis."""
    ending = walk.cut_tables + 2 * axis * walk.table_size
    beginning, last = ending + walk.table_size, start + length - 1
    wraps = last >= walk.extents[axis]
    behind = cells[ending + start]
    before = cells[beginning + last - (walk.extents[axis] if wraps else 0)]
    return behind | before if wraps else behind & before


@inner_kernel
def cut_mesh(walk: Walk, cells: Ints, least: int, back: int) -> None:
    """Put the largest intact box into `found`, if it has `least` chips and beats that.

    Only boxes are looked at that reach into the hole `back`, which is one no longer, if it is not
    negative.
    """
    for axis in range(3):
        extent, wraps = walk.extents[axis], walk.wrap[axis]
        latest, earliest = 0 if wraps else extent - 1, 0
        if back >= 0:
            place = walk.hole_boxes + 6 * back + 2 * axis
            latest, earliest = (
                (cells[place + 1] >> 1) + (1 if wraps else 0),
                (cells[place] + 1) >> 1,
            )
        whole = _axis(0, extent, latest, earliest)
        cells[walk.cut_parts + axis] = whole | _RING if wraps else whole
    cells[walk.cut_parts + 3] = walk.bits_used
    _cut_up(walk, cells, least)


@inner_kernel
def cut_found(walk: Walk, cells: Ints) -> None:
    """Put the largest intact box inside of `found` into `found`."""
    inside = walk.bits_used
    for axis in range(3):
        start, length = cells[walk.found + axis], cells[walk.found + 3 + axis]
        cells[walk.cut_parts + axis] = _axis(start, length, length - 1, 0)
        inside &= _reaching(walk, cells, axis, start, length)
    cells[walk.cut_parts + 3] = inside
    for place in range(6):
        cells[walk.found + place] = 0
    _cut_up(walk, cells, 1)


@inner_kernel
def _cut_up(walk: Walk, cells: Ints, least: int) -> None:
    """Put the largest box in the first part of `cut_parts` into `found`, if it is better than that.

    Behind that part is a stack of those that wait. A part is cut at its first hole: to look for a
    better one takes longer than it saves.
    """
    # The array is read here and not below, because every write may change what was read before.
    first, size, holes = walk.cut_parts, walk.table_size, walk.cut_holes
    table0 = walk.cut_tables
    table1, table2 = table0 + 2 * size, table0 + 4 * size
    extent0, extent1, extent2 = walk.extents[0], walk.extents[1], walk.extents[2]
    top = first + _PART
    while top > first:
        top -= _PART
        part0, part1, part2, inside = cells[top], cells[top + 1], cells[top + 2], cells[top + 3]
        wide0, wide1, wide2 = _length(part0), _length(part1), _length(part2)
        if wide0 * wide1 * wide2 < least:
            continue
        if inside == 0:
            least = _offer_part(walk, cells, part0, part1, part2)
            continue
        hole = holes + 6 * ((inside & -inside) % _SLOTS)
        hole0, hole1, hole2 = cells[hole], cells[hole + 1], cells[hole + 2]
        last0, last1, last2 = cells[hole + 3], cells[hole + 4], cells[hole + 5]
        rest = (part1, part2, inside, least, table0, size)
        top, part0 = _cut(cells, 0, part0, (hole0, last0, extent0, wide1 * wide2), rest, top)
        rest = (part2, part0, inside, least, table1, size)
        top, part1 = _cut(cells, 1, part1, (hole1, last1, extent1, wide0 * wide2), rest, top)
        rest = (part0, part1, inside, least, table2, size)
        top, _ = _cut(cells, 2, part2, (hole2, last2, extent2, wide0 * wide1), rest, top)


@inner_kernel
def _offer_part(walk: Walk, cells: Ints, part0: int, part1: int, part2: int) -> int:
    """Keep a part without holes in `found` if it is better; return the chips of `found`."""
    box = walk.cut_holes + 6 * _SLOTS
    cells[box], cells[box + 3] = part0 >> 3 * _BITS & _MASK, _length(part0)
    cells[box + 1], cells[box + 4] = part1 >> 3 * _BITS & _MASK, _length(part1)
    cells[box + 2], cells[box + 5] = part2 >> 3 * _BITS & _MASK, _length(part2)
    offer_box(walk, cells, box)
    return chips_of(cells, walk.found)


@inlined
def _push(cells: Ints, axis: int, cut: int, extent: int, rest: Rest, top: int) -> int:
    """Put a part on the stack: one axis is cut, and two stay; return its end."""
    next_part, after_next, inside, _, table, size = rest
    cells[top + axis], cells[top + (axis + 1) % 3], cells[top + (axis + 2) % 3] = (
        cut,
        next_part,
        after_next,
    )
    start, last = cut >> 3 * _BITS & _MASK, (cut >> 3 * _BITS & _MASK) + _length(cut) - 1
    if last >= extent:
        inside &= cells[table + start] | cells[table + size + last - extent]
    else:
        inside &= cells[table + start] & cells[table + size + last]
    cells[top + 3] = inside
    return top + _PART


@inlined
def _cut(
    cells: Ints, axis: int, part: int, hole: HoleOnAxis, rest: Rest, top: int
) -> tuple[int, int]:
    """Put what a cut leaves of a part on the stack if the best box may be in it.

    Returns the end of the stack, and what later axes need to reach on this one.
    """
    if part >= _RING:
        return _cut_ring(cells, axis, part, hole, rest, top)
    return _cut_range(cells, axis, part, hole, rest, top)


@inlined
def _cut_ring(
    cells: Ints, axis: int, part: int, hole: HoleOnAxis, rest: Rest, top: int
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
            top = _push(cells, axis, cut, extent, rest, top)
    return top, part if must_last >= 0 else _RING | _axis(0, extent, last + 1, first)


@inlined
def _cut_range(
    cells: Ints, axis: int, part: int, hole: HoleOnAxis, rest: Rest, top: int
) -> tuple[int, int]:
    first, last, extent, across = hole
    start, length = part >> 3 * _BITS & _MASK, _length(part)
    latest, earliest = part >> _BITS & _MASK, part & _MASK
    around = extent if last < start else 0  # then it lies behind the end of the axis
    first, last = first - start + around, last - start + around
    if (first * across >= rest[3]) & (earliest < first):
        cut = _axis(start, first, min(latest, first - 1), earliest)
        top = _push(cells, axis, cut, extent, rest, top)
    end = min(length, first + extent)  # less if it lies across the start and before the end
    left = end - last - 1
    if (left * across >= rest[3]) & (latest > last) & (earliest < end):
        start_behind = start + last + 1
        start_behind -= extent if start_behind >= extent else 0
        latest_behind, earliest_behind = min(latest - last, left) - 1, max(earliest - last - 1, 0)
        cut = _axis(start_behind, left, latest_behind, earliest_behind)
        top = _push(cells, axis, cut, extent, rest, top)
    kept = _axis(start, length, min(latest, last), max(earliest, first))
    return top, kept if end == length else part


@plain_kernel
def largest_box(walk: Walk, cells: Ints, least: int) -> int:
    """Return the chips of the largest intact box, if it has `least` or more; `found` is that box.

    If not, it returns less than `least`, and `found` is any intact box. Among equals the largest is
    the one whose first chip comes first, then the one of smaller lengths.
    """
    size = chips_of(cells, walk.found)
    if walk.is_hit or walk.came_back >= 0 or walk.none_of > max(size, least):
        if walk.n_holes <= MOST_CUT:
            by_cuts(walk, cells, least)
        else:
            by_sweep(walk, cells)
    return chips_of(cells, walk.found)


@inner_kernel
def forget_box(walk: Walk, cells: Ints) -> None:
    """Begin without holes: the box is the mesh."""
    for axis in range(3):
        cells[walk.found + axis], cells[walk.found + 3 + axis] = 0, walk.extents[axis]
    walk.is_hit, walk.came_back, walk.none_of = 0, -1, walk.n_chips
    walk.bits_used = 0
    cells[walk.bit_of : walk.bit_of + walk.n_all_holes] = 0


@inner_kernel
def note_failure(walk: Walk, cells: Ints, hole: int) -> None:
    """Note that there is a new hole."""
    if is_in(walk, cells, walk.found, walk.hole_boxes + 6 * hole):
        # Others may be as large as `found` was; that they lost to it counts no more.
        walk.is_hit, walk.none_of = 1, max(walk.none_of, chips_of(cells, walk.found) + 1)


@inner_kernel
def note_repair(walk: Walk, cells: Ints, hole: int) -> None:
    """Note that there is a hole less."""
    if walk.came_back >= 0:  # boxes may be larger by two holes: too much to remember
        walk.none_of = walk.n_chips + 1
    walk.came_back = hole
    release_bit(walk, cells, hole)


@inner_kernel
def reaches_into(walk: Walk, cells: Ints, axis: int, start: int, length: int, box_at: int) -> bool:
    """Whether the obstacle at this place of the array reaches into these chips of an axis."""
    first, last = cells[box_at + 2 * axis] - 2 * start, cells[box_at + 2 * axis + 1] - 2 * start
    if last < 0 and walk.wrap[axis]:
        first, last = first + 2 * walk.extents[axis], last + 2 * walk.extents[axis]
    return last >= 0 and first <= 2 * length - 2


@inner_kernel
def is_in(walk: Walk, cells: Ints, box: int, box_at: int) -> bool:
    """Whether an obstacle reaches into a box, which is three starts and three lengths."""
    for axis in range(3):
        if not reaches_into(walk, cells, axis, cells[box + axis], cells[box + 3 + axis], box_at):
            return False
    return True


@plain_kernel
def by_cuts(walk: Walk, cells: Ints, least: int) -> None:
    """Put the largest box into `found`, if it has `least` chips or more, cutting at the holes."""
    tabulate_holes(walk, cells)
    if walk.is_hit:
        cut_found(walk, cells)
    least = max(1, least)
    enough = max(least, chips_of(cells, walk.found))
    cut_mesh(walk, cells, enough, walk.came_back if walk.none_of <= enough else -1)
    walk.is_hit, walk.came_back, walk.none_of = 0, -1, max(least, chips_of(cells, walk.found))


@plain_kernel
def by_sweep(walk: Walk, cells: Ints) -> None:
    """Put the largest box into `found`, looking at every range of axes 0 and 1."""
    extent0, extent1, extent2 = walk.extents[0], walk.extents[1], walk.extents[2]
    wide1, wide2 = 2 * extent1, 2 * extent2
    _paint(walk, cells)
    for place in range(6):
        cells[walk.found + place] = 0
    best, box = 1, walk.cut_parts
    for start0 in range(extent0):
        for length0 in range(1, (extent0 if walk.wrap[0] else extent0 - start0) + 1):
            _add_row(cells, walk.grid, walk.plane, wide1 * wide2, 2 * start0, length0, 2 * extent0)
            if length0 * extent1 * extent2 < best:
                continue
            for start1 in range(extent1):
                most1 = extent1 if walk.wrap[1] else extent1 - start1
                for length1 in range(1, most1 + 1):
                    if length0 * most1 * extent2 < best:
                        break
                    _add_row(cells, walk.plane, walk.line, wide2, 2 * start1, length1, wide1)
                    if length0 * length1 * extent2 < best:
                        continue
                    start2, length2 = _longest_run(walk, cells)
                    cells[box], cells[box + 1], cells[box + 2] = start0, start1, start2
                    cells[box + 3], cells[box + 4], cells[box + 5] = length0, length1, length2
                    offer_box(walk, cells, box)
                    best = max(best, chips_of(cells, walk.found))
    walk.is_hit, walk.came_back, walk.none_of = 0, -1, chips_of(cells, walk.found)


@inner_kernel
def _paint(walk: Walk, cells: Ints) -> None:
    wide1, wide2 = 2 * walk.extents[1], 2 * walk.extents[2]
    for at in range(2 * walk.extents[0] * wide1 * wide2):
        cells[walk.grid + at] = 0
    for i in range(walk.n_holes):
        box = walk.hole_boxes + 6 * cells[walk.holes + i]
        for x in range(cells[box], cells[box + 1] + 1):
            for y in range(cells[box + 2], cells[box + 3] + 1):
                for z in range(cells[box + 4], cells[box + 5] + 1):
                    cells[walk.grid + (x * wide1 + y) * wide2 + z] = 1


@inner_kernel
def _add_row(
    cells: Ints, rows: int, total: int, size: int, start: int, length: int, n_rows: int
) -> None:
    """Add to the first chips of a run the next one: its own row, and the link that leads to it."""
    chip = rows + (start + 2 * length - 2) % n_rows * size
    link = rows + (start + 2 * length - 3) % n_rows * size if length > 1 else chip
    for at in range(size):
        before = cells[total + at] if length > 1 else 0
        cells[total + at] = before | cells[chip + at] | cells[link + at]


@inner_kernel
def _longest_run(walk: Walk, cells: Ints) -> tuple[int, int]:
    """Return the start and length of the longest run of free chips, joined by free links."""
    n_chips, line = walk.extents[2], walk.line
    best_start, best_length, length = 0, 0, 0
    for at in range(2 * n_chips if walk.wrap[2] else n_chips):
        if cells[line + 2 * at % (2 * n_chips)]:
            length = 0
            continue
        if at > 0 and cells[line + (2 * at - 1) % (2 * n_chips)]:
            length = 0
        length += 1
        if length > best_length:
            best_start, best_length = at - length + 1, length
        if best_length == n_chips:
            break
    return best_start % n_chips, best_length
