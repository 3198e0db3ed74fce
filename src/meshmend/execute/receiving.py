"""Reads the frames of one peer: writes, adds or stages their bytes, and marks keys as done.

A frame of an older generation is read and dropped. A frame of a later collective waits until this
rank begins that collective. This is safe: its sender has already sent this rank all frames of the
collectives before.
"""

import numpy as np

from meshmend.execute.combine import combine_at
from meshmend.execute.frames import (
    BAD_FRAME,
    BEGUN,
    BLOCK_BYTES,
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
    FREE,
    GAVE_UP,
    HEADER_BYTES,
    HEAP_SIZE,
    IN_DONE,
    IN_EXPECTED,
    IN_HEADER,
    IN_KEY,
    IN_MODE,
    IN_PARKED,
    IN_WORDS,
    KIND,
    LENGTH_WORD,
    LOST,
    MISMATCH,
    N_MOVES,
    NEEDS,
    NONE,
    OUT_KEY,
    PAYLOAD,
    PEER,
    PEER_FAILED,
    ROW,
    ROW_WORD,
    SCRATCH,
    SIZE,
    STAGE,
    STAGED,
    STAGING,
    STAGING_OFFSET,
    START,
    STATE,
    TURN,
)
from meshmend.execute.keys import apply_staged, finish
from meshmend.execute.libc import EAGAIN, EINTR, receive
from meshmend.execute.rank_program import ADD, SEND
from meshmend.kernels import kernel, plain_kernel


@kernel
def pull(e, peer):  # type: ignore[no-untyped-def]
    """Read what one peer has sent, with at most TURN system calls; return a status."""
    for _ in range(TURN):
        if e.links[peer, IN_PARKED]:
            return DONE
        in_header = e.links[peer, IN_HEADER]
        if in_header < HEADER_BYTES:
            address = e.links[peer, IN_WORDS:].ctypes.data + in_header
            n_wanted = HEADER_BYTES - in_header
        else:
            address, n_wanted = _target(e, peer)
        n_read = receive(e.links[peer, FD], address, n_wanted)
        if n_read == -EINTR:
            continue
        if n_read == -EAGAIN:
            return DONE
        if n_read <= 0:
            return _mark_closed(e, peer)
        if in_header == HEADER_BYTES:
            _count_payload(e, peer, n_read)
            continue
        e.links[peer, IN_HEADER] += n_read
        if e.links[peer, IN_HEADER] == HEADER_BYTES:
            status = open_frame(e, peer)
            if status != DONE:
                return status
    return DONE


@plain_kernel
def _mark_closed(e, peer):  # type: ignore[no-untyped-def]
    """Mark a peer as closed; return LOST if one end still has data for the other, else DONE."""
    e.links[peer, CLOSED] = 1
    has_to_receive = e.links[peer, IN_EXPECTED] > 0 or e.links[peer, IN_HEADER] > 0
    has_to_send = e.links[peer, HEAP_SIZE] > 0 or e.links[peer, OUT_KEY] != NONE
    return LOST if has_to_receive or has_to_send else DONE


@plain_kernel
def open_frame(e, peer):  # type: ignore[no-untyped-def]
    """Decide from a complete header where its payload goes; return a status."""
    call = e.links[peer, IN_WORDS + CALL_WORD]
    generations_ahead = (call >> 32) - (e.numbers[CALL] >> 32)
    if e.links[peer, IN_WORDS + ROW_WORD] == GAVE_UP and generations_ahead >= 0:
        return PEER_FAILED
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
        return BAD_FRAME
    e.keys[STATE, key] = BEGUN
    e.links[peer, IN_KEY] = key
    if e.keys[NEEDS, key] > 0:
        e.links[peer, IN_MODE] = STAGE
    else:
        is_sum = e.moves[KIND, key % e.numbers[N_MOVES]] == ADD
        e.links[peer, IN_MODE] = DIRECT_ADD if is_sum else DIRECT_PUT
    return DONE


@plain_kernel
def _key_of(e, peer):  # type: ignore[no-untyped-def]
    """Return the key that a header names, or -1 if no such frame is expected from this peer."""
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
    is_receive = e.moves[ROW, low] == row and e.moves[KIND, low] != SEND
    is_expected = e.moves[PEER, low] == peer and e.keys[STATE, key] == FREE
    fits = e.links[peer, IN_WORDS + LENGTH_WORD] == e.keys[SIZE, key]
    return key if is_receive and is_expected and fits else np.int64(-1)


@plain_kernel
def _target(e, peer):  # type: ignore[no-untyped-def]
    """Return the address for the next bytes of the current frame, and how many to read at most."""
    done, mode, key = (
        e.links[peer, IN_DONE],
        e.links[peer, IN_MODE],
        e.links[peer, IN_KEY],
    )
    n_left = e.links[peer, IN_WORDS + LENGTH_WORD] - done
    if mode == DIRECT_PUT:
        return e.numbers[PAYLOAD] + e.keys[START, key] + done, n_left
    if mode == STAGE:
        return e.numbers[STAGING] + e.keys[STAGING_OFFSET, key] + done, n_left
    in_block = done % BLOCK_BYTES
    address = e.numbers[SCRATCH] + peer * BLOCK_BYTES + in_block
    return address, min(BLOCK_BYTES - in_block, n_left)


@plain_kernel
def _count_payload(e, peer, n_read):  # type: ignore[no-untyped-def]
    """Count payload bytes that were read; add a full block; finish the key of a complete frame."""
    key, mode = e.links[peer, IN_KEY], e.links[peer, IN_MODE]
    in_block = e.links[peer, IN_DONE] % BLOCK_BYTES + n_read
    done = e.links[peer, IN_DONE] + n_read
    e.links[peer, IN_DONE] = done
    is_complete = done == e.links[peer, IN_WORDS + LENGTH_WORD]
    if mode == DIRECT_ADD and (is_complete or in_block == BLOCK_BYTES):
        place = e.numbers[PAYLOAD] + e.keys[START, key] + done - in_block
        combine_at(e.numbers[CODE], place, e.numbers[SCRATCH] + peer * BLOCK_BYTES, in_block)
    if not is_complete:
        return
    e.links[peer, IN_HEADER] = 0
    if mode == DROP:
        return
    e.links[peer, IN_EXPECTED] -= 1
    if mode == STAGE:
        e.keys[STATE, key] = STAGED
        if e.keys[NEEDS, key] > 0:
            return
        apply_staged(e, key)
    finish(e, key)
