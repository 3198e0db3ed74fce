"""One answer through one year: what the job does at each failure and at each end of a repair.

All answers are one machine with three settings: what to do with holes (wait, train in the largest
intact box, go on around them), whether spare units fill holes, and after how many holes they do.
Where replicas are tiles, only chips in whole tiles train.

Time is whole nanoseconds, each under exactly one cause. A running job trains for an interval, then
writes a checkpoint, and so on. Of the time that it trains, missing chips and a slower sum take
their shares, checks of shares theirs, and slow chips and links theirs. What was trained after the
last finished checkpoint is unsaved; a job that falls back to that checkpoint loses it. Once a chip
is found that computed wrong numbers, any job goes back to the last checkpoint from before that.
"""

import numpy as np

from meshmend.forecast.intact_box import (
    forget_box,
    largest_box,
    note_failure,
    note_repair,
    reaches_into,
)
from meshmend.forecast.machine import Floats, Ints
from meshmend.forecast.outages import FAST, SLOW, UP, WRONG
from meshmend.forecast.tile_count import most_tiles
from meshmend.forecast.walk_arrays import (
    AT_BORDER,
    BETWEEN_FAILURES_NS,
    BOX,
    BOX_NS,
    CHAINS,
    CHECK_RATE,
    CHECK_SHARE,
    CHECKPOINTS,
    CHECKS,
    CHIP_RATE,
    CHIP_SPEED,
    CHIPS,
    COMPUTE_NS,
    CONFIG,
    CUTS,
    CYCLE_NS,
    DEAD,
    DETECT,
    DETECTION,
    DETECTION_NS,
    DOMAIN_UNITS,
    DOWN_LINKS,
    FIRST_RULE,
    FOUND,
    FULL,
    FULL_NS,
    GO_ON,
    HOLE_AT,
    HOLE_BOXES,
    HOLE_CHIPS,
    HOLE_EXTRA_NS,
    HOLE_FIRST,
    HOLE_FLAGS,
    HOLES,
    HOLES_BEFORE_SPARES,
    IDLE,
    IN_BOX,
    INTERVAL_NS,
    IS_LINK,
    IS_RIGHT,
    KEEPS_BATCH,
    LINK_OF,
    LINK_SPEED,
    LOG,
    LOST_WORK,
    MISSING_CHIPS,
    MOST_LOG,
    N_ALL_HOLES,
    N_CAUSES,
    N_CHIPS,
    N_COLOURS,
    N_DEAD,
    N_DOMAINS,
    N_HOLES,
    N_IDLE,
    N_LOG,
    N_MESH_DOMAINS,
    N_SLOTS,
    N_SLOW,
    N_TOUCHING,
    N_UNITS,
    NEIGHBORS,
    NOW,
    NOWHERE,
    ON_HOLES,
    ON_MESH,
    PAIRED_HOLES,
    PART,
    PHASE,
    QUEUE,
    RATE,
    RECHECK,
    RECOVER,
    RECOVERY_NS,
    RESTART,
    RESTART_NS,
    RUN,
    SHAPE,
    SLOT_UNIT,
    SLOW_DOMAINS,
    SLOW_DOWN,
    SLOW_LINK_NS,
    SLOW_PARTS,
    START,
    STOPPED,
    SUM_NS,
    SUM_RATE,
    SUPPORT,
    SUPPORTED,
    SWITCH_IN_NS,
    TILE,
    UNIT_DOWN,
    UNIT_FIRST,
    UNIT_SLOT,
    UNSAVED_NS,
    UNTIL,
    USEFUL,
    USES_SPARES,
    WAIT,
    WAITING,
    WRAP,
    WRITE_NS,
    WRONG_SINCE,
)
from meshmend.kernels import inner_kernel, plain_kernel


@inner_kernel
def advance(own: Ints, fig: Floats, to_ns: int) -> None:
    """Let time pass in which nothing changes, and write it down."""
    passed = to_ns - own[NOW]
    own[NOW] = to_ns
    phase = own[PHASE]
    if phase == RUN:
        _train(own, fig, passed)
    elif phase == DETECT:
        own[DETECTION] += passed
    elif phase == STOPPED:
        own[WAITING] += passed
    else:
        own[RESTART] += passed


@inner_kernel
def _train(own: Ints, fig: Floats, passed: int) -> None:
    interval, before = own[INTERVAL_NS], own[CYCLE_NS]
    whole, since = interval + own[WRITE_NS], before + passed  # since a checkpoint finished
    n_saved = 0
    if since >= whole:
        n_saved = since // whole
        since -= n_saved * whole
    training = n_saved * interval + min(since, interval) - min(before, interval)
    # A rate may be above 1 by the last bit of its division.
    with_chips = min(training, np.int64(np.rint(training * fig[CHIP_RATE])))
    with_sum = min(with_chips, np.int64(np.rint(training * fig[SUM_RATE])))
    with_checks = min(with_sum, np.int64(np.rint(training * fig[CHECK_RATE])))
    useful = min(with_checks, np.int64(np.rint(training * fig[RATE])))
    own[CHECKPOINTS] += passed - training
    own[MISSING_CHIPS] += training - with_chips
    own[SLOW_DOWN] += with_chips - with_sum
    own[CHECKS] += with_sum - with_checks
    own[SLOW_PARTS] += with_checks - useful
    own[USEFUL] += useful
    own[CYCLE_NS] = since
    if n_saved:
        own[UNSAVED_NS] = min(useful, np.int64(np.rint(min(since, interval) * fig[RATE])))
    else:
        own[UNSAVED_NS] += useful


@inner_kernel
def fall_back(own: Ints) -> None:
    """Lose what was trained since the last finished checkpoint."""
    own[LOST_WORK] += own[UNSAVED_NS]
    own[USEFUL] -= own[UNSAVED_NS]
    own[UNSAVED_NS] = 0
    own[CYCLE_NS] = 0


@inner_kernel
def go_back(own: Ints, saved: int) -> None:
    """Lose all that was trained since so much was saved, the checkpoints since then too."""
    if own[USEFUL] > saved:
        own[LOST_WORK] += own[USEFUL] - saved
        own[USEFUL] = saved
        own[UNSAVED_NS] = 0
        own[CYCLE_NS] = 0
    for at in range(own[WRONG_SINCE], own[WRONG_SINCE] + own[N_DOMAINS]):
        if own[at] != IS_RIGHT:
            own[at] = min(own[at], saved)


@inner_kernel
def save(own: Ints) -> None:
    """Keep what was trained: a checkpoint is written before a planned restart."""
    own[UNSAVED_NS] = 0
    own[CYCLE_NS] = 0


@inner_kernel
def begin(own: Ints, fig: Floats, phase: int, for_ns: int) -> None:
    """Begin a phase that lasts so long, or, if that is negative, until something happens."""
    own[PHASE] = phase
    own[UNTIL] = own[NOW] + for_ns if for_ns >= 0 else 2**62
    at = own[N_LOG]
    if at < own[MOST_LOG]:
        fig[LOG + 3 * at] = own[NOW]
        fig[LOG + 3 * at + 1] = phase
        fig[LOG + 3 * at + 2] = fig[RATE] if phase == RUN else 0.0
        own[N_LOG] += 1


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
        n_live = _largest_part(own)
    if own[N_COLOURS] > 1:
        n_live = own[N_COLOURS] * min(n_live // own[N_COLOURS], most_tiles(own))
    return n_live


@inner_kernel
def tiled_box(own: Ints, least: int) -> int:
    """Find the largest box of `least` chips or more; return how many of its chips tiles have."""
    chips = largest_box(own, least)
    if own[N_COLOURS] == 1 or chips == 0:
        return chips
    chips = 1
    for axis in range(3):
        chips *= own[FOUND + 3 + axis] // own[TILE + axis] * own[TILE + axis]
    return chips


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


_WORD = 32  # units whose idleness one number holds as bits


@plain_kernel
def walk_year(
    own: Ints, fig: Floats, events: Ints, n_events: int, start_ns: int, end_ns: int
) -> None:
    """Put where the time between two moments went into the first places of `own`.

    `events` are transitions as `fill_outages` writes them, from time 0 on.
    """
    _reset(own, fig)
    at, is_measuring = 0, False
    while True:
        upto = end_ns if is_measuring else start_ns
        is_event = at < n_events and events[3 * at] < upto
        if is_event:
            upto = events[3 * at]
        while own[UNTIL] <= upto:
            advance(own, fig, own[UNTIL])
            _next_phase(own, fig)
        advance(own, fig, upto)
        if is_event:
            _take(own, fig, events[3 * at + 1], events[3 * at + 2])
            at += 1
        elif is_measuring:
            return
        else:
            is_measuring = True
            for each in range(own[WRONG_SINCE], own[WRONG_SINCE] + own[N_DOMAINS]):
                own[each] -= 0 if own[each] == IS_RIGHT else own[USEFUL]
            own[UNSAVED_NS] = 0  # what was trained before counts for neither side
            own[:N_CAUSES] = 0


@inner_kernel
def _reset(own: Ints, fig: Floats) -> None:
    """Begin with everything alive, every unit in its slot, and the job running."""
    own[:FIRST_RULE] = 0
    own[own[WRONG_SINCE] : own[WRONG_SINCE] + own[N_DOMAINS]] = IS_RIGHT
    own[own[DEAD] : own[DEAD] + own[N_CHIPS]] = 0
    own[own[DOWN_LINKS] : own[DOWN_LINKS] + 3 * own[N_CHIPS]] = 0
    own[own[HOLE_AT] : own[HOLE_AT] + own[N_ALL_HOLES]] = -1
    for unit in range(own[N_UNITS]):
        own[own[UNIT_DOWN] + unit] = 0
        own[own[UNIT_SLOT] + unit] = unit if unit < own[N_SLOTS] else -1
    for slot in range(own[N_SLOTS]):
        own[own[SLOT_UNIT] + slot] = slot
    own[N_IDLE] = 0
    own[own[IDLE] : own[IDLE] + own[N_UNITS] // _WORD + 1] = 0
    for unit in range(own[N_SLOTS], own[N_UNITS]):
        _add_idle(own, unit, 1)
    forget_box(own)
    _choose_place(own, fig)
    begin(own, fig, RUN, -1)


@inner_kernel
def _next_phase(own: Ints, fig: Floats) -> None:
    """Go on from a phase whose time has passed."""
    if own[PHASE] == DETECT:
        _react(own, fig)
        return
    begin(own, fig, RUN, -1)
    if own[RECHECK]:
        own[RECHECK] = 0
        _after_repair(own, fig)


@inner_kernel
def _take(own: Ints, fig: Floats, domain: int, what: int) -> None:
    """Take in one transition."""
    at = own[WRONG_SINCE] + domain
    if what == WRONG:
        own[at] = own[USEFUL] - own[UNSAVED_NS]
        return
    if what in (SLOW, FAST):
        _note_speed(own, domain, what == SLOW)
        _set_rates(own, fig)
        return
    saved, own[at], up = own[at], IS_RIGHT, what == UP
    if own[USES_SPARES]:
        units = own[UNIT_FIRST] + domain
        for unit in range(own[units], own[units + 1]):
            _take_unit(own, fig, own[own[DOMAIN_UNITS] + unit], up, saved)
    elif domain < own[N_MESH_DOMAINS]:  # the others are of spare units
        if up:
            remove_hole(own, domain)
            _note_repair(own, fig)
        else:
            _note_hole(own, fig, domain, add_hole(own, domain), saved)


@inner_kernel
def _note_speed(own: Ints, domain: int, is_slow: bool) -> None:
    """Add a domain to those that are slow, or take it out."""
    first = own[SLOW_DOMAINS]
    if is_slow:
        own[first + own[N_SLOW]] = domain
        own[N_SLOW] += 1
        return
    own[N_SLOW] -= 1
    at = first
    while own[at] != domain:
        at += 1
    own[at] = own[first + own[N_SLOW]]


@inner_kernel
def _is_used(own: Ints, domain: int) -> bool:
    """Whether the job uses a chip or link that lives and is slow."""
    if own[USES_SPARES]:
        unit = own[own[DOMAIN_UNITS] + own[own[UNIT_FIRST] + domain]]
        return own[own[UNIT_SLOT] + unit] >= 0
    if domain >= own[N_MESH_DOMAINS] or not is_hit(own, domain, True):
        return False
    if own[CONFIG] != ON_MESH:
        return True
    if own[own[IS_LINK] + domain] == 0:
        return own[own[DEAD] + own[own[HOLE_CHIPS] + own[own[HOLE_FIRST] + domain]]] == 0
    link = own[own[LINK_OF] + domain]
    chip = link // 3
    other = own[own[NEIGHBORS] + 6 * chip + 2 * (link % 3) + 1]
    n_dead = own[own[DEAD] + chip] + own[own[DEAD] + other]
    return own[own[DOWN_LINKS] + link] == 0 and n_dead == 0


@inner_kernel
def _take_unit(own: Ints, fig: Floats, unit: int, up: bool, saved: int) -> None:
    """Take in that one of the domains of a unit went down or came up."""
    own[own[UNIT_DOWN] + unit] += -1 if up else 1
    if up and own[own[UNIT_DOWN] + unit] == 0:
        # A repaired unit goes back into its own slot if that is empty, else among the spares.
        if unit < own[N_SLOTS] and own[own[SLOT_UNIT] + unit] < 0:
            _fill(own, unit, unit)
        else:
            _add_idle(own, unit, 1)
        _note_repair(own, fig)
    elif not up and own[own[UNIT_DOWN] + unit] == 1:
        slot = own[own[UNIT_SLOT] + unit]
        if slot < 0:
            _add_idle(own, unit, -1)
            return
        own[own[UNIT_SLOT] + unit] = -1
        own[own[SLOT_UNIT] + slot] = -1
        hole = own[N_MESH_DOMAINS] + slot
        _note_hole(own, fig, hole, add_hole(own, hole), saved)


@inner_kernel
def _add_idle(own: Ints, unit: int, n: int) -> None:
    """Add a unit to those that are up and in no slot, or with -1 take it out."""
    own[N_IDLE] += n
    own[own[IDLE] + unit // _WORD] ^= 1 << unit % _WORD


@inner_kernel
def _first_idle(own: Ints) -> int:
    """Return the lowest unit that is idle; there is one."""
    word = 0
    while own[own[IDLE] + word] == 0:
        word += 1
    unit = 0
    while (own[own[IDLE] + word] >> unit) & 1 == 0:
        unit += 1
    return word * _WORD + unit


@inner_kernel
def _fill(own: Ints, slot: int, unit: int) -> None:
    own[own[UNIT_SLOT] + unit] = slot
    own[own[SLOT_UNIT] + slot] = unit
    remove_hole(own, own[N_MESH_DOMAINS] + slot)


@inner_kernel
def _note_hole(own: Ints, fig: Floats, hole: int, took_any: bool, saved: int) -> None:
    """Stop the job if it uses what has failed; it takes time to find out what happened.

    If that was wrong before, the job keeps only what was saved by then.
    """
    if not is_hit(own, hole, took_any):
        return
    if saved != IS_RIGHT:
        go_back(own, saved)
    if own[PHASE] == DETECT or own[PHASE] == STOPPED:
        return
    if own[CONFIG] != ON_MESH:
        fall_back(own)
    begin(own, fig, DETECT, own[DETECTION_NS])


@inner_kernel
def _note_repair(own: Ints, fig: Floats) -> None:
    if own[PHASE] == STOPPED:
        _react(own, fig)
    elif own[PHASE] == RUN:
        _after_repair(own, fig)
    elif own[PHASE] != DETECT:
        own[RECHECK] = 1


@inner_kernel
def _react(own: Ints, fig: Floats) -> None:
    """Decide how a stopped job goes on, and begin that."""
    before = own[CONFIG]
    was_switched = False
    if own[USES_SPARES] and own[N_HOLES] > own[HOLES_BEFORE_SPARES]:
        was_switched = _switch_in(own)
    wait_ns = own[RESTART_NS] + (own[SWITCH_IN_NS] if was_switched else 0)
    _choose_place(own, fig)
    own[RECHECK] = 0
    if own[CONFIG] == NOWHERE:
        fall_back(own)
        begin(own, fig, STOPPED, -1)
    elif before == ON_MESH and own[CONFIG] == ON_MESH and not was_switched:
        begin(own, fig, RECOVER, own[RECOVERY_NS])
    elif before == ON_MESH and was_switched:  # the chips that are left save before they stop
        save(own)
        begin(own, fig, START, wait_ns + own[WRITE_NS])
    else:
        fall_back(own)
        begin(own, fig, START, wait_ns)


@inner_kernel
def _switch_in(own: Ints) -> bool:
    """Fill empty slots with idle units, as far as they go; return whether any was filled."""
    was_filled = False
    while own[N_IDLE] > 0 and own[N_HOLES] > 0:
        hole = own[own[HOLES]]
        for i in range(own[N_HOLES]):
            hole = min(hole, own[own[HOLES] + i])
        unit = _first_idle(own)
        _add_idle(own, unit, -1)
        _fill(own, hole - own[N_MESH_DOMAINS], unit)
        was_filled = True
    return was_filled


@inner_kernel
def _after_repair(own: Ints, fig: Floats) -> None:
    """Let a running job use what came back, where that is worth a pause."""
    if own[CONFIG] == FULL:
        return
    fills = own[USES_SPARES] != 0 and own[N_HOLES] > own[HOLES_BEFORE_SPARES] and own[N_IDLE] > 0
    if own[CONFIG] == ON_MESH and not fills:
        _choose_place(own, fig)
        begin(own, fig, RECOVER, own[RECOVERY_NS])
        return
    pause_ns = own[WRITE_NS] + own[RESTART_NS] + (own[SWITCH_IN_NS] if fills else 0)
    if pause_ns >= own[BETWEEN_FAILURES_NS]:
        return
    usable = own[N_CHIPS]
    if not fills:
        usable = usable_chips(own) if own[ON_HOLES] == GO_ON else 0
        # A box has to have so many chips, but for rounding, to be worth the pause.
        least = own[CHIPS] / (1.0 - pause_ns / own[BETWEEN_FAILURES_NS])
        usable = usable if usable > 0 else tiled_box(own, int(least) - 1)
    if (1.0 - own[CHIPS] / max(1, usable)) * own[BETWEEN_FAILURES_NS] > pause_ns:
        if fills:
            _switch_in(own)
        save(own)
        _choose_place(own, fig)
        begin(own, fig, START, pause_ns)


@inner_kernel
def _choose_place(own: Ints, fig: Floats) -> None:
    """Set where the job runs with the holes as they are, and how fast."""
    if own[ON_HOLES] == WAIT:
        is_whole = own[N_HOLES] == 0
        _set_place(own, fig, FULL if is_whole else NOWHERE, own[N_CHIPS] if is_whole else 0)
        return
    if own[ON_HOLES] == GO_ON:
        usable = usable_chips(own)
        if usable > 0:
            _set_place(own, fig, ON_MESH, usable)
            return
    chips = tiled_box(own, 1)
    for place in range(6):
        own[BOX + place] = own[FOUND + place]
    _set_place(own, fig, IN_BOX if chips else NOWHERE, chips)


@inner_kernel
def _set_place(own: Ints, fig: Floats, config: int, chips: int) -> None:
    own[CONFIG], own[CHIPS] = config, chips
    full = sum_ns = fig[FULL_NS]
    if config == ON_MESH:
        extra = 0
        for i in range(own[N_HOLES]):
            extra += own[own[HOLE_EXTRA_NS] + own[own[HOLES] + i]]
        sum_ns = full + extra
    elif config == IN_BOX:
        spanned = 0
        for axis in range(3):
            if own[BOX + 3 + axis] == own[SHAPE + axis]:
                spanned |= 1 << axis
        sum_ns = fig[BOX_NS + spanned]
    fig[SUM_NS] = sum_ns
    _set_rates(own, fig)


@inner_kernel
def _set_rates(own: Ints, fig: Floats) -> None:
    """Set how fast the job trains where it is, with what is slow there."""
    chips, compute, full, sum_ns = own[CHIPS], fig[COMPUTE_NS], fig[FULL_NS], fig[SUM_NS]
    if chips == 0:
        fig[CHIP_RATE], fig[SUM_RATE], fig[CHECK_RATE], fig[RATE] = 0.0, 0.0, 0.0, 0.0
        return
    checked, step = 1.0 + fig[CHECK_SHARE], compute + full
    longer, part = compute, chips / own[N_CHIPS]  # of a batch that shrinks with the chips
    if own[KEEPS_BATCH]:
        longer, part = compute * own[N_CHIPS] / chips, 1.0
    fig[CHIP_RATE] = part * step / (longer + full)
    fig[SUM_RATE] = part * step / (longer + sum_ns)
    fig[CHECK_RATE] = part * step / (longer * checked + sum_ns)
    fig[RATE] = fig[CHECK_RATE]
    n_chips, n_links = 0, 0
    for i in range(own[N_SLOW]):
        domain = own[own[SLOW_DOMAINS] + i]
        if _is_used(own, domain):
            n_links += own[own[IS_LINK] + domain]
            n_chips += 1 - own[own[IS_LINK] + domain]
    if n_chips > 0:
        is_known = fig[SLOW_LINK_NS] >= 0.0
        all_slow = longer / fig[CHIP_SPEED]
        missing = min(n_chips, chips) * (1.0 - fig[CHIP_SPEED])
        longer = longer * chips / (chips - missing) if is_known else all_slow
    if n_links > 0:
        unknown = sum_ns / fig[LINK_SPEED]
        known = min(unknown, sum_ns + n_links * fig[SLOW_LINK_NS])
        sum_ns = known if fig[SLOW_LINK_NS] >= 0.0 else unknown
    if n_chips + n_links > 0:
        fig[RATE] = part * step / (longer * checked + sum_ns)
