"""The event loop: messages on channels, in whole ticks of time. `engine` states the rules.

Every delay that occurs is one of few: to hold a channel, to hold it and travel, to travel, to
add up, each for a handful of message sizes. Events of one delay are posted in order of time,
so each delay has a queue, first in first out, and the only heap is one over their heads. What
waits for a channel is a pairing heap. Queues, heaps and lists are linked through one pool of
nodes, of which a message in flight has one; node c is channel c's own, for its release.
"""

from typing import Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from meshmend.simulate.program import (
    COUNTED_SEND,
    FIRST_HOP,
    LAST_HOP,
    PHASE,
    REDUCE_AT,
    SEND,
    SIZE_CLASS,
    WRITE_SLOT,
    Tables,
)

# Columns of State.nodes. A node is posted with a time, or sits in a heap with a child.
TIME: Final = 0
CHILD: Final = 0
KEY: Final = 1  # slice << 32 | row: what sorts first goes first
HOP: Final = 2
NEXT: Final = 3
NOTHING: Final = -1

# Kinds of delays, in this order for each size class; TRAVEL is the last delay of all.
RELEASE: Final = 0
ARRIVE: Final = 1
ADDED: Final = 2
N_KINDS: Final = 3

# Places in State.scalars.
NOW: Final = 0
N_SLICES: Final = 1
N_DONE: Final = 2
N_NODES: Final = 3
FREE_NODES: Final = 4  # a list of nodes given back
IN_PLACE: Final = 5  # a list of messages whose successors are to be set off
TO_ADD: Final = 6  # a heap of messages that wait to be added up from now on
N_TO_CHOOSE: Final = 7
N_FREED_CHIPS: Final = 8
N_POSTED: Final = 9  # delays with an event
N_TRACED: Final = 10
N_SCALARS: Final = 11

# States of a channel.
IDLE: Final = 0
CHOOSING: Final = 1
BUSY: Final = 2


class State(NamedTuple):
    """What the event loop changes; `delays` alone is constant."""

    scalars: NDArray[np.int64]
    delays: NDArray[np.int64]
    posted: NDArray[np.int64]  # (delays, 2): first and last node of each delay's queue
    heads: NDArray[np.int64]  # heap of the delays that have events
    nodes: NDArray[np.int64]
    channel_state: NDArray[np.int8]
    waiting: NDArray[np.int64]  # by channel: the heap of what waits for it
    cursor: NDArray[np.int64]  # by channel: place and slice of the next row that waits for nothing
    to_choose: NDArray[np.int32]
    counters: NDArray[np.int32]  # (slices x slots)
    chips: NDArray[np.int64]  # (ranks, 3): first and last node that wait; whether it is adding
    freed_chips: NDArray[np.int32]
    busy: NDArray[np.int64]
    phases: NDArray[np.int64]  # (phases + 1, 2): first start and last end; the last row is no phase
    trace: NDArray[np.int64]  # (hops or none, 3): key, hop, start


@njit(cache=True)
def run(tables: Tables, state: State, until_done: int) -> int:
    """Go on until this many messages are done, or nothing moves any more; return how many are."""
    scalars = state.scalars
    while True:
        _choose_all(tables, state)
        if state.delays[ADDED] >= 0:
            _add_up(tables, state)
        if scalars[N_POSTED] == 0 or scalars[N_DONE] >= until_done:
            return scalars[N_DONE]
        scalars[NOW] = state.nodes[state.posted[state.heads[0], 0], TIME]
        _take_in(tables, state)


@njit(cache=True)
def _take_in(tables, state):  # type: ignore[no-untyped-def]
    """Take in every event that is posted for now."""
    scalars, nodes, posted = state.scalars, state.nodes, state.posted
    now, travel = scalars[NOW], len(state.delays) - 1
    while scalars[N_POSTED] > 0 and nodes[posted[state.heads[0], 0], TIME] == now:
        delay = _pop_head(state)
        kind = delay % N_KINDS
        node = posted[delay, 0]
        while node != NOTHING and nodes[node, TIME] == now:
            following = nodes[node, NEXT]
            key = nodes[node, KEY]
            if delay == travel:
                _wait(tables, state, node)
            elif kind == RELEASE:
                _release(tables, state, node, key)
            else:
                _give_back(state, node)
                row = key & 0xFFFFFFFF
                if kind == ADDED:
                    chip = tables.rows[row, REDUCE_AT]
                    state.chips[chip, 2] = 0
                    state.freed_chips[scalars[N_FREED_CHIPS]] = chip
                    scalars[N_FREED_CHIPS] += 1
                    _list_in_place(state, key)
                elif tables.rows[row, WRITE_SLOT] < 0:
                    _arrived(tables, state, key)
                else:
                    _count_down(tables, state, key >> 32, tables.rows[row, WRITE_SLOT], False)
                _settle(tables, state)
            node = following
        posted[delay, 0] = node
        if node != NOTHING:
            _push_head(state, delay)


@njit(cache=True)
def _release(tables, state, channel, key):  # type: ignore[no-untyped-def]
    """Free a channel; if this was a message's first one, it has left its source."""
    state.channel_state[channel] = CHOOSING
    state.to_choose[state.scalars[N_TO_CHOOSE]] = channel
    state.scalars[N_TO_CHOOSE] += 1
    row = key & 0xFFFFFFFF
    if state.nodes[channel, HOP] == tables.rows[row, FIRST_HOP]:
        for at in range(tables.left_ptr[row], tables.left_ptr[row + 1]):
            _count_down(tables, state, key >> 32, np.int64(tables.left_next[at]) >> 2, False)
        _settle(tables, state)


@njit(cache=True)
def _settle(tables, state):  # type: ignore[no-untyped-def]
    """Set off what the messages that are now in place set off, and so on."""
    scalars = state.scalars
    while scalars[IN_PLACE] != NOTHING:
        node = scalars[IN_PLACE]
        scalars[IN_PLACE] = state.nodes[node, NEXT]
        key = state.nodes[node, KEY]
        _give_back(state, node)
        row, part = key & 0xFFFFFFFF, key >> 32
        state.phases[tables.rows[row, PHASE], 1] = scalars[NOW]
        scalars[N_DONE] += 1
        for at in range(tables.done_ptr[row], tables.done_ptr[row + 1]):
            code = np.int64(tables.done_next[at])
            if code & 3 == SEND:
                _send(tables, state, (part << 32) | (code >> 2))
            else:
                _count_down(tables, state, part, code >> 2, code & 3 == COUNTED_SEND)


@njit(cache=True)
def _count_down(tables, state, part, slot, sends):  # type: ignore[no-untyped-def]
    counter = part * len(tables.slot_row) + slot
    state.counters[counter] -= 1
    if state.counters[counter] == 0:
        key = (part << 32) | np.int64(tables.slot_row[slot])
        if sends:
            _send(tables, state, key)
        else:
            _arrived(tables, state, key)


@njit(cache=True)
def _arrived(tables, state, key):  # type: ignore[no-untyped-def]
    """Note a message that has arrived and may be written, or must be added up first."""
    if state.delays[ADDED] >= 0 and tables.rows[key & 0xFFFFFFFF, REDUCE_AT] >= 0:
        node = _new_node(state, key)
        state.scalars[TO_ADD] = _meld(state.nodes, state.scalars[TO_ADD], node)
    else:
        _list_in_place(state, key)


@njit(cache=True)
def _list_in_place(state, key):  # type: ignore[no-untyped-def]
    node = _new_node(state, key)
    state.nodes[node, NEXT] = state.scalars[IN_PLACE]
    state.scalars[IN_PLACE] = node


@njit(cache=True)
def _send(tables, state, key):  # type: ignore[no-untyped-def]
    """Let a message wait for its first channel."""
    node = _new_node(state, key)
    state.nodes[node, HOP] = tables.rows[key & 0xFFFFFFFF, FIRST_HOP]
    _wait(tables, state, node)


@njit(cache=True)
def _wait(tables, state, node):  # type: ignore[no-untyped-def]
    """Let a message wait for the channel of its hop."""
    channel = tables.hops[state.nodes[node, HOP]]
    state.nodes[node, CHILD] = NOTHING
    state.waiting[channel] = _meld(state.nodes, state.waiting[channel], node)
    if state.channel_state[channel] == IDLE:
        state.channel_state[channel] = CHOOSING
        state.to_choose[state.scalars[N_TO_CHOOSE]] = channel
        state.scalars[N_TO_CHOOSE] += 1


@njit(cache=True)
def _choose_all(tables, state):  # type: ignore[no-untyped-def]
    """Let every channel that is free start the first of what waits for it."""
    for at in range(state.scalars[N_TO_CHOOSE]):
        channel = state.to_choose[at]
        node = _first_waiting(tables, state, channel)
        if node == NOTHING:
            state.channel_state[channel] = IDLE
        else:
            state.channel_state[channel] = BUSY
            _start(tables, state, channel, node)
    state.scalars[N_TO_CHOOSE] = 0


@njit(cache=True)
def _first_waiting(tables, state, channel):  # type: ignore[no-untyped-def]
    """Take the node of the first message that waits for a channel, or NOTHING.

    Rows that wait for nothing are ready at once in all slices: a cursor walks through them.
    """
    node, at = state.waiting[channel], state.cursor[channel, 0]
    if at < tables.start_ptr[channel + 1]:
        key = (state.cursor[channel, 1] << 32) | np.int64(tables.start_rows[at])
        if node == NOTHING or key < state.nodes[node, KEY]:
            at += 1
            if at == tables.start_ptr[channel + 1]:
                state.cursor[channel, 1] += 1
                if state.cursor[channel, 1] < state.scalars[N_SLICES]:
                    at = tables.start_ptr[channel]
            state.cursor[channel, 0] = at
            node = _new_node(state, key)
            state.nodes[node, HOP] = tables.rows[key & 0xFFFFFFFF, FIRST_HOP]
            return node
    if node != NOTHING:
        state.waiting[channel] = _without_top(state.nodes, node)
    return node


@njit(cache=True)
def _start(tables, state, channel, node):  # type: ignore[no-untyped-def]
    """Start a message on a channel now; post the channel's release and where its head goes."""
    nodes, scalars = state.nodes, state.scalars
    key, hop, now = nodes[node, KEY], nodes[node, HOP], scalars[NOW]
    row = key & 0xFFFFFFFF
    base = N_KINDS * tables.rows[row, SIZE_CLASS]
    state.busy[channel] += state.delays[base + RELEASE]
    nodes[channel, KEY] = key
    nodes[channel, HOP] = hop
    _post(state, base + RELEASE, channel)
    if hop == tables.rows[row, FIRST_HOP]:
        phase = tables.rows[row, PHASE]
        if state.phases[phase, 0] < 0:
            state.phases[phase, 0] = now
    if len(state.trace):
        at = scalars[N_TRACED]
        state.trace[at, 0], state.trace[at, 1], state.trace[at, 2] = key, hop, now
        scalars[N_TRACED] += 1
    if hop == tables.rows[row, LAST_HOP]:
        _post(state, base + ARRIVE, node)
    else:
        nodes[node, HOP] = hop + 1
        _post(state, len(state.delays) - 1, node)


@njit(cache=True)
def _add_up(tables, state):  # type: ignore[no-untyped-def]
    """Let chips that are free add up the first that came; what came just now queues by key."""
    scalars, nodes, chips = state.scalars, state.nodes, state.chips
    for at in range(scalars[N_FREED_CHIPS]):
        _add_next(tables, state, state.freed_chips[at])
    scalars[N_FREED_CHIPS] = 0
    while scalars[TO_ADD] != NOTHING:
        node = scalars[TO_ADD]
        scalars[TO_ADD] = _without_top(nodes, node)
        chip = tables.rows[nodes[node, KEY] & 0xFFFFFFFF, REDUCE_AT]
        nodes[node, NEXT] = NOTHING
        if chips[chip, 0] == NOTHING:
            chips[chip, 0] = node
        else:
            nodes[chips[chip, 1], NEXT] = node
        chips[chip, 1] = node
        if chips[chip, 2] == 0:
            _add_next(tables, state, chip)


@njit(cache=True)
def _add_next(tables, state, chip):  # type: ignore[no-untyped-def]
    node = state.chips[chip, 0]
    if node != NOTHING:
        state.chips[chip, 0] = state.nodes[node, NEXT]
        state.chips[chip, 2] = 1
        row = state.nodes[node, KEY] & 0xFFFFFFFF
        _post(state, N_KINDS * tables.rows[row, SIZE_CLASS] + ADDED, node)


@njit(cache=True)
def _new_node(state, key):  # type: ignore[no-untyped-def]
    """Return a node without a child or a hop for a message, used ones first."""
    node = state.scalars[FREE_NODES]
    if node == NOTHING:
        node = state.scalars[N_NODES]
        state.scalars[N_NODES] += 1
    else:
        state.scalars[FREE_NODES] = state.nodes[node, NEXT]
    state.nodes[node, KEY] = key
    state.nodes[node, CHILD] = NOTHING
    return node


@njit(cache=True)
def _give_back(state, node):  # type: ignore[no-untyped-def]
    state.nodes[node, NEXT] = state.scalars[FREE_NODES]
    state.scalars[FREE_NODES] = node


@njit(cache=True)
def _post(state, delay, node):  # type: ignore[no-untyped-def]
    """Post an event that comes after one of the delays."""
    state.nodes[node, TIME] = state.scalars[NOW] + state.delays[delay]
    state.nodes[node, NEXT] = NOTHING
    if state.posted[delay, 0] == NOTHING:
        state.posted[delay, 0] = node
        _push_head(state, delay)
    else:
        state.nodes[state.posted[delay, 1], NEXT] = node
    state.posted[delay, 1] = node


@njit(cache=True)
def _push_head(state, delay):  # type: ignore[no-untyped-def]
    """Add a delay to the heap by the time of its first event."""
    heads, nodes, posted = state.heads, state.nodes, state.posted
    time = nodes[posted[delay, 0], TIME]
    at = state.scalars[N_POSTED]
    state.scalars[N_POSTED] += 1
    while at > 0:
        parent = (at - 1) >> 1
        if nodes[posted[heads[parent], 0], TIME] <= time:
            break
        heads[at] = heads[parent]
        at = parent
    heads[at] = delay


@njit(cache=True)
def _pop_head(state):  # type: ignore[no-untyped-def]
    """Take the delay with the earliest event from the heap."""
    heads, nodes, posted = state.heads, state.nodes, state.posted
    top = heads[0]
    size = state.scalars[N_POSTED] - 1
    state.scalars[N_POSTED] = size
    if size == 0:
        return top
    last = heads[size]
    time = nodes[posted[last, 0], TIME]
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        child_time = nodes[posted[heads[child], 0], TIME]
        if child + 1 < size:
            other_time = nodes[posted[heads[child + 1], 0], TIME]
            if other_time < child_time:
                child, child_time = child + 1, other_time
        if time <= child_time:
            break
        heads[at] = heads[child]
        at = child
    heads[at] = last
    return top


@njit(cache=True)
def _meld(nodes, one, other):  # type: ignore[no-untyped-def]
    """Return the top of two pairing heaps made one."""
    if one == NOTHING:
        return other
    if nodes[other, KEY] < nodes[one, KEY]:
        one, other = other, one
    nodes[other, NEXT] = nodes[one, CHILD]
    nodes[one, CHILD] = other
    return one


@njit(cache=True)
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
