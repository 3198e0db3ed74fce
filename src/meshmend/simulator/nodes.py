"""Where messages wait: a pool of nodes, queues of events by delay, and heaps by priority.

Every delay that occurs is one of few, and events of one delay are posted in order of time, so
each delay has a queue, first in first out, and the only heap of events is one over the delays.
Queues, heaps and lists are linked through one pool of nodes, of which a message in flight has
one. Knows nothing of channels, chips or what an event means.
"""

from typing import Final

import numpy as np

from meshmend.kernels import inlined

NOTHING: Final = -1  # no node
ROW_BITS: Final = 0xFFFFFFFF
REPEATS: Final = 1 << 40  # of a row that waits for nothing: when it goes, the next slice waits
LEVELS_PER_SLICE: Final = 64  # a message's level is its slice times this, plus its row's lag

# Columns of `nodes`. A node is posted with a time, or sits in a heap with a child.
TIME: Final = 0
CHILD: Final = 0
KEY: Final = 1  # level << 32 | row: the smaller goes first
HOP: Final = 2  # where its channel stands, and perhaps REPEATS
LEAVING: Final = 2  # of a channel's own node: what its release sets off, start << 32 | stop
NEXT: Final = 3

# Columns of `delays`: a delay, its queue of events, and one place of the heap of delays with the
# time of the first event of the delay that is there.
TICKS: Final = 0
FIRST: Final = 1
LAST: Final = 2
HEAP: Final = 3
HEAP_TIME: Final = 4
N_DELAY_COLUMNS: Final = 5
_ARITY: Final = 8  # children in that heap: to look at all is faster than branches nobody foresees

# Places in `clock`.
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
    """Bring the heap in order after its top took events from its queue, perhaps all of them."""
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
    """Return the top of two pairing heaps made one."""
    if one == NOTHING:
        return other
    if nodes[other, KEY] < nodes[one, KEY]:
        one, other = other, one
    nodes[other, NEXT] = nodes[one, CHILD]
    nodes[one, CHILD] = other
    return one


@inlined
def without_top(nodes, top):  # type: ignore[no-untyped-def]
    """Return the top of a pairing heap without its top: meld children in pairs, then all."""
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
