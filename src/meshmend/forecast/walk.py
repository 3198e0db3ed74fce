"""One answer through one year: what the job does at each failure and at each end of a repair.

All answers are one machine with three settings: what to do with holes (wait, train in the largest
intact box, go on around them), whether spare units fill holes, and after how many holes they do.
"""

from meshmend.forecast.holes import add_hole, is_hit, remove_hole, usable_chips
from meshmend.forecast.intact_box import forget_box, largest_box
from meshmend.forecast.job_time import advance, begin, fall_back, save
from meshmend.forecast.walk_arrays import (
    BETWEEN_FAILURES_NS,
    BOX,
    BOX_NS,
    CHIP_RATE,
    CHIPS,
    COMPUTE_NS,
    CONFIG,
    DEAD,
    DETECT,
    DETECTION_NS,
    DOMAIN_UNITS,
    DOWN_LINKS,
    FIRST_RULE,
    FOUND,
    FULL,
    FULL_NS,
    GO_ON,
    HOLE_AT,
    HOLE_EXTRA_NS,
    HOLES,
    HOLES_BEFORE_SPARES,
    IDLE,
    IN_BOX,
    KEEPS_BATCH,
    N_ALL_HOLES,
    N_CAUSES,
    N_CHIPS,
    N_HOLES,
    N_IDLE,
    N_MESH_DOMAINS,
    N_SLOTS,
    N_UNITS,
    NOWHERE,
    ON_HOLES,
    ON_MESH,
    PHASE,
    RATE,
    RECHECK,
    RECOVER,
    RECOVERY_NS,
    RESTART_NS,
    RUN,
    SHAPE,
    SLOT_UNIT,
    START,
    STOPPED,
    SWITCH_IN_NS,
    UNIT_DOWN,
    UNIT_FIRST,
    UNIT_SLOT,
    UNSAVED_NS,
    UNTIL,
    USES_SPARES,
    WAIT,
    WRITE_NS,
    Floats,
    Ints,
)
from meshmend.kernels import inner_kernel, plain_kernel

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
            own[UNSAVED_NS] = 0  # what was trained before counts for neither side
            own[:N_CAUSES] = 0


@inner_kernel
def _reset(own: Ints, fig: Floats) -> None:
    """Begin with everything alive, every unit in its slot, and the job running."""
    own[:FIRST_RULE] = 0
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
def _take(own: Ints, fig: Floats, domain: int, up: int) -> None:
    """Take in one transition."""
    if own[USES_SPARES]:
        units = own[UNIT_FIRST] + domain
        for at in range(own[units], own[units + 1]):
            _take_unit(own, fig, own[own[DOMAIN_UNITS] + at], up)
    elif domain < own[N_MESH_DOMAINS]:  # the others are of spare units
        if up:
            remove_hole(own, domain)
            _note_repair(own, fig)
        else:
            _note_hole(own, fig, domain, add_hole(own, domain))


@inner_kernel
def _take_unit(own: Ints, fig: Floats, unit: int, up: int) -> None:
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
        _note_hole(own, fig, hole, add_hole(own, hole))


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
def _note_hole(own: Ints, fig: Floats, hole: int, took_any: bool) -> None:
    """Stop the job if it uses what has failed; it takes time to find out what happened."""
    if own[PHASE] == DETECT or own[PHASE] == STOPPED or not is_hit(own, hole, took_any):
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
        usable = usable if usable > 0 else largest_box(own, int(least) - 1)
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
    chips = largest_box(own, 1)
    for place in range(6):
        own[BOX + place] = own[FOUND + place]
    _set_place(own, fig, IN_BOX if chips else NOWHERE, chips)


@inner_kernel
def _set_place(own: Ints, fig: Floats, config: int, chips: int) -> None:
    own[CONFIG], own[CHIPS] = config, chips
    compute, full = fig[COMPUTE_NS], fig[FULL_NS]
    sum_ns = full
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
    if chips == 0:
        fig[CHIP_RATE], fig[RATE] = 0.0, 0.0
    elif own[KEEPS_BATCH]:
        longer = compute * own[N_CHIPS] / chips
        fig[CHIP_RATE] = (compute + full) / (longer + full)
        fig[RATE] = (compute + full) / (longer + sum_ns)
    else:
        fig[CHIP_RATE] = chips / own[N_CHIPS]
        fig[RATE] = fig[CHIP_RATE] * (compute + full) / (compute + sum_ns)
