"""Where messages wait: a pool of nodes, queues of events by delay, and heaps by priority.

There are few different delays, and events of one delay are posted in order of time. So each delay
has a queue, first in first out, and the only heap of events is one over the delays. Queues, heaps
and lists are linked through one pool of nodes. Knows nothing of channels, chips or what an event
means.

All arrays hold int64. A node is one row of `nodes`: node c is channel c's own for the first
`n_channels` nodes, and each message in flight has one of the others.

    nodes[node]  column   unit        meaning
    0            TIME     ticks       while posted: when its event comes
    0            CHILD    node        while in a heap: its first child there, NOTHING: none
    1            KEY      level, row  level << 32 | row: of two messages the smaller goes first
    2            HOP      index       of a message: its channel's place in Tables.hops, and perhaps
                                      one of the bits REPEATS, ARRIVED and STARTS
    2            LEAVING  indices     of a channel's node: what waits for its release, as a range of
                                      Tables.after, start << 32 | stop; 0: nothing
    3            NEXT     node        the next in its queue, its list, or its heap's row of
                                      children, NOTHING: none

A level is a 64th of a slice: slice x LEVELS_PER_SLICE + the row's delay in levels. Columns 0 and 2
have two names, because no node needs both meanings at once.

    delays[i]    column     unit      meaning
    0            TICKS      ticks     how long delay i is
    1            FIRST      node      the first event of its queue, NOTHING: none
    2            LAST       node      the last event of its queue
    3            HEAP       delay     the delay at place i of the heap of delays
    4            HEAP_TIME  ticks     when the first event of that delay comes

    clock[i]     name         unit      meaning
    0            NOW          ticks     the time
    1            N_SLICES     slices    how many slices there are
    2            N_DONE       messages  how many are in place
    3            N_NODES      nodes     how many were ever taken from the pool
    4            FREE_NODES   node      the list of nodes given back
    5            IN_PLACE     node      the list of messages whose successors are to be started
    6            TO_ADD       node      the heap of messages that are to be added up as of now
    7            N_TO_CHOOSE  channels  how many are to choose what they start next
    8            N_FREED      chips     how many have just finished adding
    9            N_POSTED     delays    how many have events: the size of the heap of delays
    10           N_TRACED     hops      how many are in the trace
    11           CHIPS_LIMIT  0 or 1    whether adding up takes time
    12           HAS_WORK     0 or 1    whether messages take processors
    13           N_IDLE       processors  how many are free
    14           TO_WORK      node      the heap of messages that wait for a processor
"""

from typing import Final

import numpy as np

from meshmend.kernels import inlined

NOTHING: Final = -1  # no node
ROW_BITS: Final = 0xFFFFFFFF
REPEATS: Final = 1 << 40  # its row waits for nothing: when it starts, the next slice waits
ARRIVED: Final = 1 << 41  # it waits for a processor of its destination
STARTS: Final = 1 << 42  # it is no message, but what its rank does before anything else

# Columns of `nodes`.
TIME: Final = 0
CHILD: Final = 0
KEY: Final = 1
HOP: Final = 2
LEAVING: Final = 2
NEXT: Final = 3

# Columns of `delays`.
TICKS: Final = 0
FIRST: Final = 1
LAST: Final = 2
HEAP: Final = 3
HEAP_TIME: Final = 4
N_DELAY_COLUMNS: Final = 5
_ARITY: Final = 8  # children in the heap of delays: fewer levels, so fewer mispredicted branches

# Places in `clock`.
NOW: Final = 0
N_SLICES: Final = 1
N_DONE: Final = 2
N_NODES: Final = 3
FREE_NODES: Final = 4
IN_PLACE: Final = 5
TO_ADD: Final = 6
N_TO_CHOOSE: Final = 7
N_FREED: Final = 8
N_POSTED: Final = 9
N_TRACED: Final = 10
CHIPS_LIMIT: Final = 11
HAS_WORK: Final = 12
N_IDLE: Final = 13
TO_WORK: Final = 14
N_CLOCK: Final = 15


@inlined
def new_node(clock, nodes, key):  # type: ignore[no-untyped-def]
    """Return a node for a message, one that was given back if there is any."""
    node = clock[FREE_NODES]
    if node == NOTHING:
        node = clock[N_NODES]
        clock[N_NODES] += 1
    else:
        clock[FREE_NODES] = nodes[node, NEXT]
    nodes[node, KEY] = key
    return node


@inlined
def give_back(clock, nodes, node):  # type: ignore[no-untyped-def]
    nodes[node, NEXT] = clock[FREE_NODES]
    clock[FREE_NODES] = node


@inlined
def post(clock, nodes, delays, delay, node):  # type: ignore[no-untyped-def]
    """Post an event that comes after one of the delays."""
    time = clock[NOW] + delays[delay, TICKS]
    nodes[node, TIME] = time
    nodes[node, NEXT] = NOTHING
    if delays[delay, FIRST] == NOTHING:
        delays[delay, FIRST] = node
        _push_delay(clock, delays, delay, time)
    else:
        nodes[delays[delay, LAST], NEXT] = node
    delays[delay, LAST] = node


@inlined
def _push_delay(clock, delays, delay, time):  # type: ignore[no-untyped-def]
    """Add a delay to the heap, by the time of its first event."""
    at = clock[N_POSTED]
    clock[N_POSTED] += 1
    while at > 0:
        parent = (at - 1) // _ARITY
        if delays[parent, HEAP_TIME] <= time:
            break
        delays[at, HEAP], delays[at, HEAP_TIME] = delays[parent, HEAP], delays[parent, HEAP_TIME]
        at = parent
    delays[at, HEAP], delays[at, HEAP_TIME] = delay, time


@inlined
def sink_top(clock, nodes, delays):  # type: ignore[no-untyped-def]
    """Restore the heap of delays after events were taken from the queue of its top, perhaps all."""
    delay = delays[0, HEAP]
    if delays[delay, FIRST] == NOTHING:
        clock[N_POSTED] -= 1
        delay, time = delays[clock[N_POSTED], HEAP], delays[clock[N_POSTED], HEAP_TIME]
    else:
        time = nodes[delays[delay, FIRST], TIME]
    size = clock[N_POSTED]
    at = 0
    while _ARITY * at + 1 < size:
        child = _ARITY * at + 1
        earliest = delays[child, HEAP_TIME]
        for other in range(child + 1, min(child + _ARITY, size)):
            other_time = delays[other, HEAP_TIME]
            child = other if other_time < earliest else child
            earliest = min(earliest, other_time)
        if time <= earliest:
            break
        delays[at, HEAP], delays[at, HEAP_TIME] = delays[child, HEAP], earliest
        at = child
    delays[at, HEAP], delays[at, HEAP_TIME] = delay, time


@inlined
def meld(nodes, one, other):  # type: ignore[no-untyped-def]
    """Join two pairing heaps; return the top."""
    if one == NOTHING:
        return other
    if nodes[other, KEY] < nodes[one, KEY]:
        one, other = other, one
    nodes[other, NEXT] = nodes[one, CHILD]
    nodes[one, CHILD] = other
    return one


@inlined
def without_top(nodes, top):  # type: ignore[no-untyped-def]
    """Remove the top of a pairing heap; return the next: meld children in pairs, then all."""
    pairs = NOTHING
    child = nodes[top, CHILD]
    while child != NOTHING:
        second = nodes[child, NEXT]
        following = NOTHING
        if second != NOTHING:
            following = nodes[second, NEXT]
            child = meld(nodes, child, second)
        nodes[child, NEXT] = pairs
        pairs = child
        child = following
    result = np.int64(NOTHING)
    while pairs != NOTHING:
        following = nodes[pairs, NEXT]
        result = meld(nodes, result, pairs)
        pairs = following
    return result
