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
from meshmend.forecast.outages import FAST, SLOW, UP, WRONG
from meshmend.forecast.records import Ints
from meshmend.forecast.tile_count import most_tiles
from meshmend.forecast.walk_arrays import (
    AT_BORDER,
    CHECKPOINTS,
    CHECKS,
    CUTS,
    DETECT,
    DETECTION,
    FULL,
    GO_ON,
    IN_BOX,
    IS_RIGHT,
    LOST_WORK,
    MISSING_CHIPS,
    NOWHERE,
    ON_MESH,
    PAIRED_HOLES,
    RECOVER,
    RESTART,
    RUN,
    SLOW_DOWN,
    SLOW_PARTS,
    START,
    STOPPED,
    SUPPORTED,
    USEFUL,
    WAIT,
    WAITING,
    Walk,
)
from meshmend.kernels import inner_kernel, plain_kernel

_WORD = 32  # units whose idleness one number holds as bits


@plain_kernel
def walk_year(
    walk: Walk, cells: Ints, events: Ints, n_events: int, start_ns: int, end_ns: int
) -> None:
    """Put where the time between two moments went into `walk.spent`.

    `events` are transitions as `fill_outages` writes them, from time 0 on.
    """
    _reset(walk, cells)
    at, is_measuring = 0, False
    while True:
        upto = end_ns if is_measuring else start_ns
        is_event = at < n_events and events[3 * at] < upto
        if is_event:
            upto = events[3 * at]
        while walk.until <= upto:
            advance(walk, walk.until)
            _next_phase(walk, cells)
        advance(walk, upto)
        if is_event:
            _take(walk, cells, events[3 * at + 1], events[3 * at + 2])
            at += 1
        elif is_measuring:
            return
        else:
            is_measuring = True
            for each in range(walk.wrong_since, walk.wrong_since + walk.n_domains):
                cells[each] -= 0 if cells[each] == IS_RIGHT else walk.spent[USEFUL]
            walk.unsaved_ns = 0  # what was trained before counts for neither side
            walk.spent[:] = 0


@inner_kernel
def _reset(walk: Walk, cells: Ints) -> None:
    """Begin with everything alive, every unit in its slot, and the job running."""
    walk.spent[:] = 0
    walk.now = walk.cycle_ns = walk.unsaved_ns = walk.recheck = walk.config = walk.chips = 0
    walk.n_holes = walk.n_dead = walk.n_idle = walk.n_slow = walk.n_touching = walk.n_log = 0
    cells[walk.wrong_since : walk.wrong_since + walk.n_domains] = IS_RIGHT
    cells[walk.dead : walk.dead + walk.n_chips] = 0
    cells[walk.down_links : walk.down_links + 3 * walk.n_chips] = 0
    cells[walk.hole_at : walk.hole_at + walk.n_all_holes] = -1
    for unit in range(walk.n_units):
        cells[walk.unit_down + unit] = 0
        cells[walk.unit_slot + unit] = unit if unit < walk.n_slots else -1
    for slot in range(walk.n_slots):
        cells[walk.slot_unit + slot] = slot
    walk.n_idle = 0
    cells[walk.idle : walk.idle + walk.n_units // _WORD + 1] = 0
    for unit in range(walk.n_slots, walk.n_units):
        _add_idle(walk, cells, unit, 1)
    forget_box(walk, cells)
    _choose_place(walk, cells)
    begin(walk, cells, RUN, -1)


@inner_kernel
def _next_phase(walk: Walk, cells: Ints) -> None:
    """Go on from a phase whose time has passed."""
    if walk.phase == DETECT:
        _react(walk, cells)
        return
    begin(walk, cells, RUN, -1)
    if walk.recheck:
        walk.recheck = 0
        _after_repair(walk, cells)


@inner_kernel
def _take(walk: Walk, cells: Ints, domain: int, what: int) -> None:
    """Take in one transition."""
    at = walk.wrong_since + domain
    if what == WRONG:
        cells[at] = walk.spent[USEFUL] - walk.unsaved_ns
        return
    if what in (SLOW, FAST):
        _note_speed(walk, cells, domain, what == SLOW)
        _set_rates(walk, cells)
        return
    saved, cells[at], up = cells[at], IS_RIGHT, what == UP
    if walk.uses_spares:
        units = walk.unit_first + domain
        for unit in range(cells[units], cells[units + 1]):
            _take_unit(walk, cells, cells[walk.domain_units + unit], up, saved)
    elif domain < walk.n_mesh_domains:  # the others are of spare units
        if up:
            remove_hole(walk, cells, domain)
            _note_repair(walk, cells)
        else:
            _note_hole(walk, cells, domain, add_hole(walk, cells, domain), saved)


# Time passes.


@inner_kernel
def begin(walk: Walk, cells: Ints, phase: int, for_ns: int) -> None:
    """Begin a phase that lasts so long, or, if that is negative, until something happens."""
    walk.phase = phase
    walk.until = walk.now + for_ns if for_ns >= 0 else 2**62
    at = walk.n_log
    if at < walk.most_log:
        entry, rate = walk.log + 2 * walk.n_log, walk.rate if phase == RUN else 0.0
        cells[entry], cells[entry + 1] = walk.now, np.float64(rate).view(np.int64)
        walk.n_log += 1


@inner_kernel
def advance(walk: Walk, to_ns: int) -> None:
    """Let time pass in which nothing changes, and write it down."""
    passed = to_ns - walk.now
    walk.now = to_ns
    phase = walk.phase
    if phase == RUN:
        _train(walk, passed)
    elif phase == DETECT:
        walk.spent[DETECTION] += passed
    elif phase == STOPPED:
        walk.spent[WAITING] += passed
    else:
        walk.spent[RESTART] += passed


@inner_kernel
def _train(walk: Walk, passed: int) -> None:
    interval, before = walk.interval_ns, walk.cycle_ns
    whole, since = interval + walk.write_ns, before + passed  # since a checkpoint finished
    n_saved = 0
    if since >= whole:
        n_saved = since // whole
        since -= n_saved * whole
    training = n_saved * interval + min(since, interval) - min(before, interval)
    # A rate may be above 1 by the last bit of its division.
    with_chips = min(training, np.int64(np.rint(training * walk.chip_rate)))
    with_sum = min(with_chips, np.int64(np.rint(training * walk.sum_rate)))
    with_checks = min(with_sum, np.int64(np.rint(training * walk.check_rate)))
    useful = min(with_checks, np.int64(np.rint(training * walk.rate)))
    walk.spent[CHECKPOINTS] += passed - training
    walk.spent[MISSING_CHIPS] += training - with_chips
    walk.spent[SLOW_DOWN] += with_chips - with_sum
    walk.spent[CHECKS] += with_sum - with_checks
    walk.spent[SLOW_PARTS] += with_checks - useful
    walk.spent[USEFUL] += useful
    walk.cycle_ns = since
    if n_saved:
        walk.unsaved_ns = min(useful, np.int64(np.rint(min(since, interval) * walk.rate)))
    else:
        walk.unsaved_ns += useful


@inner_kernel
def fall_back(walk: Walk) -> None:
    """Lose what was trained since the last finished checkpoint."""
    walk.spent[LOST_WORK] += walk.unsaved_ns
    walk.spent[USEFUL] -= walk.unsaved_ns
    walk.unsaved_ns = 0
    walk.cycle_ns = 0


@inner_kernel
def go_back(walk: Walk, cells: Ints, saved: int) -> None:
    """Lose all that was trained since so much was saved, the checkpoints since then too."""
    if walk.spent[USEFUL] > saved:
        walk.spent[LOST_WORK] += walk.spent[USEFUL] - saved
        walk.spent[USEFUL] = saved
        walk.unsaved_ns = 0
        walk.cycle_ns = 0
    for at in range(walk.wrong_since, walk.wrong_since + walk.n_domains):
        if cells[at] != IS_RIGHT:
            cells[at] = min(cells[at], saved)


@inner_kernel
def save(walk: Walk) -> None:
    """Keep what was trained: a checkpoint is written before a planned restart."""
    walk.unsaved_ns = 0
    walk.cycle_ns = 0


# What fails and what comes back.


@inner_kernel
def _note_hole(walk: Walk, cells: Ints, hole: int, took_any: bool, saved: int) -> None:
    """Stop the job if it uses what has failed; it takes time to find out what happened.

    If that was wrong before, the job keeps only what was saved by then.
    """
    if not is_hit(walk, cells, hole, took_any):
        return
    if saved != IS_RIGHT:
        go_back(walk, cells, saved)
    if walk.phase == DETECT or walk.phase == STOPPED:
        return
    if walk.config != ON_MESH:
        fall_back(walk)
    begin(walk, cells, DETECT, walk.detection_ns)


@inner_kernel
def is_hit(walk: Walk, cells: Ints, hole: int, took_any: bool) -> bool:
    """Whether a new hole takes away something that the job uses."""
    if walk.config != IN_BOX:
        return took_any
    for axis in range(3):
        start, length = cells[walk.box + axis], cells[walk.box + 3 + axis]
        is_ring = walk.wrap[axis] and length == walk.extents[axis]  # which uses its last link too
        if not is_ring and not reaches_into(
            walk, cells, axis, start, length, walk.hole_boxes + 6 * hole
        ):
            return False
    return True


@inner_kernel
def add_hole(walk: Walk, cells: Ints, hole: int) -> bool:
    """Add a hole; return whether it took away anything that was alive.

    An answer that waits need not know where its holes are, and only one that goes on around them
    which chips are alive; both may take a hole for one that took something.
    """
    took_any = True
    if walk.on_holes == GO_ON:
        walk.n_touching += _n_touching(walk, cells, hole)
        took_any = _kill(walk, cells, hole)
    cells[walk.hole_at + hole] = walk.n_holes
    cells[walk.holes + walk.n_holes] = hole
    walk.n_holes += 1
    if walk.on_holes != WAIT:
        note_failure(walk, cells, hole)
    return took_any


@inner_kernel
def _kill(walk: Walk, cells: Ints, hole: int) -> bool:
    """Count a hole for its chips and its link; return whether any was alive."""
    newly_dead = 0
    for at in range(cells[walk.hole_first + hole], cells[walk.hole_first + hole + 1]):
        dead = walk.dead + cells[walk.hole_chips + at]
        newly_dead += 1 if cells[dead] == 0 else 0
        cells[dead] += 1
    walk.n_dead += newly_dead
    link = cells[walk.link_of + hole]
    if link >= 0:
        cells[walk.down_links + link] = 1
    return newly_dead > 0 or link >= 0


@inner_kernel
def _note_repair(walk: Walk, cells: Ints) -> None:
    if walk.phase == STOPPED:
        _react(walk, cells)
    elif walk.phase == RUN:
        _after_repair(walk, cells)
    elif walk.phase != DETECT:
        walk.recheck = 1


@inner_kernel
def remove_hole(walk: Walk, cells: Ints, hole: int) -> None:
    """Remove a hole; chips that no other hole covers live again."""
    walk.n_holes -= 1
    last, gap = cells[walk.holes + walk.n_holes], cells[walk.hole_at + hole]
    cells[walk.holes + gap] = last
    cells[walk.hole_at + last] = gap
    cells[walk.hole_at + hole] = -1
    if walk.on_holes != WAIT:
        note_repair(walk, cells, hole)
    if walk.on_holes != GO_ON:
        return
    walk.n_touching -= _n_touching(walk, cells, hole)
    for at in range(cells[walk.hole_first + hole], cells[walk.hole_first + hole + 1]):
        dead = walk.dead + cells[walk.hole_chips + at]
        cells[dead] -= 1
        walk.n_dead -= 1 if cells[dead] == 0 else 0
    link = cells[walk.link_of + hole]
    if link >= 0:
        cells[walk.down_links + link] = 0


@inner_kernel
def _take_unit(walk: Walk, cells: Ints, unit: int, up: bool, saved: int) -> None:
    """Take in that one of the domains of a unit went down or came up."""
    cells[walk.unit_down + unit] += -1 if up else 1
    if up and cells[walk.unit_down + unit] == 0:
        # A repaired unit goes back into its own slot if that is empty, else among the spares.
        if unit < walk.n_slots and cells[walk.slot_unit + unit] < 0:
            _fill(walk, cells, unit, unit)
        else:
            _add_idle(walk, cells, unit, 1)
        _note_repair(walk, cells)
    elif not up and cells[walk.unit_down + unit] == 1:
        slot = cells[walk.unit_slot + unit]
        if slot < 0:
            _add_idle(walk, cells, unit, -1)
            return
        cells[walk.unit_slot + unit] = -1
        cells[walk.slot_unit + slot] = -1
        hole = walk.n_mesh_domains + slot
        _note_hole(walk, cells, hole, add_hole(walk, cells, hole), saved)


@inner_kernel
def _add_idle(walk: Walk, cells: Ints, unit: int, n: int) -> None:
    """Add a unit to those that are up and in no slot, or with -1 take it out."""
    walk.n_idle += n
    cells[walk.idle + unit // _WORD] ^= 1 << unit % _WORD


@inner_kernel
def _first_idle(walk: Walk, cells: Ints) -> int:
    """Return the lowest unit that is idle; there is one."""
    word = 0
    while cells[walk.idle + word] == 0:
        word += 1
    unit = 0
    while (cells[walk.idle + word] >> unit) & 1 == 0:
        unit += 1
    return word * _WORD + unit


@inner_kernel
def _fill(walk: Walk, cells: Ints, slot: int, unit: int) -> None:
    cells[walk.unit_slot + unit] = slot
    cells[walk.slot_unit + slot] = unit
    remove_hole(walk, cells, walk.n_mesh_domains + slot)


@inner_kernel
def _note_speed(walk: Walk, cells: Ints, domain: int, is_slow: bool) -> None:
    """Add a domain to those that are slow, or take it out."""
    first = walk.slow_domains
    if is_slow:
        cells[first + walk.n_slow] = domain
        walk.n_slow += 1
        return
    walk.n_slow -= 1
    at = first
    while cells[at] != domain:
        at += 1
    cells[at] = cells[first + walk.n_slow]


# How the job goes on.


@inner_kernel
def _react(walk: Walk, cells: Ints) -> None:
    """Decide how a stopped job goes on, and begin that."""
    before = walk.config
    was_switched = False
    if walk.uses_spares and walk.n_holes > walk.holes_before_spares:
        was_switched = _switch_in(walk, cells)
    wait_ns = walk.restart_ns + (walk.switch_in_ns if was_switched else 0)
    _choose_place(walk, cells)
    walk.recheck = 0
    if walk.config == NOWHERE:
        fall_back(walk)
        begin(walk, cells, STOPPED, -1)
    elif before == ON_MESH and walk.config == ON_MESH and not was_switched:
        begin(walk, cells, RECOVER, walk.recovery_ns)
    elif before == ON_MESH and was_switched:  # the chips that are left save before they stop
        save(walk)
        begin(walk, cells, START, wait_ns + walk.write_ns)
    else:
        fall_back(walk)
        begin(walk, cells, START, wait_ns)


@inner_kernel
def _switch_in(walk: Walk, cells: Ints) -> bool:
    """Fill empty slots with idle units, as far as they go; return whether any was filled."""
    was_filled = False
    while walk.n_idle > 0 and walk.n_holes > 0:
        hole = cells[walk.holes]
        for i in range(walk.n_holes):
            hole = min(hole, cells[walk.holes + i])
        unit = _first_idle(walk, cells)
        _add_idle(walk, cells, unit, -1)
        _fill(walk, cells, hole - walk.n_mesh_domains, unit)
        was_filled = True
    return was_filled


@inner_kernel
def _after_repair(walk: Walk, cells: Ints) -> None:
    """Let a running job use what came back, where that is worth a pause."""
    if walk.config == FULL:
        return
    fills = walk.uses_spares != 0 and walk.n_holes > walk.holes_before_spares and walk.n_idle > 0
    if walk.config == ON_MESH and not fills:
        _choose_place(walk, cells)
        begin(walk, cells, RECOVER, walk.recovery_ns)
        return
    pause_ns = walk.write_ns + walk.restart_ns + (walk.switch_in_ns if fills else 0)
    if pause_ns >= walk.between_failures_ns:
        return
    usable = walk.n_chips
    if not fills:
        usable = usable_chips(walk, cells) if walk.on_holes == GO_ON else 0
        # A box has to have so many chips, but for rounding, to be worth the pause.
        least = walk.chips / (1.0 - pause_ns / walk.between_failures_ns)
        usable = usable if usable > 0 else tiled_box(walk, cells, int(least) - 1)
    if (1.0 - walk.chips / max(1, usable)) * walk.between_failures_ns > pause_ns:
        if fills:
            _switch_in(walk, cells)
        save(walk)
        _choose_place(walk, cells)
        begin(walk, cells, START, pause_ns)


@inner_kernel
def _choose_place(walk: Walk, cells: Ints) -> None:
    """Set where the job runs with the holes as they are, and how fast."""
    if walk.on_holes == WAIT:
        is_whole = walk.n_holes == 0
        _set_place(walk, cells, FULL if is_whole else NOWHERE, walk.n_chips if is_whole else 0)
        return
    if walk.on_holes == GO_ON:
        usable = usable_chips(walk, cells)
        if usable > 0:
            _set_place(walk, cells, ON_MESH, usable)
            return
    chips = tiled_box(walk, cells, 1)
    for place in range(6):
        cells[walk.box + place] = cells[walk.found + place]
    _set_place(walk, cells, IN_BOX if chips else NOWHERE, chips)


@inner_kernel
def _set_place(walk: Walk, cells: Ints, config: int, chips: int) -> None:
    walk.config, walk.chips = config, chips
    full = sum_ns = walk.full_ns
    if config == ON_MESH:
        extra = 0
        for i in range(walk.n_holes):
            extra += cells[walk.hole_extra_ns + cells[walk.holes + i]]
        sum_ns = full + extra
    elif config == IN_BOX:
        spanned = 0
        for axis in range(3):
            if cells[walk.box + 3 + axis] == walk.extents[axis]:
                spanned |= 1 << axis
        sum_ns = walk.box_ns[spanned]
    walk.sum_ns = sum_ns
    _set_rates(walk, cells)


@inner_kernel
def _set_rates(walk: Walk, cells: Ints) -> None:
    """Set how fast the job trains where it is, with what is slow there."""
    chips, compute, full, sum_ns = (
        walk.chips,
        walk.compute_ns,
        walk.full_ns,
        walk.sum_ns,
    )
    if chips == 0:
        walk.chip_rate, walk.sum_rate, walk.check_rate, walk.rate = (
            0.0,
            0.0,
            0.0,
            0.0,
        )
        return
    checked, step = 1.0 + walk.check_share, compute + full
    longer, part = compute, chips / walk.n_chips  # of a batch that shrinks with the chips
    if walk.keeps_batch:
        longer, part = compute * walk.n_chips / chips, 1.0
    walk.chip_rate = part * step / (longer + full)
    walk.sum_rate = part * step / (longer + sum_ns)
    walk.check_rate = part * step / (longer * checked + sum_ns)
    walk.rate = walk.check_rate
    n_chips, n_links = 0, 0
    for i in range(walk.n_slow):
        domain = cells[walk.slow_domains + i]
        if _is_used(walk, cells, domain):
            n_links += cells[walk.is_link + domain]
            n_chips += 1 - cells[walk.is_link + domain]
    if n_chips > 0:
        is_known = walk.slow_link_ns >= 0.0
        all_slow = longer / walk.chip_speed
        missing = min(n_chips, chips) * (1.0 - walk.chip_speed)
        longer = longer * chips / (chips - missing) if is_known else all_slow
    if n_links > 0:
        unknown = sum_ns / walk.link_speed
        known = min(unknown, sum_ns + n_links * walk.slow_link_ns)
        sum_ns = known if walk.slow_link_ns >= 0.0 else unknown
    if n_chips + n_links > 0:
        walk.rate = part * step / (longer * checked + sum_ns)


@inner_kernel
def _is_used(walk: Walk, cells: Ints, domain: int) -> bool:
    """Whether the job uses a chip or link that lives and is slow."""
    if walk.uses_spares:
        unit = cells[walk.domain_units + cells[walk.unit_first + domain]]
        return cells[walk.unit_slot + unit] >= 0
    if domain >= walk.n_mesh_domains or not is_hit(walk, cells, domain, True):
        return False
    if walk.config != ON_MESH:
        return True
    if cells[walk.is_link + domain] == 0:
        return cells[walk.dead + cells[walk.hole_chips + cells[walk.hole_first + domain]]] == 0
    link = cells[walk.link_of + domain]
    chip = link // 3
    other = cells[walk.neighbors + 6 * chip + 2 * (link % 3) + 1]
    n_dead = cells[walk.dead + chip] + cells[walk.dead + other]
    return cells[walk.down_links + link] == 0 and n_dead == 0


# How many chips can go on.


@inner_kernel
def tiled_box(walk: Walk, cells: Ints, least: int) -> int:
    """Find the largest box of `least` chips or more; return how many of its chips tiles have."""
    chips = largest_box(walk, cells, least)
    if walk.n_colours == 1 or chips == 0:
        return chips
    chips = 1
    for axis in range(3):
        chips *= cells[walk.found + 3 + axis] // walk.tile[axis] * walk.tile[axis]
    return chips


@inner_kernel
def usable_chips(walk: Walk, cells: Ints) -> int:
    """Return how many chips can go on around the holes: the largest connected part, or 0.

    It is 0 if the algorithm does not support these holes.
    """
    may_be_cut, n_at_border = False, 0
    for i in range(walk.n_holes):
        flags = cells[walk.hole_flags + cells[walk.holes + i]]
        if flags & SUPPORTED == 0:
            return 0
        may_be_cut = may_be_cut or flags & CUTS != 0
        n_at_border += 1 if flags & AT_BORDER else 0
    if walk.support == PAIRED_HOLES and walk.n_holes > 1 and not _has_whole_pair(walk, cells):
        return 0
    n_live = walk.n_chips - walk.n_dead
    if n_live > 0 and (may_be_cut or _may_cut(walk, cells, n_at_border)):
        n_live = _largest_part(walk, cells)
    if walk.n_colours > 1:
        n_live = walk.n_colours * min(n_live // walk.n_colours, most_tiles(walk, cells))
    return n_live


@inner_kernel
def _may_cut(walk: Walk, cells: Ints, n_at_border: int) -> bool:
    """Whether holes together may cut something off; if not, the mesh is one part.

    What cuts is a chain of holes that lie side by side or corner to corner: from border to border,
    so that two of them are at a border, or closed around something, so that there are four, and on
    three axes six.
    """
    least = 6 if walk.extents[0] > 1 else 4
    if walk.n_touching < least - 1 and (walk.n_touching == 0 or n_at_border < 2):
        return False
    for i in range(walk.n_holes):
        cells[walk.chains + i] = 0
    for i in range(walk.n_holes):
        if cells[walk.chains + i] == 0 and _chain_may_cut(walk, cells, i, least):
            return True
    return False


@inner_kernel
def _chain_may_cut(walk: Walk, cells: Ints, first: int, least: int) -> bool:
    """Whether the chain of one hole is long enough to cut something off; marks all of the chain."""
    queue = walk.chains + walk.n_all_holes
    cells[queue], cells[walk.chains + first] = first, 1
    head, tail, n_at_border = 0, 1, 0
    while head < tail:
        one = cells[walk.holes + cells[queue + head]]
        head += 1
        n_at_border += 1 if cells[walk.hole_flags + one] & AT_BORDER else 0
        for j in range(walk.n_holes):
            if cells[walk.chains + j] == 0 and _touch(walk, cells, one, cells[walk.holes + j]):
                cells[walk.chains + j] = 1
                cells[queue + tail] = j
                tail += 1
    return tail >= least or n_at_border >= 2


@inner_kernel
def _n_touching(walk: Walk, cells: Ints, hole: int) -> int:
    """Return how many holes lie side by side or corner to corner with this one."""
    n = 0
    for i in range(walk.n_holes):
        n += 1 if _touch(walk, cells, hole, cells[walk.holes + i]) else 0
    return n


@inner_kernel
def _touch(walk: Walk, cells: Ints, one: int, other: int) -> bool:
    for axis in range(3):
        mine, yours = (
            walk.hole_boxes + 6 * one + 2 * axis,
            walk.hole_boxes + 6 * other + 2 * axis,
        )
        first, last = cells[mine] - 2, cells[mine + 1] + 2
        around = 2 * walk.extents[axis] if walk.wrap[axis] else 0
        if not (
            (first <= cells[yours + 1] and cells[yours] <= last)
            or (
                around > 0 and (first <= cells[yours + 1] - around or cells[yours] + around <= last)
            )
        ):
            return False
    return True


@inner_kernel
def _has_whole_pair(walk: Walk, cells: Ints) -> bool:
    """Whether a pair of rows or a pair of columns has no failed chip, as `ft-two-d` needs."""
    n_rows, n_cols = walk.extents[1], walk.extents[2]
    for axis in range(2):
        for pair in range((n_cols if axis else n_rows) // 2):
            is_whole = True
            for at in range(2 * (n_rows if axis else n_cols)):
                line, along = 2 * pair + at % 2, at // 2
                chip = along * n_cols + line if axis else line * n_cols + along
                is_whole = is_whole and cells[walk.dead + chip] == 0
            if is_whole:
                return True
    return False


@inner_kernel
def _largest_part(walk: Walk, cells: Ints) -> int:
    """Return the size of the largest connected part of the live chips."""
    for chip in range(walk.n_chips):
        cells[walk.part + chip] = -1 if cells[walk.dead + chip] else 0
    best = 0
    for first in range(walk.n_chips):
        if cells[walk.part + first] != 0:
            continue
        cells[walk.part + first] = 1
        cells[walk.queue] = first
        head, tail = 0, 1
        while head < tail:
            tail = _reach(walk, cells, cells[walk.queue + head], tail)
            head += 1
        best = max(best, tail)
    return best


@inner_kernel
def _reach(walk: Walk, cells: Ints, chip: int, tail: int) -> int:
    """Put the live neighbours of a chip that nobody has reached into the queue."""
    for to in range(6):
        other = cells[walk.neighbors + 6 * chip + to]
        if other < 0 or cells[walk.part + other] != 0:
            continue
        link = 3 * (chip if to % 2 else other) + to // 2
        if cells[walk.down_links + link] == 0:
            cells[walk.part + other] = 1
            cells[walk.queue + tail] = other
            tail += 1
    return tail
