"""Sends frames to one peer: the ready keys, the smallest first."""

from meshmend.execute.frames import (
    BLOCK_BYTES,
    BLOCKED,
    CALL,
    CALL_WORD,
    CLOSED,
    DONE,
    FD,
    FINGERPRINT,
    FINGERPRINT_WORD,
    HEADER_BYTES,
    HEAP_SIZE,
    LENGTH_WORD,
    LOST,
    N_MOVES,
    NONE,
    OUT_DONE,
    OUT_KEY,
    OUT_WORDS,
    PAYLOAD,
    ROW,
    ROW_WORD,
    SCRATCH,
    SIZE,
    START,
    TAIL,
    TURN,
)
from meshmend.execute.keys import finish, heap_pop
from meshmend.execute.libc import EAGAIN, EINTR, send_two
from meshmend.kernels import kernel, plain_kernel


@kernel
def push(e, peer, message, parts):  # type: ignore[no-untyped-def]
    """Send ready keys to one peer until its connection blocks, with at most TURN system calls."""
    for _ in range(TURN):
        if e.links[peer, OUT_KEY] == NONE:
            if e.links[peer, HEAP_SIZE] == 0:
                return DONE
            if e.links[peer, CLOSED]:
                return LOST
            _begin_frame(e, peer, heap_pop(e, peer))
        key, length = e.links[peer, OUT_KEY], e.links[peer, OUT_WORDS + LENGTH_WORD]
        in_header = min(e.links[peer, OUT_DONE], HEADER_BYTES)
        in_body = e.links[peer, OUT_DONE] - in_header
        parts[0] = e.links[peer, OUT_WORDS:].ctypes.data + in_header
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
                finish(e, key)
    return DONE


@plain_kernel
def _begin_frame(e, peer, key):  # type: ignore[no-untyped-def]
    move = key % e.numbers[N_MOVES]
    e.links[peer, OUT_WORDS + CALL_WORD] = e.numbers[CALL]
    e.links[peer, OUT_WORDS + ROW_WORD] = (key // e.numbers[N_MOVES]) << 32 | e.moves[ROW, move]
    e.links[peer, OUT_WORDS + LENGTH_WORD] = e.keys[SIZE, key]
    e.links[peer, OUT_WORDS + FINGERPRINT_WORD] = e.numbers[FINGERPRINT]
    e.links[peer, OUT_KEY] = key
    e.links[peer, OUT_DONE] = 0
