"""Tracks which keys of a run are done, and releases those that waited for them.

A key is one move of one slice. A key to send enters the heap of its peer when it waits for nothing
more. Data that arrived too early stays in the staging buffer until its key is released. This module
uses no connection.
"""

from meshmend.kernels import inlined, plain_kernel
from meshmend.transport.combine import combine_at
from meshmend.transport.frames import (
    CODE,
    FOLLOWING,
    HEAP_BASE,
    HEAP_SIZE,
    KIND,
    LEFT,
    N_MOVES,
    N_READY,
    NEEDS,
    PAYLOAD,
    PEER,
    SIZE,
    SOURCE,
    STAGED,
    STAGING,
    STAGING_OFFSET,
    START,
    STATE,
)
from meshmend.transport.libc import copy_memory
from meshmend.transport.rank_program import ADD, LOCAL_ADD, SEND


@plain_kernel
def finish(e, key):  # type: ignore[no-untyped-def]
    """Mark a key as done, and release the keys that waited for it."""
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
    """Release a key that waits for nothing more; return whether this also makes it done."""
    move = key % e.numbers[N_MOVES]
    if e.keys[SIZE, key] == 0:
        return True
    if e.moves[KIND, move] == SEND:
        _heap_push(e, e.moves[PEER, move], key)
        return False
    if e.moves[KIND, move] >= LOCAL_ADD:
        _apply_local(e, key)
        return True
    if e.keys[STATE, key] != STAGED:
        return False
    apply_staged(e, key)
    return True


@inlined
def address_of(e, start):  # type: ignore[no-untyped-def]
    """Return the address of a place in the payload, or in scratch if it is below zero."""
    return e.numbers[PAYLOAD] + start if start >= 0 else e.numbers[STAGING] + ~start


@plain_kernel
def _apply_local(e, key):  # type: ignore[no-untyped-def]
    """Copy or add from one buffer of this rank to another."""
    place, source = address_of(e, e.keys[START, key]), address_of(e, e.keys[SOURCE, key])
    if e.moves[KIND, key % e.numbers[N_MOVES]] == LOCAL_ADD:
        combine_at(e.numbers[CODE], place, source, e.keys[SIZE, key])
    else:
        copy_memory(place, source, e.keys[SIZE, key])


@plain_kernel
def apply_staged(e, key):  # type: ignore[no-untyped-def]
    """Copy or add staged data to its place."""
    place = address_of(e, e.keys[START, key])
    staged = e.numbers[STAGING] + e.keys[STAGING_OFFSET, key]
    if e.moves[KIND, key % e.numbers[N_MOVES]] == ADD:
        combine_at(e.numbers[CODE], place, staged, e.keys[SIZE, key])
    else:
        copy_memory(place, staged, e.keys[SIZE, key])


@plain_kernel
def _heap_push(e, peer, key):  # type: ignore[no-untyped-def]
    base, at = e.ports[peer, HEAP_BASE], e.ports[peer, HEAP_SIZE]
    e.ports[peer, HEAP_SIZE] = at + 1
    e.links[peer, N_READY] += 1
    while at > 0 and e.heap[base + (at - 1) // 2] > key:
        e.heap[base + at] = e.heap[base + (at - 1) // 2]
        at = (at - 1) // 2
    e.heap[base + at] = key


@plain_kernel
def heap_pop(e, peer):  # type: ignore[no-untyped-def]
    """Remove the smallest key from a peer's heap and return it."""
    base, size = e.ports[peer, HEAP_BASE], e.ports[peer, HEAP_SIZE] - 1
    first, last = e.heap[base], e.heap[base + size]
    e.ports[peer, HEAP_SIZE] = size
    e.links[peer, N_READY] -= 1
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
