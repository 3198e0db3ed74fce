"""What waits for what within a program: what a key that is done lets go.

A key is one move of one slice. One that is to be sent and waits for nothing enters the heap of
its peer; one that came before its turn lies on the shelf until then. Knows no connection.
"""

from meshmend.execute.combine import combine_at
from meshmend.execute.frames import (
    ARENA,
    CODE,
    FOLLOWING,
    HEAP_BASE,
    HEAP_SIZE,
    KIND,
    LEFT,
    N_MOVES,
    NEEDS,
    PAYLOAD,
    PEER,
    SHELF,
    SHELVED,
    SIZE,
    START,
    STATE,
)
from meshmend.execute.libc import copy_memory
from meshmend.execute.rank_program import ADD, SEND
from meshmend.kernels import plain_kernel


@plain_kernel
def finish(e, key):  # type: ignore[no-untyped-def]
    """Count a key as done, and all that is done by that."""
    e.stack[0] = key
    top = 1
    while top > 0:
        top -= 1
        key = e.stack[top]
        e.numbers[LEFT] -= 1
        move = key % e.numbers[N_MOVES]
        for at in range(e.moves[FOLLOWING, move], e.moves[FOLLOWING, move + 1]):
            freed = key - move + e.following[at]
            e.keys[NEEDS, freed] -= 1
            if e.keys[NEEDS, freed] == 0 and release(e, freed):
                e.stack[top] = freed
                top += 1


@plain_kernel
def release(e, key):  # type: ignore[no-untyped-def]
    """Let a key go that waits for nothing more; return whether it is done by that."""
    move = key % e.numbers[N_MOVES]
    if e.keys[SIZE, key] == 0:
        return True
    if e.moves[KIND, move] == SEND:
        _heap_push(e, e.moves[PEER, move], key)
        return False
    if e.keys[STATE, key] != SHELVED:
        return False
    take_from_shelf(e, key)
    return True


@plain_kernel
def take_from_shelf(e, key):  # type: ignore[no-untyped-def]
    """Write or add what came early to where it belongs."""
    place = e.numbers[PAYLOAD] + e.keys[START, key]
    shelf = e.numbers[ARENA] + e.keys[SHELF, key]
    if e.moves[KIND, key % e.numbers[N_MOVES]] == ADD:
        combine_at(e.numbers[CODE], place, shelf, e.keys[SIZE, key])
    else:
        copy_memory(place, shelf, e.keys[SIZE, key])


@plain_kernel
def _heap_push(e, peer, key):  # type: ignore[no-untyped-def]
    base, at = e.links[peer, HEAP_BASE], e.links[peer, HEAP_SIZE]
    e.links[peer, HEAP_SIZE] = at + 1
    while at > 0 and e.heap[base + (at - 1) // 2] > key:
        e.heap[base + at] = e.heap[base + (at - 1) // 2]
        at = (at - 1) // 2
    e.heap[base + at] = key


@plain_kernel
def heap_pop(e, peer):  # type: ignore[no-untyped-def]
    """Take the smallest key from a peer's heap: the last one sinks from the top."""
    base, size = e.links[peer, HEAP_BASE], e.links[peer, HEAP_SIZE] - 1
    first, last = e.heap[base], e.heap[base + size]
    e.links[peer, HEAP_SIZE] = size
    at, child = 0, 1
    while child < size:
        if child + 1 < size and e.heap[base + child + 1] < e.heap[base + child]:
            child += 1
        if e.heap[base + child] >= last:
            break
        e.heap[base + at] = e.heap[base + child]
        at, child = child, 2 * child + 1
    e.heap[base + at] = last
    return first
