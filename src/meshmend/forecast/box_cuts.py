"""The largest intact box, found by cutting the mesh at one hole after the other.

A part of the mesh with a hole in it is cut: a box in it that is intact lies before or behind the
hole on one of the axes. Parts that are smaller than the best box so far are dropped.

No box is met twice. What is cut on a later axis need only have boxes that reach into the hole on
all earlier axes, because the others are in the parts that those axes left. So a part knows, for
each axis, where its boxes start at the latest and where they end at the earliest.

Which holes are in a part is a set of bits, one for each hole. Two tables give those that reach into
a range of an axis: the holes that end at a chip or behind it, and those that begin at it or before.
"""

from meshmend.forecast.walk_arrays import (
    CUT_HOLES,
    CUT_PARTS,
    CUT_TABLES,
    FOUND,
    HOLE_BOXES,
    HOLES,
    N_HOLES,
    SHAPE,
    TABLE_SIZE,
    WRAP,
    Ints,
)
from meshmend.kernels import inlined, inner_kernel

_RING = -1  # the start of a range that is a whole axis with the link from its end to its beginning
_ANY = 1 << 40  # as the latest start of a box, and negative as the earliest end: it may be anywhere

# Numbers of a part, those of three axes each: starts, lengths, the latest start and earliest end of
# a box, counted from the start. Of a ring, the last two are the last and first chip of what a box
# has to reach, or negative. Then the holes in it.
_STARTS, _LENGTHS, _LATEST, _EARLIEST, _INSIDE = 0, 3, 6, 9, 12
_PART = 13


@inlined
def chips_of(own: Ints, box: int) -> int:
    """Return the chips of a box, which is three starts and three lengths."""
    return own[box + 3] * own[box + 4] * own[box + 5]


@inner_kernel
def offer_box(own: Ints, box: int) -> None:
    """Keep a box in FOUND if it beats the one there."""
    size, found = chips_of(own, box), chips_of(own, FOUND)
    if size == found:
        for place in range(6):
            if own[box + place] != own[FOUND + place]:
                size -= own[box + place] > own[FOUND + place]
                break
    if size >= found:
        for place in range(6):
            own[FOUND + place] = own[box + place]


@inner_kernel
def tabulate_holes(own: Ints) -> None:
    """Write the places of all holes in chips, and the two tables of each axis."""
    n_holes, size = own[N_HOLES], own[TABLE_SIZE]
    for axis in range(3):
        ending = own[CUT_TABLES] + 2 * axis * size
        beginning, extent = ending + size, own[SHAPE + axis]
        for at in range(ending, ending + 2 * size):
            own[at] = 0
        for i in range(n_holes):
            place = own[HOLE_BOXES] + 6 * own[own[HOLES] + i] + 2 * axis
            # A link lies between two chips: a box that reaches it ends behind it.
            first, last = (own[place] + 1) >> 1, own[place + 1] >> 1
            own[own[CUT_HOLES] + 6 * i + axis] = first
            own[own[CUT_HOLES] + 6 * i + 3 + axis] = last
            own[ending + last] |= 1 << i
            own[beginning + first] |= 1 << i
        for at in range(1, extent):
            own[beginning + at] |= own[beginning + at - 1]
            own[ending + extent - 1 - at] |= own[ending + extent - at]


@inlined
def _reaching(own: Ints, axis: int, start: int, length: int) -> int:
    """Return the holes that reach into these chips of an axis."""
    ending = own[CUT_TABLES] + 2 * axis * own[TABLE_SIZE]
    beginning, last = ending + own[TABLE_SIZE], start + length - 1
    if last >= own[SHAPE + axis]:
        return own[ending + start] | own[beginning + last - own[SHAPE + axis]]
    return own[ending + start] & own[beginning + last]


@inner_kernel
def cut_mesh(own: Ints, least: int, back: int) -> None:
    """Put the largest intact box into FOUND, if it has `least` chips and beats that.

    Only boxes are looked at that reach into the hole `back`, which is one no longer, if it is not
    negative.
    """
    part = own[CUT_PARTS] + _PART
    for axis in range(3):
        own[part + _STARTS + axis] = _RING if own[WRAP + axis] else 0
        own[part + _LENGTHS + axis] = own[SHAPE + axis]
        latest, earliest = -1 if own[WRAP + axis] else _ANY, -_ANY
        if back >= 0:
            place = own[HOLE_BOXES] + 6 * back + 2 * axis
            latest, earliest = own[place + 1] >> 1, (own[place] + 1) >> 1
        own[part + _LATEST + axis], own[part + _EARLIEST + axis] = latest, earliest
    own[part + _INSIDE] = (1 << own[N_HOLES]) - 1
    _cut_up(own, least)


@inner_kernel
def cut_found(own: Ints) -> None:
    """Put the largest intact box inside of FOUND into FOUND."""
    part = own[CUT_PARTS] + _PART
    inside = (1 << own[N_HOLES]) - 1
    for axis in range(3):
        start, length = own[FOUND + axis], own[FOUND + 3 + axis]
        own[part + _STARTS + axis], own[part + _LENGTHS + axis] = start, length
        own[part + _LATEST + axis], own[part + _EARLIEST + axis] = _ANY, -_ANY
        inside &= _reaching(own, axis, start, length)
    own[part + _INSIDE] = inside
    for place in range(6):
        own[FOUND + place] = 0
    _cut_up(own, 1)


@inner_kernel
def _cut_up(own: Ints, least: int) -> None:
    """Put the largest box in the first part that waits into FOUND, if it is better than that.

    The first place of CUT_PARTS is for the part in hand, behind it is a stack of those that wait.
    A part is cut at its first hole: to look for a better one takes longer than it saves.
    """
    hand = own[CUT_PARTS]
    top = hand + 2 * _PART
    while top > hand + _PART:
        top -= _PART
        if chips_of(own, top) < least:
            continue
        inside = own[top + _INSIDE]
        if inside == 0:
            for axis in range(3):
                own[top + axis] = max(0, own[top + axis])
            offer_box(own, top)
            least = chips_of(own, FOUND)
            continue
        for place in range(_PART):
            own[hand + place] = own[top + place]
        hole = 0
        while (inside >> hole) & 1 == 0:
            hole += 1
        wide0, wide1, wide2 = own[hand + 3], own[hand + 4], own[hand + 5]
        top = _cut(own, 0, hole, top, least, wide1 * wide2)
        top = _cut(own, 1, hole, top, least, wide0 * wide2)
        top = _cut(own, 2, hole, top, least, wide0 * wide1)


@inlined
def _cut(own: Ints, axis: int, hole: int, top: int, least: int, across: int) -> int:
    """Put what a cut leaves of the part in hand on the stack if the best box may be in it.

    `across` chips lie side by side. What later axes leave has to reach into the hole on this one.
    Returns the end of the stack.
    """
    place = own[CUT_HOLES] + 6 * hole + axis
    if own[own[CUT_PARTS] + axis] == _RING:
        return _cut_ring(own, axis, own[place], own[place + 3], top, least, across)
    return _cut_range(own, axis, own[place], own[place + 3], top, least, across)


@inlined
def _cut_ring(
    own: Ints, axis: int, first: int, last: int, top: int, least: int, across: int
) -> int:
    hand, extent = own[CUT_PARTS], own[SHAPE + axis]
    start, length = last + 1, extent - (last - first + 1)
    start -= extent if start == extent else 0
    if length * across >= least:
        latest, earliest, must_last = _ANY, -_ANY, own[hand + _LATEST + axis]
        if must_last >= 0:
            latest = must_last - start
            latest += extent if latest < 0 else 0
            earliest = latest - (must_last - own[hand + _EARLIEST + axis])
            if earliest < 0 and earliest + extent < length:  # it reaches in from both ends
                latest, earliest = _ANY, -_ANY
        if earliest < length:
            top = _push(own, axis, start, length, latest, earliest, top)
    if own[hand + _LATEST + axis] < 0:
        own[hand + _LATEST + axis], own[hand + _EARLIEST + axis] = last, first
    return top


@inlined
def _cut_range(
    own: Ints, axis: int, first: int, last: int, top: int, least: int, across: int
) -> int:
    hand, extent = own[CUT_PARTS], own[SHAPE + axis]
    start, length = own[hand + axis], own[hand + _LENGTHS + axis]
    latest, earliest = own[hand + _LATEST + axis], own[hand + _EARLIEST + axis]
    around = extent if last < start else 0  # then it lies behind the end of the axis
    first, last = first - start + around, last - start + around
    if first * across >= least and earliest < first:
        top = _push(own, axis, start, first, latest, earliest, top)
    end = length
    if first < 0:  # it lies across the start, and so perhaps before the end
        end = min(end, first + extent)
    rest = end - last - 1
    if rest * across >= least and latest > last and earliest < end:
        start += last + 1
        start -= extent if start >= extent else 0
        top = _push(own, axis, start, rest, latest - last - 1, earliest - last - 1, top)
    if end == length:
        own[hand + _LATEST + axis] = min(latest, last)
        own[hand + _EARLIEST + axis] = max(earliest, first)
    return top


@inlined
def _push(
    own: Ints, axis: int, start: int, length: int, latest: int, earliest: int, top: int
) -> int:
    """Put these chips of the part in hand on the stack; return its end."""
    hand = own[CUT_PARTS]
    for place in range(_INSIDE):
        own[top + place] = own[hand + place]
    own[top + _STARTS + axis], own[top + _LENGTHS + axis] = start, length
    own[top + _LATEST + axis], own[top + _EARLIEST + axis] = latest, earliest
    own[top + _INSIDE] = own[hand + _INSIDE] & _reaching(own, axis, start, length)
    return top + _PART
