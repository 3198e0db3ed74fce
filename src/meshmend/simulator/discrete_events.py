"""The event loop: messages on channels, in whole ticks of time. `rules` states the rules.

`nodes` holds everything that waits. Messages in flight wait in queues, one for each delay: to hold
a channel, to hold it and travel, to travel, to be added up, or to be worked on by a processor,
each for a few message sizes.
Messages that are ready wait by priority, in one heap for each channel. What a channel has taken of
them waits in a list of its own, first in first out. Node c belongs to channel c and stands for its
release.

Kernels take each array as an argument of its own: a tuple of arrays would be copied at every call.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import inlined, plain_kernel
from meshmend.schedule.priority import LEVELS_PER_SLICE
from meshmend.simulator.network_program import (
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
from meshmend.simulator.nodes import (
    ARRIVED,
    CHILD,
    CHIPS_LIMIT,
    FIRST,
    HAS_WORK,
    HEAP,
    HEAP_TIME,
    HOP,
    IN_PLACE,
    KEY,
    LAST,
    LEAVING,
    N_DONE,
    N_FREED,
    N_IDLE,
    N_POSTED,
    N_SLICES,
    N_TO_CHOOSE,
    N_TRACED,
    NEXT,
    NOTHING,
    NOW,
    REPEATS,
    ROW_BITS,
    STARTS,
    TICKS,
    TIME,
    TO_ADD,
    TO_WORK,
    give_back,
    meld,
    new_node,
    post,
    sink_top,
    without_top,
)

# Kinds of delays, in this order for each speed and size class; a hop's travel is the last of all.
RELEASE: Final = 0
ARRIVE: Final = 1
ADDED: Final = 2
WORKED: Final = 3
N_KINDS: Final = 4
TRAVEL: Final = 4

# Columns of State.channels.
WAITING: Final = 0  # the heap of what waits
DOING: Final = 1  # IDLE, or the bits CHOOSING and BUSY
BUSY_TICKS: Final = 2
TO_CHOOSE: Final = 3  # entry i: the channel that is i-th to choose what it takes next
AHEAD: Final = 4  # it takes messages while it holds fewer than so many ticks of them
HELD: Final = 5  # so many does it hold, at full speed; 0 if it takes none ahead
FIRST_TAKEN: Final = 6  # the list of what it took and has not started
LAST_TAKEN: Final = 7
N_CHANNEL_COLUMNS: Final = 8
IDLE: Final = 0
CHOOSING: Final = 1
BUSY: Final = 2

# Columns of State.chips: whether the chip adds, the queue of what waits to be added up (columns
# FIRST and LAST of `nodes`), and entry i of the list of chips that have just finished adding.
ADDING: Final = 0
FREED: Final = 3

# Columns of State.ranks: whether it keeps a processor busy, and the heap of what waits meanwhile.
WORKING: Final = 0
MEANWHILE: Final = 1


class State(NamedTuple):
    """What the event loop changes."""

    clock: NDArray[np.int64]
    nodes: NDArray[np.int64]
    delays: NDArray[np.int64]
    channels: NDArray[np.int64]
    chips: NDArray[np.int64]
    counters: NDArray[np.int32]  # what each slot of each slice still waits for
    phases: NDArray[np.int64]  # first start and last end; the last row is for rows of no phase
    trace: NDArray[np.int64]  # key, place in Tables.hops and start of every hop; empty without
    # Of each row source and destination, -1: no processor; then each rank, for its start. Empty if
    # messages take no processors.
    ends: NDArray[np.int32]
    ranks: NDArray[np.int64]


@plain_kernel
def begin(tables: Tables, levels: NDArray[np.int32], state: State) -> None:
    """Queue each rank's start, and the first slice of every row that waits for nothing."""
    for row in range(len(tables.rows), len(state.ends)):
        node = new_node(state.clock, state.nodes, np.int64(-1) << 32 | row)
        state.nodes[node, HOP] = STARTS
        _ask_processor(state.clock, state.nodes, node)
    for row in tables.start_rows:
        node = new_node(state.clock, state.nodes, np.int64(levels[row]) << 32 | row)
        state.nodes[node, HOP] = tables.rows[row, FIRST_HOP] | REPEATS
        _leave(state.clock, state.nodes, state.channels, tables.hops, state.ends, node)


@plain_kernel
def run(tables: Tables, levels: NDArray[np.int32], state: State, until_done: int) -> int:
    """Go on until this many messages are done; return how many are."""
    rows, hops, hop_delay, after = tables.rows, tables.hops, tables.hop_delay, tables.after
    slot_row = tables.slot_row
    clock, nodes, delays, channels = state.clock, state.nodes, state.delays, state.channels
    chips, counters, phases, trace = state.chips, state.counters, state.phases, state.trace
    ends, ranks = state.ends, state.ranks
    while True:
        for at in range(clock[N_TO_CHOOSE]):
            channel = channels[at, TO_CHOOSE]
            is_free = not channels[channel, DOING] & BUSY
            channels[channel, DOING] = BUSY
            if is_free:
                node = channels[channel, FIRST_TAKEN]
                if node == NOTHING:
                    node = _first_waiting(clock, nodes, channels, levels, channel)
                    _hold(delays, channels, rows, channel, nodes[node, KEY], 1)
                else:
                    channels[channel, FIRST_TAKEN] = nodes[node, NEXT]
                _start(
                    clock, nodes, delays, channels, rows, hops, hop_delay, phases, trace, channel,
                    node,
                )  # fmt: skip
            while channels[channel, HELD] < channels[channel, AHEAD]:
                if channels[channel, WAITING] == NOTHING:
                    break
                node = _first_waiting(clock, nodes, channels, levels, channel)
                _take(nodes, delays, channels, rows, channel, node)
        clock[N_TO_CHOOSE] = 0
        if clock[CHIPS_LIMIT]:
            _add_up(clock, nodes, delays, chips, rows)
        # Processors choose when they know all of this moment, also what took no time to arrive.
        is_settled = clock[N_POSTED] == 0 or delays[0, HEAP_TIME] > clock[NOW]
        if clock[HAS_WORK] and is_settled:
            _work(clock, nodes, delays, levels, rows, ends, ranks)
        if clock[N_POSTED] == 0 or clock[N_DONE] >= until_done:
            n_done: int = clock[N_DONE]
            return n_done
        now = delays[0, HEAP_TIME]
        clock[NOW] = now
        while clock[N_POSTED] > 0 and delays[0, HEAP_TIME] == now:
            delay = delays[0, HEAP]
            kind = TRAVEL if delay == len(delays) - 1 else delay % N_KINDS
            node = delays[delay, FIRST]
            while node != NOTHING and nodes[node, TIME] == now:
                following = nodes[node, NEXT]
                if kind == TRAVEL:
                    _wait(clock, nodes, channels, hops, node)
                elif kind == ARRIVE:
                    if clock[HAS_WORK] and ends[nodes[node, KEY] & ROW_BITS, 1] >= 0:
                        nodes[node, HOP] = ARRIVED
                        _ask_processor(clock, nodes, node)
                    else:
                        _arrive(clock, nodes, counters, rows, levels, len(slot_row), node)
                elif kind == WORKED:
                    _free_processor(clock, nodes, ends, ranks, node)
                    if nodes[node, HOP] == STARTS:
                        give_back(clock, nodes, node)
                    elif nodes[node, HOP] & ARRIVED:
                        _arrive(clock, nodes, counters, rows, levels, len(slot_row), node)
                    else:
                        _wait(clock, nodes, channels, hops, node)
                elif kind == ADDED:
                    _added(clock, nodes, chips, rows, node)
                else:
                    _release(clock, nodes, delays, channels, rows, node)
                    if nodes[node, LEAVING]:
                        _set_off(
                            clock, nodes, channels, counters, rows, levels, hops, after, slot_row,
                            ends, nodes[node, LEAVING] >> 32, nodes[node, LEAVING] & ROW_BITS,
                            _slice_of(nodes[node, KEY], levels),
                        )  # fmt: skip
                while clock[IN_PLACE] != NOTHING:
                    key = _next_in_place(clock, nodes, phases, rows)
                    row = key & ROW_BITS
                    _set_off(
                        clock, nodes, channels, counters, rows, levels, hops, after, slot_row,
                        ends, np.int64(rows[row, DONE_AT]), np.int64(rows[row, DONE_STOP]),
                        _slice_of(key, levels),
                    )  # fmt: skip
                node = following
            delays[delay, FIRST] = node
            sink_top(clock, nodes, delays)


@inlined
def _slice_of(key, levels):  # type: ignore[no-untyped-def]
    return ((key >> 32) - levels[key & ROW_BITS]) // LEVELS_PER_SLICE


@inlined
def _set_off(  # type: ignore[no-untyped-def]
    clock, nodes, channels, counters, rows, levels, hops, after, slot_row, ends, first, stop, part
):
    """Start, in one slice, the sends and writes of `after[first:stop]` that now wait for no row."""
    for at in range(first, stop):
        code = np.int64(after[at])
        row = code >> 2
        if code & 3 != SEND:
            counter = part * len(slot_row) + row
            counters[counter] -= 1
            if counters[counter] > 0:
                continue
            row = np.int64(slot_row[row])
        node = new_node(clock, nodes, (part * LEVELS_PER_SLICE + levels[row]) << 32 | row)
        if code & 3 == COUNTED_WRITE:
            _may_write(clock, nodes, rows, node)
        else:
            nodes[node, HOP] = rows[row, FIRST_HOP]
            _leave(clock, nodes, channels, hops, ends, node)


@inlined
def _leave(clock, nodes, channels, hops, ends, node):  # type: ignore[no-untyped-def]
    """Queue a message for a processor of its source, if it needs one, or at its first channel."""
    if clock[HAS_WORK] and ends[nodes[node, KEY] & ROW_BITS, 0] >= 0:
        _ask_processor(clock, nodes, node)
    else:
        _wait(clock, nodes, channels, hops, node)


@inlined
def _ask_processor(clock, nodes, node):  # type: ignore[no-untyped-def]
    nodes[node, CHILD] = NOTHING
    clock[TO_WORK] = meld(nodes, clock[TO_WORK], node)


@inlined
def _work(clock, nodes, delays, levels, rows, ends, ranks):  # type: ignore[no-untyped-def]
    """Let idle processors take the first of the messages whose rank keeps none busy."""
    while clock[N_IDLE] > 0 and clock[TO_WORK] != NOTHING:
        node = clock[TO_WORK]
        clock[TO_WORK] = without_top(nodes, node)
        row = nodes[node, KEY] & ROW_BITS
        rank = np.int64(ends[row, 1 if nodes[node, HOP] & ARRIVED else 0])
        if ranks[rank, WORKING]:
            nodes[node, CHILD] = NOTHING
            ranks[rank, MEANWHILE] = meld(nodes, ranks[rank, MEANWHILE], node)
            continue
        ranks[rank, WORKING] = 1
        clock[N_IDLE] -= 1
        if nodes[node, HOP] == STARTS:
            post(clock, nodes, delays, len(delays) - 1 - N_KINDS + WORKED, node)
            continue
        clock[TO_WORK] = _with_next_slice(clock, nodes, levels, clock[TO_WORK], node)
        post(clock, nodes, delays, N_KINDS * np.int64(rows[row, SIZE_CLASS]) + WORKED, node)


@inlined
def _free_processor(clock, nodes, ends, ranks, node):  # type: ignore[no-untyped-def]
    row = nodes[node, KEY] & ROW_BITS
    rank = np.int64(ends[row, 1 if nodes[node, HOP] & ARRIVED else 0])
    ranks[rank, WORKING] = 0
    clock[N_IDLE] += 1
    if ranks[rank, MEANWHILE] != NOTHING:
        clock[TO_WORK] = meld(nodes, clock[TO_WORK], ranks[rank, MEANWHILE])
        ranks[rank, MEANWHILE] = NOTHING


@inlined
def _wait(clock, nodes, channels, hops, node):  # type: ignore[no-untyped-def]
    """Queue a message at the channel of its hop."""
    channel = channel_of(hops[nodes[node, HOP] & ROW_BITS])
    nodes[node, CHILD] = NOTHING
    channels[channel, WAITING] = meld(nodes, channels[channel, WAITING], node)
    doing = channels[channel, DOING]
    if doing == IDLE or (doing == BUSY and channels[channel, HELD] < channels[channel, AHEAD]):
        _list_to_choose(clock, channels, channel)


@inlined
def _take(nodes, delays, channels, rows, channel, node):  # type: ignore[no-untyped-def]
    """Add a message to those that nothing overtakes any more."""
    nodes[node, NEXT] = NOTHING
    if channels[channel, FIRST_TAKEN] == NOTHING:
        channels[channel, FIRST_TAKEN] = node
    else:
        nodes[channels[channel, LAST_TAKEN], NEXT] = node
    channels[channel, LAST_TAKEN] = node
    _hold(delays, channels, rows, channel, nodes[node, KEY], 1)


@inlined
def _hold(delays, channels, rows, channel, key, sign):  # type: ignore[no-untyped-def]
    """Count a message among those that a channel holds, if it takes any ahead, or no longer."""
    if channels[channel, AHEAD]:
        size_class = np.int64(rows[key & ROW_BITS, SIZE_CLASS])
        channels[channel, HELD] += sign * delays[N_KINDS * size_class + RELEASE, TICKS]


@inlined
def _release(clock, nodes, delays, channels, rows, channel):  # type: ignore[no-untyped-def]
    """Let a channel start what it has taken, or choose among what waits; else it is idle."""
    channels[channel, DOING] &= CHOOSING
    _hold(delays, channels, rows, channel, nodes[channel, KEY], -1)
    has_more = channels[channel, WAITING] != NOTHING or channels[channel, FIRST_TAKEN] != NOTHING
    if has_more and channels[channel, DOING] == IDLE:
        _list_to_choose(clock, channels, channel)


@inlined
def _list_to_choose(clock, channels, channel):  # type: ignore[no-untyped-def]
    channels[channel, DOING] |= CHOOSING
    channels[clock[N_TO_CHOOSE], TO_CHOOSE] = channel
    clock[N_TO_CHOOSE] += 1


@inlined
def _arrive(clock, nodes, counters, rows, levels, n_slots, node):  # type: ignore[no-untyped-def]
    """Write a message that arrived, or free its node: the last row it waits for makes a new one."""
    key = nodes[node, KEY]
    slot = rows[key & ROW_BITS, WRITE_SLOT]
    if slot >= 0:
        counter = _slice_of(key, levels) * n_slots + slot
        counters[counter] -= 1
        if counters[counter] > 0:
            give_back(clock, nodes, node)
            return
    _may_write(clock, nodes, rows, node)


@inlined
def _may_write(clock, nodes, rows, node):  # type: ignore[no-untyped-def]
    """Note a message as in place, or as one to be added up first."""
    if clock[CHIPS_LIMIT] and rows[nodes[node, KEY] & ROW_BITS, REDUCE_AT] >= 0:
        nodes[node, CHILD] = NOTHING
        clock[TO_ADD] = meld(nodes, clock[TO_ADD], node)
    else:
        nodes[node, NEXT] = clock[IN_PLACE]
        clock[IN_PLACE] = node


@inlined
def _added(clock, nodes, chips, rows, node):  # type: ignore[no-untyped-def]
    """Note a message as in place and its chip as free."""
    chip = rows[nodes[node, KEY] & ROW_BITS, REDUCE_AT]
    chips[chip, ADDING] = 0
    chips[clock[N_FREED], FREED] = chip
    clock[N_FREED] += 1
    nodes[node, NEXT] = clock[IN_PLACE]
    clock[IN_PLACE] = node


@inlined
def _next_in_place(clock, nodes, phases, rows):  # type: ignore[no-untyped-def]
    """Count one of the messages that are in place as done; return its key."""
    node = clock[IN_PLACE]
    clock[IN_PLACE] = nodes[node, NEXT]
    key = nodes[node, KEY]
    give_back(clock, nodes, node)
    phases[rows[key & ROW_BITS, PHASE], 1] = clock[NOW]
    clock[N_DONE] += 1
    return key


@inlined
def _first_waiting(clock, nodes, channels, levels, channel):  # type: ignore[no-untyped-def]
    """Take the first message that waits for a channel."""
    node = channels[channel, WAITING]
    rest = without_top(nodes, node)
    channels[channel, WAITING] = _with_next_slice(clock, nodes, levels, rest, node)
    return node


@inlined
def _with_next_slice(clock, nodes, levels, heap, node):  # type: ignore[no-untyped-def]
    """Return a heap, with the next slice of a message that starts if its row waits for nothing."""
    if nodes[node, HOP] & REPEATS:
        key = nodes[node, KEY] + (LEVELS_PER_SLICE << 32)
        if _slice_of(key, levels) < clock[N_SLICES]:
            following = new_node(clock, nodes, key)
            nodes[following, HOP] = nodes[node, HOP]
            nodes[following, CHILD] = NOTHING
            heap = meld(nodes, heap, following)
        nodes[node, HOP] &= ROW_BITS
    return heap


@inlined
def _start(  # type: ignore[no-untyped-def]
    clock, nodes, delays, channels, rows, hops, hop_delay, phases, trace, channel, node
):
    """Start a message on a channel; post the channel's release, and where the message goes."""
    key, hop = nodes[node, KEY], nodes[node, HOP]
    row = key & ROW_BITS
    base = N_KINDS * (np.int64(rows[row, SIZE_CLASS]) + hop_delay[hop])
    channels[channel, BUSY_TICKS] += delays[base + RELEASE, TICKS]
    nodes[channel, KEY] = key
    nodes[channel, LEAVING] = 0
    if hop == rows[row, FIRST_HOP]:
        if rows[row, LEFT_AT] < rows[row, DONE_AT]:
            nodes[channel, LEAVING] = np.int64(rows[row, LEFT_AT]) << 32 | rows[row, DONE_AT]
        if phases[rows[row, PHASE], 0] < 0:
            phases[rows[row, PHASE], 0] = clock[NOW]
    post(clock, nodes, delays, base + RELEASE, channel)
    if len(trace) > 0:
        at = clock[N_TRACED]
        trace[at, 0], trace[at, 1], trace[at, 2] = key, hop, clock[NOW]
        clock[N_TRACED] += 1
    if hops[hop] < 0:
        post(clock, nodes, delays, base + ARRIVE, node)
    else:
        nodes[node, HOP] = hop + 1
        post(clock, nodes, delays, len(delays) - 1, node)


@inlined
def _add_up(clock, nodes, delays, chips, rows):  # type: ignore[no-untyped-def]
    """Let free chips add up what came first; messages that come now queue by their keys."""
    for at in range(clock[N_FREED]):
        _add_next(clock, nodes, delays, chips, rows, chips[at, FREED])
    clock[N_FREED] = 0
    while clock[TO_ADD] != NOTHING:
        node = clock[TO_ADD]
        clock[TO_ADD] = without_top(nodes, node)
        chip = np.int64(rows[nodes[node, KEY] & ROW_BITS, REDUCE_AT])
        nodes[node, NEXT] = NOTHING
        if chips[chip, FIRST] == NOTHING:
            chips[chip, FIRST] = node
        else:
            nodes[chips[chip, LAST], NEXT] = node
        chips[chip, LAST] = node
        if not chips[chip, ADDING]:
            _add_next(clock, nodes, delays, chips, rows, chip)


@inlined
def _add_next(clock, nodes, delays, chips, rows, chip):  # type: ignore[no-untyped-def]
    node = chips[chip, FIRST]
    if node != NOTHING:
        chips[chip, FIRST] = nodes[node, NEXT]
        chips[chip, ADDING] = 1
        size_class = np.int64(rows[nodes[node, KEY] & ROW_BITS, SIZE_CLASS])
        post(clock, nodes, delays, N_KINDS * size_class + ADDED, node)
