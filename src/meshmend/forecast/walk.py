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

_WORD = 32  # units whose idleness one number holds as bits


@plain_kernel
def walk_year(
    state: Ints, figures: Floats, events: Ints, n_events: int, start_ns: int, end_ns: int
) -> None:
    """Put where the time between two moments went into the first places of `state`.

    `events` are transitions as `fill_outages` writes them, from time 0 on.
    """
    _reset(state, figures)
    at, is_measuring = 0, False
    while True:
        upto = end_ns if is_measuring else start_ns
        is_event = at < n_events and events[3 * at] < upto
        if is_event:
            upto = events[3 * at]
        while state[UNTIL] <= upto:
            advance(state, figures, state[UNTIL])
            _next_phase(state, figures)
        advance(state, figures, upto)
        if is_event:
            _take(state, figures, events[3 * at + 1], events[3 * at + 2])
            at += 1
        elif is_measuring:
            return
        else:
            is_measuring = True
            for each in range(state[WRONG_SINCE], state[WRONG_SINCE] + state[N_DOMAINS]):
                state[each] -= 0 if state[each] == IS_RIGHT else state[USEFUL]
            state[UNSAVED_NS] = 0  # what was trained before counts for neither side
            state[:N_CAUSES] = 0


@inner_kernel
def _reset(state: Ints, figures: Floats) -> None:
    """Begin with everything alive, every unit in its slot, and the job running."""
    state[:FIRST_RULE] = 0
    state[state[WRONG_SINCE] : state[WRONG_SINCE] + state[N_DOMAINS]] = IS_RIGHT
    state[state[DEAD] : state[DEAD] + state[N_CHIPS]] = 0
    state[state[DOWN_LINKS] : state[DOWN_LINKS] + 3 * state[N_CHIPS]] = 0
    state[state[HOLE_AT] : state[HOLE_AT] + state[N_ALL_HOLES]] = -1
    for unit in range(state[N_UNITS]):
        state[state[UNIT_DOWN] + unit] = 0
        state[state[UNIT_SLOT] + unit] = unit if unit < state[N_SLOTS] else -1
    for slot in range(state[N_SLOTS]):
        state[state[SLOT_UNIT] + slot] = slot
    state[N_IDLE] = 0
    state[state[IDLE] : state[IDLE] + state[N_UNITS] // _WORD + 1] = 0
    for unit in range(state[N_SLOTS], state[N_UNITS]):
        _add_idle(state, unit, 1)
    forget_box(state)
    _choose_place(state, figures)
    begin(state, figures, RUN, -1)


@inner_kernel
def _next_phase(state: Ints, figures: Floats) -> None:
    """Go on from a phase whose time has passed."""
    if state[PHASE] == DETECT:
        _react(state, figures)
        return
    begin(state, figures, RUN, -1)
    if state[RECHECK]:
        state[RECHECK] = 0
        _after_repair(state, figures)


@inner_kernel
def _take(state: Ints, figures: Floats, domain: int, what: int) -> None:
    """Take in one transition."""
    at = state[WRONG_SINCE] + domain
    if what == WRONG:
        state[at] = state[USEFUL] - state[UNSAVED_NS]
        return
    if what in (SLOW, FAST):
        _note_speed(state, domain, what == SLOW)
        _set_rates(state, figures)
        return
    saved, state[at], up = state[at], IS_RIGHT, what == UP
    if state[USES_SPARES]:
        units = state[UNIT_FIRST] + domain
        for unit in range(state[units], state[units + 1]):
            _take_unit(state, figures, state[state[DOMAIN_UNITS] + unit], up, saved)
    elif domain < state[N_MESH_DOMAINS]:  # the others are of spare units
        if up:
            remove_hole(state, domain)
            _note_repair(state, figures)
        else:
            _note_hole(state, figures, domain, add_hole(state, domain), saved)


# Time passes.


@inner_kernel
def begin(state: Ints, figures: Floats, phase: int, for_ns: int) -> None:
    """Begin a phase that lasts so long, or, if that is negative, until something happens."""
    state[PHASE] = phase
    state[UNTIL] = state[NOW] + for_ns if for_ns >= 0 else 2**62
    at = state[N_LOG]
    if at < state[MOST_LOG]:
        figures[LOG + 3 * at] = state[NOW]
        figures[LOG + 3 * at + 1] = phase
        figures[LOG + 3 * at + 2] = figures[RATE] if phase == RUN else 0.0
        state[N_LOG] += 1


@inner_kernel
def advance(state: Ints, figures: Floats, to_ns: int) -> None:
    """Let time pass in which nothing changes, and write it down."""
    passed = to_ns - state[NOW]
    state[NOW] = to_ns
    phase = state[PHASE]
    if phase == RUN:
        _train(state, figures, passed)
    elif phase == DETECT:
        state[DETECTION] += passed
    elif phase == STOPPED:
        state[WAITING] += passed
    else:
        state[RESTART] += passed


@inner_kernel
def _train(state: Ints, figures: Floats, passed: int) -> None:
    interval, before = state[INTERVAL_NS], state[CYCLE_NS]
    whole, since = interval + state[WRITE_NS], before + passed  # since a checkpoint finished
    n_saved = 0
    if since >= whole:
        n_saved = since // whole
        since -= n_saved * whole
    training = n_saved * interval + min(since, interval) - min(before, interval)
    # A rate may be above 1 by the last bit of its division.
    with_chips = min(training, np.int64(np.rint(training * figures[CHIP_RATE])))
    with_sum = min(with_chips, np.int64(np.rint(training * figures[SUM_RATE])))
    with_checks = min(with_sum, np.int64(np.rint(training * figures[CHECK_RATE])))
    useful = min(with_checks, np.int64(np.rint(training * figures[RATE])))
    state[CHECKPOINTS] += passed - training
    state[MISSING_CHIPS] += training - with_chips
    state[SLOW_DOWN] += with_chips - with_sum
    state[CHECKS] += with_sum - with_checks
    state[SLOW_PARTS] += with_checks - useful
    state[USEFUL] += useful
    state[CYCLE_NS] = since
    if n_saved:
        state[UNSAVED_NS] = min(useful, np.int64(np.rint(min(since, interval) * figures[RATE])))
    else:
        state[UNSAVED_NS] += useful


@inner_kernel
def fall_back(state: Ints) -> None:
    """Lose what was trained since the last finished checkpoint."""
    state[LOST_WORK] += state[UNSAVED_NS]
    state[USEFUL] -= state[UNSAVED_NS]
    state[UNSAVED_NS] = 0
    state[CYCLE_NS] = 0


@inner_kernel
def go_back(state: Ints, saved: int) -> None:
    """Lose all that was trained since so much was saved, the checkpoints since then too."""
    if state[USEFUL] > saved:
        state[LOST_WORK] += state[USEFUL] - saved
        state[USEFUL] = saved
        state[UNSAVED_NS] = 0
        state[CYCLE_NS] = 0
    for at in range(state[WRONG_SINCE], state[WRONG_SINCE] + state[N_DOMAINS]):
        if state[at] != IS_RIGHT:
            state[at] = min(state[at], saved)


@inner_kernel
def save(state: Ints) -> None:
    """Keep what was trained: a checkpoint is written before a planned restart."""
    state[UNSAVED_NS] = 0
    state[CYCLE_NS] = 0


# What fails and what comes back.


@inner_kernel
def _note_hole(state: Ints, figures: Floats, hole: int, took_any: bool, saved: int) -> None:
    """Stop the job if it uses what has failed; it takes time to find out what happened.

    If that was wrong before, the job keeps only what was saved by then.
    """
    if not is_hit(state, hole, took_any):
        return
    if saved != IS_RIGHT:
        go_back(state, saved)
    if state[PHASE] == DETECT or state[PHASE] == STOPPED:
        return
    if state[CONFIG] != ON_MESH:
        fall_back(state)
    begin(state, figures, DETECT, state[DETECTION_NS])


@inner_kernel
def is_hit(state: Ints, hole: int, took_any: bool) -> bool:
    """Whether a new hole takes away something that the job uses."""
    if state[CONFIG] != IN_BOX:
        return took_any
    for axis in range(3):
        start, length = state[BOX + axis], state[BOX + 3 + axis]
        is_ring = (
            state[WRAP + axis] and length == state[SHAPE + axis]
        )  # which uses its last link too
        if not is_ring and not reaches_into(
            state, axis, start, length, state[HOLE_BOXES] + 6 * hole
        ):
            return False
    return True


@inner_kernel
def add_hole(state: Ints, hole: int) -> bool:
    """Add a hole; return whether it took away anything that was alive.

    An answer that waits need not know where its holes are, and only one that goes on around them
    which chips are alive; both may take a hole for one that took something.
    """
    took_any = True
    if state[ON_HOLES] == GO_ON:
        state[N_TOUCHING] += _n_touching(state, hole)
        took_any = _kill(state, hole)
    state[state[HOLE_AT] + hole] = state[N_HOLES]
    state[state[HOLES] + state[N_HOLES]] = hole
    state[N_HOLES] += 1
    if state[ON_HOLES] != WAIT:
        note_failure(state, hole)
    return took_any


@inner_kernel
def _kill(state: Ints, hole: int) -> bool:
    """Count a hole for its chips and its link; return whether any was alive."""
    newly_dead = 0
    for at in range(state[state[HOLE_FIRST] + hole], state[state[HOLE_FIRST] + hole + 1]):
        dead = state[DEAD] + state[state[HOLE_CHIPS] + at]
        newly_dead += 1 if state[dead] == 0 else 0
        state[dead] += 1
    state[N_DEAD] += newly_dead
    link = state[state[LINK_OF] + hole]
    if link >= 0:
        state[state[DOWN_LINKS] + link] = 1
    return newly_dead > 0 or link >= 0


@inner_kernel
def _note_repair(state: Ints, figures: Floats) -> None:
    if state[PHASE] == STOPPED:
        _react(state, figures)
    elif state[PHASE] == RUN:
        _after_repair(state, figures)
    elif state[PHASE] != DETECT:
        state[RECHECK] = 1


@inner_kernel
def remove_hole(state: Ints, hole: int) -> None:
    """Remove a hole; chips that no other hole covers live again."""
    state[N_HOLES] -= 1
    last, gap = state[state[HOLES] + state[N_HOLES]], state[state[HOLE_AT] + hole]
    state[state[HOLES] + gap] = last
    state[state[HOLE_AT] + last] = gap
    state[state[HOLE_AT] + hole] = -1
    if state[ON_HOLES] != WAIT:
        note_repair(state, hole)
    if state[ON_HOLES] != GO_ON:
        return
    state[N_TOUCHING] -= _n_touching(state, hole)
    for at in range(state[state[HOLE_FIRST] + hole], state[state[HOLE_FIRST] + hole + 1]):
        dead = state[DEAD] + state[state[HOLE_CHIPS] + at]
        state[dead] -= 1
        state[N_DEAD] -= 1 if state[dead] == 0 else 0
    link = state[state[LINK_OF] + hole]
    if link >= 0:
        state[state[DOWN_LINKS] + link] = 0


@inner_kernel
def _take_unit(state: Ints, figures: Floats, unit: int, up: bool, saved: int) -> None:
    """Take in that one of the domains of a unit went down or came up."""
    state[state[UNIT_DOWN] + unit] += -1 if up else 1
    if up and state[state[UNIT_DOWN] + unit] == 0:
        # A repaired unit goes back into its own slot if that is empty, else among the spares.
        if unit < state[N_SLOTS] and state[state[SLOT_UNIT] + unit] < 0:
            _fill(state, unit, unit)
        else:
            _add_idle(state, unit, 1)
        _note_repair(state, figures)
    elif not up and state[state[UNIT_DOWN] + unit] == 1:
        slot = state[state[UNIT_SLOT] + unit]
        if slot < 0:
            _add_idle(state, unit, -1)
            return
        state[state[UNIT_SLOT] + unit] = -1
        state[state[SLOT_UNIT] + slot] = -1
        hole = state[N_MESH_DOMAINS] + slot
        _note_hole(state, figures, hole, add_hole(state, hole), saved)


@inner_kernel
def _add_idle(state: Ints, unit: int, n: int) -> None:
    """Add a unit to those that are up and in no slot, or with -1 take it out."""
    state[N_IDLE] += n
    state[state[IDLE] + unit // _WORD] ^= 1 << unit % _WORD


@inner_kernel
def _first_idle(state: Ints) -> int:
    """Return the lowest unit that is idle; there is one."""
    word = 0
    while state[state[IDLE] + word] == 0:
        word += 1
    unit = 0
    while (state[state[IDLE] + word] >> unit) & 1 == 0:
        unit += 1
    return word * _WORD + unit


@inner_kernel
def _fill(state: Ints, slot: int, unit: int) -> None:
    state[state[UNIT_SLOT] + unit] = slot
    state[state[SLOT_UNIT] + slot] = unit
    remove_hole(state, state[N_MESH_DOMAINS] + slot)


@inner_kernel
def _note_speed(state: Ints, domain: int, is_slow: bool) -> None:
    """Add a domain to those that are slow, or take it out."""
    first = state[SLOW_DOMAINS]
    if is_slow:
        state[first + state[N_SLOW]] = domain
        state[N_SLOW] += 1
        return
    state[N_SLOW] -= 1
    at = first
    while state[at] != domain:
        at += 1
    state[at] = state[first + state[N_SLOW]]


# How the job goes on.


@inner_kernel
def _react(state: Ints, figures: Floats) -> None:
    """Decide how a stopped job goes on, and begin that."""
    before = state[CONFIG]
    was_switched = False
    if state[USES_SPARES] and state[N_HOLES] > state[HOLES_BEFORE_SPARES]:
        was_switched = _switch_in(state)
    wait_ns = state[RESTART_NS] + (state[SWITCH_IN_NS] if was_switched else 0)
    _choose_place(state, figures)
    state[RECHECK] = 0
    if state[CONFIG] == NOWHERE:
        fall_back(state)
        begin(state, figures, STOPPED, -1)
    elif before == ON_MESH and state[CONFIG] == ON_MESH and not was_switched:
        begin(state, figures, RECOVER, state[RECOVERY_NS])
    elif before == ON_MESH and was_switched:  # the chips that are left save before they stop
        save(state)
        begin(state, figures, START, wait_ns + state[WRITE_NS])
    else:
        fall_back(state)
        begin(state, figures, START, wait_ns)


@inner_kernel
def _switch_in(state: Ints) -> bool:
    """Fill empty slots with idle units, as far as they go; return whether any was filled."""
    was_filled = False
    while state[N_IDLE] > 0 and state[N_HOLES] > 0:
        hole = state[state[HOLES]]
        for i in range(state[N_HOLES]):
            hole = min(hole, state[state[HOLES] + i])
        unit = _first_idle(state)
        _add_idle(state, unit, -1)
        _fill(state, hole - state[N_MESH_DOMAINS], unit)
        was_filled = True
    return was_filled


@inner_kernel
def _after_repair(state: Ints, figures: Floats) -> None:
    """Let a running job use what came back, where that is worth a pause."""
    if state[CONFIG] == FULL:
        return
    fills = (
        state[USES_SPARES] != 0
        and state[N_HOLES] > state[HOLES_BEFORE_SPARES]
        and state[N_IDLE] > 0
    )
    if state[CONFIG] == ON_MESH and not fills:
        _choose_place(state, figures)
        begin(state, figures, RECOVER, state[RECOVERY_NS])
        return
    pause_ns = state[WRITE_NS] + state[RESTART_NS] + (state[SWITCH_IN_NS] if fills else 0)
    if pause_ns >= state[BETWEEN_FAILURES_NS]:
        return
    usable = state[N_CHIPS]
    if not fills:
        usable = usable_chips(state) if state[ON_HOLES] == GO_ON else 0
        # A box has to have so many chips, but for rounding, to be worth the pause.
        least = state[CHIPS] / (1.0 - pause_ns / state[BETWEEN_FAILURES_NS])
        usable = usable if usable > 0 else tiled_box(state, int(least) - 1)
    if (1.0 - state[CHIPS] / max(1, usable)) * state[BETWEEN_FAILURES_NS] > pause_ns:
        if fills:
            _switch_in(state)
        save(state)
        _choose_place(state, figures)
        begin(state, figures, START, pause_ns)


@inner_kernel
def _choose_place(state: Ints, figures: Floats) -> None:
    """Set where the job runs with the holes as they are, and how fast."""
    if state[ON_HOLES] == WAIT:
        is_whole = state[N_HOLES] == 0
        _set_place(state, figures, FULL if is_whole else NOWHERE, state[N_CHIPS] if is_whole else 0)
        return
    if state[ON_HOLES] == GO_ON:
        usable = usable_chips(state)
        if usable > 0:
            _set_place(state, figures, ON_MESH, usable)
            return
    chips = tiled_box(state, 1)
    for place in range(6):
        state[BOX + place] = state[FOUND + place]
    _set_place(state, figures, IN_BOX if chips else NOWHERE, chips)


@inner_kernel
def _set_place(state: Ints, figures: Floats, config: int, chips: int) -> None:
    state[CONFIG], state[CHIPS] = config, chips
    full = sum_ns = figures[FULL_NS]
    if config == ON_MESH:
        extra = 0
        for i in range(state[N_HOLES]):
            extra += state[state[HOLE_EXTRA_NS] + state[state[HOLES] + i]]
        sum_ns = full + extra
    elif config == IN_BOX:
        spanned = 0
        for axis in range(3):
            if state[BOX + 3 + axis] == state[SHAPE + axis]:
                spanned |= 1 << axis
        sum_ns = figures[BOX_NS + spanned]
    figures[SUM_NS] = sum_ns
    _set_rates(state, figures)


@inner_kernel
def _set_rates(state: Ints, figures: Floats) -> None:
    """Set how fast the job trains where it is, with what is slow there."""
    chips, compute, full, sum_ns = (
        state[CHIPS],
        figures[COMPUTE_NS],
        figures[FULL_NS],
        figures[SUM_NS],
    )
    if chips == 0:
        figures[CHIP_RATE], figures[SUM_RATE], figures[CHECK_RATE], figures[RATE] = (
            0.0,
            0.0,
            0.0,
            0.0,
        )
        return
    checked, step = 1.0 + figures[CHECK_SHARE], compute + full
    longer, part = compute, chips / state[N_CHIPS]  # of a batch that shrinks with the chips
    if state[KEEPS_BATCH]:
        longer, part = compute * state[N_CHIPS] / chips, 1.0
    figures[CHIP_RATE] = part * step / (longer + full)
    figures[SUM_RATE] = part * step / (longer + sum_ns)
    figures[CHECK_RATE] = part * step / (longer * checked + sum_ns)
    figures[RATE] = figures[CHECK_RATE]
    n_chips, n_links = 0, 0
    for i in range(state[N_SLOW]):
        domain = state[state[SLOW_DOMAINS] + i]
        if _is_used(state, domain):
            n_links += state[state[IS_LINK] + domain]
            n_chips += 1 - state[state[IS_LINK] + domain]
    if n_chips > 0:
        is_known = figures[SLOW_LINK_NS] >= 0.0
        all_slow = longer / figures[CHIP_SPEED]
        missing = min(n_chips, chips) * (1.0 - figures[CHIP_SPEED])
        longer = longer * chips / (chips - missing) if is_known else all_slow
    if n_links > 0:
        unknown = sum_ns / figures[LINK_SPEED]
        known = min(unknown, sum_ns + n_links * figures[SLOW_LINK_NS])
        sum_ns = known if figures[SLOW_LINK_NS] >= 0.0 else unknown
    if n_chips + n_links > 0:
        figures[RATE] = part * step / (longer * checked + sum_ns)


@inner_kernel
def _is_used(state: Ints, domain: int) -> bool:
    """Whether the job uses a chip or link that lives and is slow."""
    if state[USES_SPARES]:
        unit = state[state[DOMAIN_UNITS] + state[state[UNIT_FIRST] + domain]]
        return state[state[UNIT_SLOT] + unit] >= 0
    if domain >= state[N_MESH_DOMAINS] or not is_hit(state, domain, True):
        return False
    if state[CONFIG] != ON_MESH:
        return True
    if state[state[IS_LINK] + domain] == 0:
        return (
            state[state[DEAD] + state[state[HOLE_CHIPS] + state[state[HOLE_FIRST] + domain]]] == 0
        )
    link = state[state[LINK_OF] + domain]
    chip = link // 3
    other = state[state[NEIGHBORS] + 6 * chip + 2 * (link % 3) + 1]
    n_dead = state[state[DEAD] + chip] + state[state[DEAD] + other]
    return state[state[DOWN_LINKS] + link] == 0 and n_dead == 0


# How many chips can go on.


@inner_kernel
def tiled_box(state: Ints, least: int) -> int:
    """Find the largest box of `least` chips or more; return how many of its chips tiles have."""
    chips = largest_box(state, least)
    if state[N_COLOURS] == 1 or chips == 0:
        return chips
    chips = 1
    for axis in range(3):
        chips *= state[FOUND + 3 + axis] // state[TILE + axis] * state[TILE + axis]
    return chips


@inner_kernel
def usable_chips(state: Ints) -> int:
    """Return how many chips can go on around the holes: the largest connected part, or 0.

    It is 0 if the algorithm does not support these holes.
    """
    may_be_cut, n_at_border = False, 0
    for i in range(state[N_HOLES]):
        flags = state[state[HOLE_FLAGS] + state[state[HOLES] + i]]
        if flags & SUPPORTED == 0:
            return 0
        may_be_cut = may_be_cut or flags & CUTS != 0
        n_at_border += 1 if flags & AT_BORDER else 0
    if state[SUPPORT] == PAIRED_HOLES and state[N_HOLES] > 1 and not _has_whole_pair(state):
        return 0
    n_live = state[N_CHIPS] - state[N_DEAD]
    if n_live > 0 and (may_be_cut or _may_cut(state, n_at_border)):
        n_live = _largest_part(state)
    if state[N_COLOURS] > 1:
        n_live = state[N_COLOURS] * min(n_live // state[N_COLOURS], most_tiles(state))
    return n_live


@inner_kernel
def _may_cut(state: Ints, n_at_border: int) -> bool:
    """Whether holes together may cut something off; if not, the mesh is one part.

    What cuts is a chain of holes that lie side by side or corner to corner: from border to border,
    so that two of them are at a border, or closed around something, so that there are four, and on
    three axes six.
    """
    least = 6 if state[SHAPE] > 1 else 4
    if state[N_TOUCHING] < least - 1 and (state[N_TOUCHING] == 0 or n_at_border < 2):
        return False
    for i in range(state[N_HOLES]):
        state[state[CHAINS] + i] = 0
    for i in range(state[N_HOLES]):
        if state[state[CHAINS] + i] == 0 and _chain_may_cut(state, i, least):
            return True
    return False


@inner_kernel
def _chain_may_cut(state: Ints, first: int, least: int) -> bool:
    """Whether the chain of one hole is long enough to cut something off; marks all of the chain."""
    queue = state[CHAINS] + state[N_ALL_HOLES]
    state[queue], state[state[CHAINS] + first] = first, 1
    head, tail, n_at_border = 0, 1, 0
    while head < tail:
        one = state[state[HOLES] + state[queue + head]]
        head += 1
        n_at_border += 1 if state[state[HOLE_FLAGS] + one] & AT_BORDER else 0
        for j in range(state[N_HOLES]):
            if state[state[CHAINS] + j] == 0 and _touch(state, one, state[state[HOLES] + j]):
                state[state[CHAINS] + j] = 1
                state[queue + tail] = j
                tail += 1
    return tail >= least or n_at_border >= 2


@inner_kernel
def _n_touching(state: Ints, hole: int) -> int:
    """Return how many holes lie side by side or corner to corner with this one."""
    n = 0
    for i in range(state[N_HOLES]):
        n += 1 if _touch(state, hole, state[state[HOLES] + i]) else 0
    return n


@inner_kernel
def _touch(state: Ints, one: int, other: int) -> bool:
    for axis in range(3):
        mine, yours = (
            state[HOLE_BOXES] + 6 * one + 2 * axis,
            state[HOLE_BOXES] + 6 * other + 2 * axis,
        )
        first, last = state[mine] - 2, state[mine + 1] + 2
        around = 2 * state[SHAPE + axis] if state[WRAP + axis] else 0
        if not (
            (first <= state[yours + 1] and state[yours] <= last)
            or (
                around > 0 and (first <= state[yours + 1] - around or state[yours] + around <= last)
            )
        ):
            return False
    return True


@inner_kernel
def _has_whole_pair(state: Ints) -> bool:
    """Whether a pair of rows or a pair of columns has no failed chip, as `ft-two-d` needs."""
    n_rows, n_cols = state[SHAPE + 1], state[SHAPE + 2]
    for axis in range(2):
        for pair in range((n_cols if axis else n_rows) // 2):
            is_whole = True
            for at in range(2 * (n_rows if axis else n_cols)):
                line, along = 2 * pair + at % 2, at // 2
                chip = along * n_cols + line if axis else line * n_cols + along
                is_whole = is_whole and state[state[DEAD] + chip] == 0
            if is_whole:
                return True
    return False


@inner_kernel
def _largest_part(state: Ints) -> int:
    """Return the size of the largest connected part of the live chips."""
    for chip in range(state[N_CHIPS]):
        state[state[PART] + chip] = -1 if state[state[DEAD] + chip] else 0
    best = 0
    for first in range(state[N_CHIPS]):
        if state[state[PART] + first] != 0:
            continue
        state[state[PART] + first] = 1
        state[state[QUEUE]] = first
        head, tail = 0, 1
        while head < tail:
            tail = _reach(state, state[state[QUEUE] + head], tail)
            head += 1
        best = max(best, tail)
    return best


@inner_kernel
def _reach(state: Ints, chip: int, tail: int) -> int:
    """Put the live neighbours of a chip that nobody has reached into the queue."""
    for to in range(6):
        other = state[state[NEIGHBORS] + 6 * chip + to]
        if other < 0 or state[state[PART] + other] != 0:
            continue
        link = 3 * (chip if to % 2 else other) + to // 2
        if state[state[DOWN_LINKS] + link] == 0:
            state[state[PART] + other] = 1
            state[state[QUEUE] + tail] = other
            tail += 1
    return tail
