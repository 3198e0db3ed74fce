"""The holes of a mesh at one moment: adding and removing them, and what can run around them."""

from meshmend.forecast.intact_box import note_failure, note_repair, reaches_into
from meshmend.forecast.walk_arrays import (
    AT_BORDER,
    BOX,
    CHAINS,
    CONFIG,
    CUTS,
    DEAD,
    DOWN_LINKS,
    GO_ON,
    HOLE_AT,
    HOLE_BOXES,
    HOLE_CHIPS,
    HOLE_FIRST,
    HOLE_FLAGS,
    HOLES,
    IN_BOX,
    LINK_OF,
    N_ALL_HOLES,
    N_CHIPS,
    N_DEAD,
    N_HOLES,
    N_TOUCHING,
    NEIGHBORS,
    ON_HOLES,
    PAIRED_HOLES,
    PART,
    QUEUE,
    SHAPE,
    SUPPORT,
    SUPPORTED,
    WAIT,
    WRAP,
    Ints,
)
from meshmend.kernels import inner_kernel


@inner_kernel
def add_hole(own: Ints, hole: int) -> bool:
    """Add a hole; return whether it took away anything that was alive.

    An answer that waits need not know where its holes are, and only one that goes on around them
    which chips are alive; both may take a hole for one that took something.
    """
    took_any = True
    if own[ON_HOLES] == GO_ON:
        own[N_TOUCHING] += _n_touching(own, hole)
        took_any = _kill(own, hole)
    own[own[HOLE_AT] + hole] = own[N_HOLES]
    own[own[HOLES] + own[N_HOLES]] = hole
    own[N_HOLES] += 1
    if own[ON_HOLES] != WAIT:
        note_failure(own, hole)
    return took_any


@inner_kernel
def _kill(own: Ints, hole: int) -> bool:
    """Count a hole for its chips and its link; return whether any was alive."""
    newly_dead = 0
    for at in range(own[own[HOLE_FIRST] + hole], own[own[HOLE_FIRST] + hole + 1]):
        dead = own[DEAD] + own[own[HOLE_CHIPS] + at]
        newly_dead += 1 if own[dead] == 0 else 0
        own[dead] += 1
    own[N_DEAD] += newly_dead
    link = own[own[LINK_OF] + hole]
    if link >= 0:
        own[own[DOWN_LINKS] + link] = 1
    return newly_dead > 0 or link >= 0


@inner_kernel
def remove_hole(own: Ints, hole: int) -> None:
    """Remove a hole; chips that no other hole covers live again."""
    own[N_HOLES] -= 1
    last, gap = own[own[HOLES] + own[N_HOLES]], own[own[HOLE_AT] + hole]
    own[own[HOLES] + gap] = last
    own[own[HOLE_AT] + last] = gap
    own[own[HOLE_AT] + hole] = -1
    if own[ON_HOLES] != WAIT:
        note_repair(own, hole)
    if own[ON_HOLES] != GO_ON:
        return
    own[N_TOUCHING] -= _n_touching(own, hole)
    for at in range(own[own[HOLE_FIRST] + hole], own[own[HOLE_FIRST] + hole + 1]):
        dead = own[DEAD] + own[own[HOLE_CHIPS] + at]
        own[dead] -= 1
        own[N_DEAD] -= 1 if own[dead] == 0 else 0
    link = own[own[LINK_OF] + hole]
    if link >= 0:
        own[own[DOWN_LINKS] + link] = 0


@inner_kernel
def is_hit(own: Ints, hole: int, took_any: bool) -> bool:
    """Whether a new hole takes away something that the job uses."""
    if own[CONFIG] != IN_BOX:
        return took_any
    for axis in range(3):
        start, length = own[BOX + axis], own[BOX + 3 + axis]
        is_ring = own[WRAP + axis] and length == own[SHAPE + axis]  # which uses its last link too
        if not is_ring and not reaches_into(own, axis, start, length, own[HOLE_BOXES] + 6 * hole):
            return False
    return True


@inner_kernel
def usable_chips(own: Ints) -> int:
    """Return how many chips can go on around the holes: the largest connected part, or 0.

    It is 0 if the algorithm does not support these holes.
    """
    may_be_cut, n_at_border = False, 0
    for i in range(own[N_HOLES]):
        flags = own[own[HOLE_FLAGS] + own[own[HOLES] + i]]
        if flags & SUPPORTED == 0:
            return 0
        may_be_cut = may_be_cut or flags & CUTS != 0
        n_at_border += 1 if flags & AT_BORDER else 0
    if own[SUPPORT] == PAIRED_HOLES and own[N_HOLES] > 1 and not _has_whole_pair(own):
        return 0
    n_live = own[N_CHIPS] - own[N_DEAD]
    if n_live > 0 and (may_be_cut or _may_cut(own, n_at_border)):
        return _largest_part(own)
    return n_live


@inner_kernel
def _may_cut(own: Ints, n_at_border: int) -> bool:
    """Whether holes together may cut something off; if not, the mesh is one part.

    What cuts is a chain of holes that lie side by side or corner to corner: from border to border,
    so that two of them are at a border, or closed around something, so that there are four, and on
    three axes six.
    """
    least = 6 if own[SHAPE] > 1 else 4
    if own[N_TOUCHING] < least - 1 and (own[N_TOUCHING] == 0 or n_at_border < 2):
        return False
    for i in range(own[N_HOLES]):
        own[own[CHAINS] + i] = 0
    for i in range(own[N_HOLES]):
        if own[own[CHAINS] + i] == 0 and _chain_may_cut(own, i, least):
            return True
    return False


@inner_kernel
def _chain_may_cut(own: Ints, first: int, least: int) -> bool:
    """Whether the chain of one hole is long enough to cut something off; marks all of the chain."""
    queue = own[CHAINS] + own[N_ALL_HOLES]
    own[queue], own[own[CHAINS] + first] = first, 1
    head, tail, n_at_border = 0, 1, 0
    while head < tail:
        one = own[own[HOLES] + own[queue + head]]
        head += 1
        n_at_border += 1 if own[own[HOLE_FLAGS] + one] & AT_BORDER else 0
        for j in range(own[N_HOLES]):
            if own[own[CHAINS] + j] == 0 and _touch(own, one, own[own[HOLES] + j]):
                own[own[CHAINS] + j] = 1
                own[queue + tail] = j
                tail += 1
    return tail >= least or n_at_border >= 2


@inner_kernel
def _n_touching(own: Ints, hole: int) -> int:
    """Return how many holes lie side by side or corner to corner with this one."""
    n = 0
    for i in range(own[N_HOLES]):
        n += 1 if _touch(own, hole, own[own[HOLES] + i]) else 0
    return n


@inner_kernel
def _touch(own: Ints, one: int, other: int) -> bool:
    for axis in range(3):
        mine, yours = own[HOLE_BOXES] + 6 * one + 2 * axis, own[HOLE_BOXES] + 6 * other + 2 * axis
        first, last = own[mine] - 2, own[mine + 1] + 2
        around = 2 * own[SHAPE + axis] if own[WRAP + axis] else 0
        if not (
            (first <= own[yours + 1] and own[yours] <= last)
            or (around > 0 and (first <= own[yours + 1] - around or own[yours] + around <= last))
        ):
            return False
    return True


@inner_kernel
def _has_whole_pair(own: Ints) -> bool:
    """Whether a pair of rows or a pair of columns has no failed chip, as `ft-two-d` needs."""
    n_rows, n_cols = own[SHAPE + 1], own[SHAPE + 2]
    for axis in range(2):
        for pair in range((n_cols if axis else n_rows) // 2):
            is_whole = True
            for at in range(2 * (n_rows if axis else n_cols)):
                line, along = 2 * pair + at % 2, at // 2
                chip = along * n_cols + line if axis else line * n_cols + along
                is_whole = is_whole and own[own[DEAD] + chip] == 0
            if is_whole:
                return True
    return False


@inner_kernel
def _largest_part(own: Ints) -> int:
    """Return the size of the largest connected part of the live chips."""
    for chip in range(own[N_CHIPS]):
        own[own[PART] + chip] = -1 if own[own[DEAD] + chip] else 0
    best = 0
    for first in range(own[N_CHIPS]):
        if own[own[PART] + first] != 0:
            continue
        own[own[PART] + first] = 1
        own[own[QUEUE]] = first
        head, tail = 0, 1
        while head < tail:
            tail = _reach(own, own[own[QUEUE] + head], tail)
            head += 1
        best = max(best, tail)
    return best


@inner_kernel
def _reach(own: Ints, chip: int, tail: int) -> int:
    """Put the live neighbours of a chip that nobody has reached into the queue."""
    for to in range(6):
        other = own[own[NEIGHBORS] + 6 * chip + to]
        if other < 0 or own[own[PART] + other] != 0:
            continue
        link = 3 * (chip if to % 2 else other) + to // 2
        if own[own[DOWN_LINKS] + link] == 0:
            own[own[PART] + other] = 1
            own[own[QUEUE] + tail] = other
            tail += 1
    return tail
