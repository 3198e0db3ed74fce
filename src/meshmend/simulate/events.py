"""The event loop: messages on channels, in whole ticks of time. `engine` states the rules.

Every delay that occurs is one of few: to hold a channel, to hold it and travel, to travel, to
add up, each for a handful of message sizes. Events of one delay are posted in order of time,
so each delay has a queue, first in first out, and the only heap of events is one over the
delays. What waits for a channel is a pairing heap. Queues, heaps and lists are linked through
one pool of nodes, of which a message in flight has one; node c is channel c's own, for its
release.

Nothing here makes an array, so Numba need not count references to them: `_nrt=False` says so,
and the loop takes a fifth of the time. Kernels take arrays one by one, many as they are: whole
tuples of them would be copied at every call.
"""

from typing import Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from meshmend.simulate.program import (
    COUNTED_WRITE,
    DONE_AT,
    DONE_STOP,
    FIRST_HOP,
    LEFT_AT,
    PHASE,
    REDUCE_AT,
    SEND,
    SIZE_CLASS,
    WRITE_SLOT,
    Tables,
    channel_of,
)

_kernel = njit(cache=True, _nrt=False)  # type: ignore[call-overload]  # not in Numba's stubs

NOTHING: Final = -1  # no node
ROW_BITS: Final = 0xFFFFFFFF

# Columns of State.nodes. A node is posted with a time, or sits in a heap with a child.
TIME: Final = 0
CHILD: Final = 0
KEY: Final = 1  # slice << 32 | row: the smaller goes first
HOP: Final = 2
LEAVING: Final = 2  # of a channel's own node: what its release sets off, start << 32 | stop
NEXT: Final = 3

# Columns of State.delays: a delay, its queue of events, and one place of the heap of delays.
TICKS: Final = 0
FIRST: Final = 1
LAST: Final = 2
HEAP: Final = 3

# Kinds of delays, in this order for each size class; a hop's travel is the last delay of all.
RELEASE: Final = 0
ARRIVE: Final = 1
ADDED: Final = 2
N_KINDS: Final = 3

# Columns of State.channels. Rows that wait for nothing are ready at once in all slices: a
# cursor walks through them from START_AT to START_STOP, slice after slice.
WAITING: Final = 0  # the heap of what else waits
DOING: Final = 1  # IDLE, CHOOSING or BUSY
BUSY_TICKS: Final = 2
CURSOR: Final = 3
CURSOR_SLICE: Final = 4
START_AT: Final = 5
START_STOP: Final = 6
TO_CHOOSE: Final = 7  # one place of the list of channels that are to choose
IDLE: Final = 0
CHOOSING: Final = 1
BUSY: Final = 2

# Columns of State.chips: the queue of what waits to be added up (FIRST and LAST as above),
# whether the chip adds, and one place of the list of chips just freed.
ADDING: Final = 0
FREED: Final = 3

# Places in State.clock.
NOW: Final = 0
N_SLICES: Final = 1
N_DONE: Final = 2
N_NODES: Final = 3
FREE_NODES: Final = 4  # the list of nodes given back
IN_PLACE: Final = 5  # the list of messages whose successors are to be set off
TO_ADD: Final = 6  # the heap of messages that are to be added up as of now
N_TO_CHOOSE: Final = 7
N_FREED: Final = 8
N_POSTED: Final = 9  # how many delays have events
N_TRACED: Final = 10
CHIPS_LIMIT: Final = 11  # whether adding up takes time
N_CLOCK: Final = 12


class State(NamedTuple):
    """What the event loop changes."""

    clock: NDArray[np.int64]
    nodes: NDArray[np.int64]
    delays: NDArray[np.int64]
    channels: NDArray[np.int64]
    chips: NDArray[np.int64]
    counters: NDArray[np.int32]  # what each slot of each slice still waits for
    phases: NDArray[np.int64]  # first start and last end; the last row is for rows of no phase
    trace: NDArray[np.int64]  # key, channel and start of every hop, or empty: not wanted


@_kernel
def run(tables: Tables, state: State, until_done: int) -> int:
    """Go on until this many messages are done; return how many are."""
    rows, hops, after = tables.rows, tables.hops, tables.after
    slot_row, start_rows = tables.slot_row, tables.start_rows
    clock, nodes, delays, channels = state.clock, state.nodes, state.delays, state.channels
    chips, counters, phases, trace = state.chips, state.counters, state.phases, state.trace
    while True:
        for at in range(clock[N_TO_CHOOSE]):
            channel = channels[at, TO_CHOOSE]
            node = _first_waiting(clock, nodes, channels, rows, start_rows, channel)
            if node == NOTHING:
                channels[channel, DOING] = IDLE
            else:
                channels[channel, DOING] = BUSY
                _start(clock, nodes, delays, channels, rows, hops, phases, trace, channel, node)
        clock[N_TO_CHOOSE] = 0
        if clock[CHIPS_LIMIT]:
            _add_up(clock, nodes, delays, chips, rows)
        if clock[N_POSTED] == 0 or clock[N_DONE] >= until_done:
            n_done: int = clock[N_DONE]
            return n_done
        now = nodes[delays[delays[0, HEAP], FIRST], TIME]
        clock[NOW] = now
        while clock[N_POSTED] > 0 and nodes[delays[delays[0, HEAP], FIRST], TIME] == now:
            delay = _pop_delay(clock, nodes, delays)
            node = delays[delay, FIRST]
            while node != NOTHING and nodes[node, TIME] == now:
                following = nodes[node, NEXT]
                if delay == len(delays) - 1:
                    _wait(clock, nodes, channels, hops, node)
                elif delay % N_KINDS == ARRIVE:
                    _arrive(clock, nodes, counters, rows, len(slot_row), node)
                elif delay % N_KINDS == ADDED:
                    _added(clock, nodes, chips, rows, node)
                else:
                    _list_to_choose(clock, channels, node)
                    if nodes[node, LEAVING]:
                        _set_off(
                            clock, nodes, channels, counters, rows, hops, after, slot_row,
                            nodes[node, LEAVING] >> 32, nodes[node, LEAVING] & ROW_BITS,
                            nodes[node, KEY] >> 32,
                        )  # fmt: skip
                while clock[IN_PLACE] != NOTHING:
                    key = _next_in_place(clock, nodes, phases, rows)
                    row = key & ROW_BITS
                    _set_off(
                        clock, nodes, channels, counters, rows, hops, after, slot_row,
                        rows[row, DONE_AT], rows[row, DONE_STOP], key >> 32,
                    )  # fmt: skip
                node = following
            delays[delay, FIRST] = node
            if node != NOTHING:
                _push_delay(clock, nodes, delays, delay)


@_kernel
def _set_off(  # type: ignore[no-untyped-def]
    clock, nodes, channels, counters, rows, hops, after, slot_row, first, stop, part
):
    """Set off in a slice what `after` names: sendings, and writings that waited."""
    for at in range(first, stop):
        code = np.int64(after[at])
        row = code >> 2
        if code & 3 != SEND:
            counter = part * len(slot_row) + row
            counters[counter] -= 1
            if counters[counter] > 0:
                continue
            row = np.int64(slot_row[row])
        node = _new_node(clock, nodes, part << 32 | row)
        if code & 3 == COUNTED_WRITE:
            _may_write(clock, nodes, rows, node)
        else:
            nodes[node, HOP] = rows[row, FIRST_HOP]
            _wait(clock, nodes, channels, hops, node)


@_kernel
def _wait(clock, nodes, channels, hops, node):  # type: ignore[no-untyped-def]
    """Let a message wait for the channel of its hop."""
    channel = channel_of(hops[nodes[node, HOP]])
    nodes[node, CHILD] = NOTHING
    channels[channel, WAITING] = _meld(nodes, channels[channel, WAITING], node)
    if channels[channel, DOING] == IDLE:
        _list_to_choose(clock, channels, channel)


@_kernel
def _list_to_choose(clock, channels, channel):  # type: ignore[no-untyped-def]
    channels[channel, DOING] = CHOOSING
    channels[clock[N_TO_CHOOSE], TO_CHOOSE] = channel
    clock[N_TO_CHOOSE] += 1


@_kernel
def _arrive(clock, nodes, counters, rows, n_slots, node):  # type: ignore[no-untyped-def]
    """Let a message be written if nothing else keeps it from that; else drop its node."""
    key = nodes[node, KEY]
    slot = rows[key & ROW_BITS, WRITE_SLOT]
    if slot >= 0:
        counter = (key >> 32) * n_slots + slot
        counters[counter] -= 1
        if counters[counter] > 0:
            _give_back(clock, nodes, node)
            return
    _may_write(clock, nodes, rows, node)


@_kernel
def _may_write(clock, nodes, rows, node):  # type: ignore[no-untyped-def]
    """Note a message as in place, or as one to be added up first."""
    if clock[CHIPS_LIMIT] and rows[nodes[node, KEY] & ROW_BITS, REDUCE_AT] >= 0:
        nodes[node, CHILD] = NOTHING
        clock[TO_ADD] = _meld(nodes, clock[TO_ADD], node)
    else:
        nodes[node, NEXT] = clock[IN_PLACE]
        clock[IN_PLACE] = node


@_kernel
def _added(clock, nodes, chips, rows, node):  # type: ignore[no-untyped-def]
    """Note a message as in place and its chip as free."""
    chip = rows[nodes[node, KEY] & ROW_BITS, REDUCE_AT]
    chips[chip, ADDING] = 0
    chips[clock[N_FREED], FREED] = chip
    clock[N_FREED] += 1
    nodes[node, NEXT] = clock[IN_PLACE]
    clock[IN_PLACE] = node


@_kernel
def _next_in_place(clock, nodes, phases, rows):  # type: ignore[no-untyped-def]
    """Count one of the messages that are in place as done; return its key."""
    node = clock[IN_PLACE]
    clock[IN_PLACE] = nodes[node, NEXT]
    key = nodes[node, KEY]
    _give_back(clock, nodes, node)
    phases[rows[key & ROW_BITS, PHASE], 1] = clock[NOW]
    clock[N_DONE] += 1
    return key


@_kernel
def _first_waiting(clock, nodes, channels, rows, start_rows, channel):  # type: ignore[no-untyped-def]
    """Take the first message that waits for a channel from its heap or its cursor."""
    node, at = channels[channel, WAITING], channels[channel, CURSOR]
    if at < channels[channel, START_STOP]:
        row = np.int64(start_rows[at])
        key = channels[channel, CURSOR_SLICE] << 32 | row
        if node == NOTHING or key < nodes[node, KEY]:
            at += 1
            if at == channels[channel, START_STOP]:
                channels[channel, CURSOR_SLICE] += 1
                if channels[channel, CURSOR_SLICE] < clock[N_SLICES]:
                    at = channels[channel, START_AT]
            channels[channel, CURSOR] = at
            node = _new_node(clock, nodes, key)
            nodes[node, HOP] = rows[row, FIRST_HOP]
            return node
    if node != NOTHING:
        channels[channel, WAITING] = _without_top(nodes, node)
    return node


@_kernel
def _start(clock, nodes, delays, channels, rows, hops, phases, trace, channel, node):  # type: ignore[no-untyped-def]
    """Start a message on a channel; post the channel's release, and where the message goes."""
    key, hop = nodes[node, KEY], nodes[node, HOP]
    row = key & ROW_BITS
    base = N_KINDS * np.int64(rows[row, SIZE_CLASS])
    channels[channel, BUSY_TICKS] += delays[base + RELEASE, TICKS]
    nodes[channel, KEY] = key
    nodes[channel, LEAVING] = 0
    if hop == rows[row, FIRST_HOP]:
        if rows[row, LEFT_AT] < rows[row, DONE_AT]:
            nodes[channel, LEAVING] = np.int64(rows[row, LEFT_AT]) << 32 | rows[row, DONE_AT]
        if phases[rows[row, PHASE], 0] < 0:
            phases[rows[row, PHASE], 0] = clock[NOW]
    _post(clock, nodes, delays, base + RELEASE, channel)
    if len(trace) > 0:
        at = clock[N_TRACED]
        trace[at, 0], trace[at, 1], trace[at, 2] = key, channel, clock[NOW]
        clock[N_TRACED] += 1
    if hops[hop] < 0:
        _post(clock, nodes, delays, base + ARRIVE, node)
    else:
        nodes[node, HOP] = hop + 1
        _post(clock, nodes, delays, len(delays) - 1, node)


@_kernel
def _add_up(clock, nodes, delays, chips, rows):  # type: ignore[no-untyped-def]
    """Let chips that are free add up what came first; what comes now queues by key."""
    for at in range(clock[N_FREED]):
        _add_next(clock, nodes, delays, chips, rows, chips[at, FREED])
    clock[N_FREED] = 0
    while clock[TO_ADD] != NOTHING:
        node = clock[TO_ADD]
        clock[TO_ADD] = _without_top(nodes, node)
        chip = rows[nodes[node, KEY] & ROW_BITS, REDUCE_AT]
        nodes[node, NEXT] = NOTHING
        if chips[chip, FIRST] == NOTHING:
            chips[chip, FIRST] = node
        else:
            nodes[chips[chip, LAST], NEXT] = node
        chips[chip, LAST] = node
        if not chips[chip, ADDING]:
            _add_next(clock, nodes, delays, chips, rows, chip)


@_kernel
def _add_next(clock, nodes, delays, chips, rows, chip):  # type: ignore[no-untyped-def]
    node = chips[chip, FIRST]
    if node != NOTHING:
        chips[chip, FIRST] = nodes[node, NEXT]
        chips[chip, ADDING] = 1
        size_class = np.int64(rows[nodes[node, KEY] & ROW_BITS, SIZE_CLASS])
        _post(clock, nodes, delays, N_KINDS * size_class + ADDED, node)


@_kernel
def _new_node(clock, nodes, key):  # type: ignore[no-untyped-def]
    """Return a node for a message, one that was given back if there is any."""
    node = clock[FREE_NODES]
    if node == NOTHING:
        node = clock[N_NODES]
        clock[N_NODES] += 1
    else:
        clock[FREE_NODES] = nodes[node, NEXT]
    nodes[node, KEY] = key
    return node


@_kernel
def _give_back(clock, nodes, node):  # type: ignore[no-untyped-def]
    nodes[node, NEXT] = clock[FREE_NODES]
    clock[FREE_NODES] = node


@_kernel
def _post(clock, nodes, delays, delay, node):  # type: ignore[no-untyped-def]
    """Post an event that comes after one of the delays."""
    nodes[node, TIME] = clock[NOW] + delays[delay, TICKS]
    nodes[node, NEXT] = NOTHING
    if delays[delay, FIRST] == NOTHING:
        delays[delay, FIRST] = node
        _push_delay(clock, nodes, delays, delay)
    else:
        nodes[delays[delay, LAST], NEXT] = node
    delays[delay, LAST] = node


@_kernel
def _push_delay(clock, nodes, delays, delay):  # type: ignore[no-untyped-def]
    """Add a delay to the heap, by the time of its first event."""
    time = nodes[delays[delay, FIRST], TIME]
    at = clock[N_POSTED]
    clock[N_POSTED] += 1
    while at > 0:
        parent = (at - 1) >> 1
        if nodes[delays[delays[parent, HEAP], FIRST], TIME] <= time:
            break
        delays[at, HEAP] = delays[parent, HEAP]
        at = parent
    delays[at, HEAP] = delay


@_kernel
def _pop_delay(clock, nodes, delays):  # type: ignore[no-untyped-def]
    """Take the delay with the earliest event from the heap."""
    top = delays[0, HEAP]
    clock[N_POSTED] -= 1
    size = clock[N_POSTED]
    last = delays[size, HEAP]
    time = nodes[delays[last, FIRST], TIME]
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        child_time = nodes[delays[delays[child, HEAP], FIRST], TIME]
        if child + 1 < size:
            other_time = nodes[delays[delays[child + 1, HEAP], FIRST], TIME]
            if other_time < child_time:
                child, child_time = child + 1, other_time
        if time <= child_time:
            break
        delays[at, HEAP] = delays[child, HEAP]
        at = child
    delays[at, HEAP] = last
    return top


@_kernel
def _meld(nodes, one, other):  # type: ignore[no-untyped-def]
    """Return the top of two pairing heaps made one."""
    if one == NOTHING:
        return other
    if nodes[other, KEY] < nodes[one, KEY]:
        one, other = other, one
    nodes[other, NEXT] = nodes[one, CHILD]
    nodes[one, CHILD] = other
    return one


@_kernel
def _without_top(nodes, top):  # type: ignore[no-untyped-def]
    """Return the top of a pairing heap without its top: meld children in pairs, then all."""
    pairs = NOTHING
    child = nodes[top, CHILD]
    while child != NOTHING:
        second = nodes[child, NEXT]
        following = NOTHING
        if second != NOTHING:
            following = nodes[second, NEXT]
            child = _meld(nodes, child, second)
        nodes[child, NEXT] = pairs
        pairs = child
        child = following
    result = NOTHING
    while pairs != NOTHING:
        following = nodes[pairs, NEXT]
        result = _meld(nodes, result, pairs)
        pairs = following
    return result
