"""The event loop of one rank over its connections, compiled, without the interpreter lock.

Sends what is ready, the smallest key first; reads whichever peer has data; writes or adds it as
soon as what it waits for is done, else shelves it. Never waits for one peer while another has
data. Knows descriptors and bytes; who the peers are and how they were let in is not its business.

A frame of an older generation is read and dropped. A frame of a later collective waits until
this rank gets there, which is safe: its sender has sent all that it owes to this one.
"""

import numpy as np
from numba import njit

from meshmend.execute.combine import bind_combine, combine_at
from meshmend.execute.frames import (
    ARENA,
    BEGUN,
    BLOCK_BYTES,
    BLOCKED,
    CALL,
    CALL_WORD,
    CLOSED,
    CODE,
    DIRECT_ADD,
    DIRECT_PUT,
    DONE,
    DROP,
    FD,
    FINGERPRINT,
    FINGERPRINT_WORD,
    FIRST_NEEDS,
    FOLLOWING,
    FREE,
    GAVE_UP,
    HEADER_BYTES,
    HEAP_BASE,
    HEAP_SIZE,
    IN_DONE,
    IN_EXPECTED,
    IN_HEADER,
    IN_KEY,
    IN_MODE,
    IN_PARKED,
    IN_WORDS,
    INTERRUPTED,
    KIND,
    LEFT,
    LENGTH_WORD,
    LOST,
    MISMATCH,
    N_LINK_COLUMNS,
    N_MOVES,
    NEEDS,
    NONE,
    NONSENSE,
    OUT_DONE,
    OUT_KEY,
    OUT_WORDS,
    PAYLOAD,
    PEER,
    ROW,
    ROW_WORD,
    SCRATCH,
    SHELF,
    SHELVE,
    SHELVED,
    SIZE,
    START,
    STATE,
    TAIL,
    TIMED_OUT,
    TOLD,
    Engine,
)
from meshmend.execute.libc import (
    EAGAIN,
    EINTR,
    POLLIN,
    POLLOUT,
    copy_memory,
    receive,
    send_two,
    wait,
)
from meshmend.execute.program import ADD, SEND

TURN = 64  # calls of the system in a row for one peer while others may have data


def load_engine() -> None:
    """Compile `progress`, or load it, by running it on nothing."""
    bind_combine()
    table, line = np.zeros((5, 0), dtype=np.int64), np.zeros(0, dtype=np.int64)
    links = np.zeros((1, N_LINK_COLUMNS), dtype=np.int64)
    nothing = Engine(table, line, table, line, line, links, np.zeros(8, dtype=np.int64))
    progress(nothing, line, -1, 0)


@njit(cache=True, nogil=True)
def progress(e, peers, stop_fd, timeout_ms):  # type: ignore[no-untyped-def]
    """Run a program to its end; return (DONE, -1), or what stopped it and the peer.

    Stops at once when `stop_fd` can be read, and when nothing moves for `timeout_ms`.
    """
    waits = np.zeros((len(peers) + 1, 2), dtype=np.int32)
    waits[len(peers), 0] = stop_fd
    waits[len(peers), 1] = POLLIN
    message, parts = np.zeros(7, dtype=np.int64), np.zeros(4, dtype=np.int64)
    status, culprit = _begin(e, peers)
    if status != DONE:
        return status, culprit
    while e.numbers[LEFT] > 0:
        for peer in peers:
            if _push(e, peer, message, parts) == LOST:
                status = _pull(e, peer)  # it may have said why before it closed
                return (status if status == TOLD else LOST), peer
        if e.numbers[LEFT] == 0:
            break
        _enter_waits(e, peers, waits)
        n_ready = wait(waits, timeout_ms)
        if n_ready == 0:
            return TIMED_OUT, np.int64(-1)
        if waits[len(peers), 1] >> 16:
            return INTERRUPTED, np.int64(-1)
        for at in range(len(peers)):
            if (waits[at, 1] >> 16) & ~POLLOUT:
                status = _pull(e, peers[at])
                if status != DONE:
                    return status, peers[at]
    return DONE, np.int64(-1)


@njit(cache=True, nogil=True)
def _begin(e, peers):  # type: ignore[no-untyped-def]
    """Count what each peer owes, release what waits for nothing, take up parked headers."""
    for key in range(e.keys.shape[1]):
        move = key % e.numbers[N_MOVES]
        if e.moves[KIND, move] != SEND and e.keys[SIZE, key] > 0:
            e.links[e.moves[PEER, move], IN_EXPECTED] += 1
    for peer in peers:
        if e.links[peer, CLOSED] and e.links[peer, IN_EXPECTED] > 0:
            return LOST, peer
        if e.links[peer, IN_PARKED]:
            e.links[peer, IN_PARKED] = 0
            status = _open_frame(e, peer)
            if status != DONE:
                return status, peer
    for key in range(e.keys.shape[1]):
        if e.moves[FIRST_NEEDS, key % e.numbers[N_MOVES]] == 0 and _release(e, key):
            _finish(e, key)
    return DONE, np.int64(-1)


@njit(cache=True, nogil=True)
def _enter_waits(e, peers, waits):  # type: ignore[no-untyped-def]
    for at in range(len(peers)):
        peer = peers[at]
        events = 0 if e.links[peer, IN_PARKED] or e.links[peer, CLOSED] else POLLIN
        if e.links[peer, OUT_KEY] != NONE or e.links[peer, HEAP_SIZE]:
            events |= POLLOUT
        waits[at, 0] = e.links[peer, FD] if events else -1
        waits[at, 1] = events


@njit(cache=True, nogil=True)
def _finish(e, key):  # type: ignore[no-untyped-def]
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
            if e.keys[NEEDS, freed] == 0 and _release(e, freed):
                e.stack[top] = freed
                top += 1


@njit(cache=True, nogil=True)
def _release(e, key):  # type: ignore[no-untyped-def]
    """Let a key go that waits for nothing more; return whether it is done by that."""
    move = key % e.numbers[N_MOVES]
    if e.keys[SIZE, key] == 0:
        return True
    if e.moves[KIND, move] == SEND:
        _heap_push(e, e.moves[PEER, move], key)
        return False
    if e.keys[STATE, key] != SHELVED:
        return False
    _take_from_shelf(e, key)
    return True


@njit(cache=True, nogil=True)
def _take_from_shelf(e, key):  # type: ignore[no-untyped-def]
    place = e.numbers[PAYLOAD] + e.keys[START, key]
    shelf = e.numbers[ARENA] + e.keys[SHELF, key]
    if e.moves[KIND, key % e.numbers[N_MOVES]] == ADD:
        combine_at(e.numbers[CODE], place, shelf, e.keys[SIZE, key])
    else:
        copy_memory(place, shelf, e.keys[SIZE, key])


@njit(cache=True, nogil=True)
def _push(e, peer, message, parts):  # type: ignore[no-untyped-def]
    """Send what is ready for one peer until its connection is full."""
    for _ in range(TURN):
        if e.links[peer, OUT_KEY] == NONE:
            if e.links[peer, HEAP_SIZE] == 0:
                return DONE
            if e.links[peer, CLOSED]:
                return LOST
            _begin_frame(e, peer, _heap_pop(e, peer))
        key, length = e.links[peer, OUT_KEY], e.links[peer, OUT_WORDS + LENGTH_WORD]
        in_header = min(e.links[peer, OUT_DONE], HEADER_BYTES)
        in_body = e.links[peer, OUT_DONE] - in_header
        parts[0] = _address_of(e, peer, OUT_WORDS) + in_header
        parts[1] = HEADER_BYTES - in_header
        parts[2] = e.numbers[PAYLOAD] + e.keys[START, max(key, 0)] + in_body
        parts[3] = length - in_body
        if key == TAIL:
            parts[2], parts[3] = e.numbers[SCRATCH], min(parts[3], BLOCK_BYTES)
        n_sent = send_two(e.links[peer, FD], message, parts)
        if n_sent < 0:
            if n_sent == -EINTR:
                continue
            return BLOCKED if n_sent == -EAGAIN else LOST
        e.links[peer, OUT_DONE] += n_sent
        if e.links[peer, OUT_DONE] == HEADER_BYTES + length:
            e.links[peer, OUT_KEY] = NONE
            if key != TAIL:
                _finish(e, key)
    return DONE


@njit(cache=True, nogil=True)
def _address_of(e, peer, column):  # type: ignore[no-untyped-def]
    return e.links.ctypes.data + 8 * (peer * N_LINK_COLUMNS + column)


@njit(cache=True, nogil=True)
def _begin_frame(e, peer, key):  # type: ignore[no-untyped-def]
    move = key % e.numbers[N_MOVES]
    e.links[peer, OUT_WORDS + CALL_WORD] = e.numbers[CALL]
    e.links[peer, OUT_WORDS + ROW_WORD] = (key // e.numbers[N_MOVES]) << 32 | e.moves[ROW, move]
    e.links[peer, OUT_WORDS + LENGTH_WORD] = e.keys[SIZE, key]
    e.links[peer, OUT_WORDS + FINGERPRINT_WORD] = e.numbers[FINGERPRINT]
    e.links[peer, OUT_KEY] = key
    e.links[peer, OUT_DONE] = 0


@njit(cache=True, nogil=True)
def _pull(e, peer):  # type: ignore[no-untyped-def]
    """Read what one peer has sent, until there is no more or it is another's turn."""
    for _ in range(TURN):
        if e.links[peer, IN_PARKED]:
            return DONE
        in_header = e.links[peer, IN_HEADER]
        if in_header < HEADER_BYTES:
            address = _address_of(e, peer, IN_WORDS) + in_header
            n_wanted = HEADER_BYTES - in_header
        else:
            address, n_wanted = _target(e, peer)
        n_read = receive(e.links[peer, FD], address, n_wanted)
        if n_read == -EINTR:
            continue
        if n_read == -EAGAIN:
            return DONE
        if n_read <= 0:
            return _hung_up(e, peer)
        if in_header == HEADER_BYTES:
            _absorb(e, peer, n_read)
            continue
        e.links[peer, IN_HEADER] += n_read
        if e.links[peer, IN_HEADER] == HEADER_BYTES:
            status = _open_frame(e, peer)
            if status != DONE:
                return status
    return DONE


@njit(cache=True, nogil=True)
def _hung_up(e, peer):  # type: ignore[no-untyped-def]
    """Note that a peer has closed: it may, if neither end owes the other anything more."""
    e.links[peer, CLOSED] = 1
    owes = e.links[peer, IN_EXPECTED] > 0 or e.links[peer, IN_HEADER] > 0
    is_owed = e.links[peer, HEAP_SIZE] > 0 or e.links[peer, OUT_KEY] != NONE
    return LOST if owes or is_owed else DONE


@njit(cache=True, nogil=True)
def _open_frame(e, peer):  # type: ignore[no-untyped-def]
    """Decide from a header that was read whole where its payload goes."""
    call = e.links[peer, IN_WORDS + CALL_WORD]
    generations_ahead = (call >> 32) - (e.numbers[CALL] >> 32)
    if e.links[peer, IN_WORDS + ROW_WORD] == GAVE_UP and generations_ahead >= 0:
        return TOLD
    e.links[peer, IN_DONE] = 0
    if generations_ahead < 0:
        e.links[peer, IN_MODE] = DROP
        if e.links[peer, IN_WORDS + LENGTH_WORD] == 0:
            e.links[peer, IN_HEADER] = 0
        return DONE
    if call > e.numbers[CALL]:
        e.links[peer, IN_PARKED] = 1
        is_early = generations_ahead > 0 or e.links[peer, IN_EXPECTED] == 0
        return DONE if is_early else MISMATCH
    if e.links[peer, IN_WORDS + FINGERPRINT_WORD] != e.numbers[FINGERPRINT]:
        return MISMATCH
    key = _key_of(e, peer) if call == e.numbers[CALL] else np.int64(-1)
    if key < 0:
        return NONSENSE
    e.keys[STATE, key] = BEGUN
    e.links[peer, IN_KEY] = key
    if e.keys[NEEDS, key] > 0:
        e.links[peer, IN_MODE] = SHELVE
    else:
        is_sum = e.moves[KIND, key % e.numbers[N_MOVES]] == ADD
        e.links[peer, IN_MODE] = DIRECT_ADD if is_sum else DIRECT_PUT
    return DONE


@njit(cache=True, nogil=True)
def _key_of(e, peer):  # type: ignore[no-untyped-def]
    """Return the key that a header names, or -1 if this peer does not owe it."""
    word = e.links[peer, IN_WORDS + ROW_WORD]
    part, row = word >> 32, word & 0xFFFFFFFF
    low, high = np.int64(0), e.numbers[N_MOVES]
    while low < high:
        middle = (low + high) // 2
        if e.moves[ROW, middle] < row:
            low = middle + 1
        else:
            high = middle
    key = part * e.numbers[N_MOVES] + low
    if part < 0 or low == e.numbers[N_MOVES] or key >= e.keys.shape[1]:
        return np.int64(-1)
    is_mine = e.moves[ROW, low] == row and e.moves[KIND, low] != SEND
    is_owed = e.moves[PEER, low] == peer and e.keys[STATE, key] == FREE
    fits = e.links[peer, IN_WORDS + LENGTH_WORD] == e.keys[SIZE, key]
    return key if is_mine and is_owed and fits else np.int64(-1)


@njit(cache=True, nogil=True)
def _target(e, peer):  # type: ignore[no-untyped-def]
    """Return where the next bytes of the frame under way go, and how many may come."""
    done, mode, key = (
        e.links[peer, IN_DONE],
        e.links[peer, IN_MODE],
        e.links[peer, IN_KEY],
    )
    n_left = e.links[peer, IN_WORDS + LENGTH_WORD] - done
    if mode == DIRECT_PUT:
        return e.numbers[PAYLOAD] + e.keys[START, key] + done, n_left
    if mode == SHELVE:
        return e.numbers[ARENA] + e.keys[SHELF, key] + done, n_left
    in_block = done % BLOCK_BYTES
    address = e.numbers[SCRATCH] + peer * BLOCK_BYTES + in_block
    return address, min(BLOCK_BYTES - in_block, n_left)


@njit(cache=True, nogil=True)
def _absorb(e, peer, n_read):  # type: ignore[no-untyped-def]
    """Count bytes that were read into place; add a block that is full; close a frame that is."""
    key, mode = e.links[peer, IN_KEY], e.links[peer, IN_MODE]
    in_block = e.links[peer, IN_DONE] % BLOCK_BYTES + n_read
    done = e.links[peer, IN_DONE] + n_read
    e.links[peer, IN_DONE] = done
    is_whole = done == e.links[peer, IN_WORDS + LENGTH_WORD]
    if mode == DIRECT_ADD and (is_whole or in_block == BLOCK_BYTES):
        place = e.numbers[PAYLOAD] + e.keys[START, key] + done - in_block
        combine_at(e.numbers[CODE], place, e.numbers[SCRATCH] + peer * BLOCK_BYTES, in_block)
    if not is_whole:
        return
    e.links[peer, IN_HEADER] = 0
    if mode == DROP:
        return
    e.links[peer, IN_EXPECTED] -= 1
    if mode == SHELVE:
        e.keys[STATE, key] = SHELVED
        if e.keys[NEEDS, key] > 0:
            return
        _take_from_shelf(e, key)
    _finish(e, key)


@njit(cache=True, nogil=True)
def _heap_push(e, peer, key):  # type: ignore[no-untyped-def]
    base, at = e.links[peer, HEAP_BASE], e.links[peer, HEAP_SIZE]
    e.links[peer, HEAP_SIZE] = at + 1
    while at > 0 and e.heap[base + (at - 1) // 2] > key:
        e.heap[base + at] = e.heap[base + (at - 1) // 2]
        at = (at - 1) // 2
    e.heap[base + at] = key


@njit(cache=True, nogil=True)
def _heap_pop(e, peer):  # type: ignore[no-untyped-def]
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
