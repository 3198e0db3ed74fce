"""Where messages wait: a pool of nodes, queues of events by delay, and heaps by priority.

Every delay that occurs is one of few, and events of one delay are posted in order of time, so
each delay has a queue, first in first out, and the only heap of events is one over the delays.
Queues, heaps and lists are linked through one pool of nodes, of which a message in flight has
one. Knows nothing of channels, chips or what an event means.
"""

from typing import Final

from numba import njit

# Nothing here makes an array, so Numba need not count references to them, which would take
# four fifths of the time.
kernel = njit(cache=True, nogil=True, _nrt=False)  # type: ignore[call-overload]  # not in Numba's stubs

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

# Columns of `delays`: a delay, its queue of events, and one place of the heap of delays.
TICKS: Final = 0
FIRST: Final = 1
LAST: Final = 2
HEAP: Final = 3

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


@kernel
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


@kernel
def give_back(clock, nodes, node):  # type: ignore[no-untyped-def]
    nodes[node, NEXT] = clock[FREE_NODES]
    clock[FREE_NODES] = node


@kernel
def post(clock, nodes, delays, delay, node):  # type: ignore[no-untyped-def]
    """Post an event that comes after one of the delays."""
    nodes[node, TIME] = clock[NOW] + delays[delay, TICKS]
    nodes[node, NEXT] = NOTHING
    if delays[delay, FIRST] == NOTHING:
        delays[delay, FIRST] = node
        push_delay(clock, nodes, delays, delay)
    else:
        nodes[delays[delay, LAST], NEXT] = node
    delays[delay, LAST] = node


@kernel
def push_delay(clock, nodes, delays, delay):  # type: ignore[no-untyped-def]
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


@kernel
def pop_delay(clock, nodes, delays):  # type: ignore[no-untyped-def]
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


@kernel
def meld(nodes, one, other):  # type: ignore[no-untyped-def]
    """Return the top of two pairing heaps made one."""
    if one == NOTHING:
        return other
    if nodes[other, KEY] < nodes[one, KEY]:
        one, other = other, one
    nodes[other, NEXT] = nodes[one, CHILD]
    nodes[one, CHILD] = other
    return one


@kernel
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
    result = NOTHING
    while pairs != NOTHING:
        following = nodes[pairs, NEXT]
        result = meld(nodes, result, pairs)
        pairs = following
    return result
