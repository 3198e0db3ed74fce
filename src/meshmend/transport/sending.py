"""Sends frames to one peer: of the oldest run that may send, the smallest ready key."""

import numpy as np

from meshmend.kernels import kernel, plain_kernel
from meshmend.transport.checksum import checksum_at, header_checksum, payload_checksum
from meshmend.transport.engine import end_if_done, engine_of, must_announce, next_run
from meshmend.transport.frames import (
    ANNOUNCED,
    BLOCK_BYTES,
    BLOCKED,
    CALL,
    CALL_WORD,
    CHECK_WORD,
    CLOSED,
    DONE,
    FD,
    FINGERPRINT,
    FINGERPRINT_WORD,
    HEADER_BYTES,
    LENGTH_WORD,
    LOST,
    N_MOVES,
    N_TO_SEND,
    NONE,
    OUT_AT,
    OUT_DONE,
    OUT_KEY,
    OUT_SLOT,
    OUT_WORDS,
    PAYLOAD_WORD,
    ROW,
    ROW_WORD,
    SIZE,
    START,
    STARTED,
    SUMS_PAYLOADS,
    TAIL,
    TO_ANNOUNCE,
    TURN,
    UNSENT,
)
from meshmend.transport.keys import address_of, finish, heap_pop
from meshmend.transport.libc import EAGAIN, EINTR, send_two


@kernel
def push(loop, peer, message, parts, void):  # type: ignore[no-untyped-def]
    """Send ready keys to one peer until its connection blocks, with at most TURN system calls.

    `message` and `parts` are scratch; `void` is an address with a block of bytes that nobody reads.
    """
    links = loop.links
    for _ in range(TURN):
        if links[peer, OUT_KEY] == NONE:
            if not _begin_frame(loop, peer):
                return DONE
            if links[peer, CLOSED]:
                return LOST
        key, length = links[peer, OUT_KEY], links[peer, OUT_WORDS + LENGTH_WORD]
        in_header = min(links[peer, OUT_DONE], HEADER_BYTES)
        in_body = links[peer, OUT_DONE] - in_header
        parts[0] = links[peer, OUT_WORDS:].ctypes.data + in_header
        parts[1] = HEADER_BYTES - in_header
        parts[2] = links[peer, OUT_AT] + in_body
        parts[3] = length - in_body
        if key == TAIL:
            parts[2], parts[3] = void, min(parts[3], BLOCK_BYTES)
        n_sent = send_two(links[peer, FD], message, parts)
        if n_sent < 0:
            if n_sent == -EINTR:
                continue
            return BLOCKED if n_sent == -EAGAIN else LOST
        links[peer, OUT_DONE] += n_sent
        if links[peer, OUT_DONE] == HEADER_BYTES + length:
            links[peer, OUT_KEY] = NONE
            if key != TAIL:
                _finish_sent(loop, links[peer, OUT_SLOT], key)
    return DONE


@plain_kernel
def _finish_sent(loop, slot, key):  # type: ignore[no-untyped-def]
    finish(engine_of(loop, slot), key)
    end_if_done(loop, slot)


@plain_kernel
def _begin_frame(loop, peer):  # type: ignore[no-untyped-def]
    """Begin the frame that is next for a peer; return whether there is one."""
    links = loop.links
    if must_announce(links[peer]):
        links[peer, ANNOUNCED] = links[peer, TO_ANNOUNCE]
        links[peer, OUT_WORDS + CALL_WORD] = links[peer, TO_ANNOUNCE]
        links[peer, OUT_WORDS + ROW_WORD] = STARTED
        links[peer, OUT_WORDS + LENGTH_WORD] = 0
        links[peer, OUT_WORDS + FINGERPRINT_WORD] = 0
        links[peer, OUT_WORDS + PAYLOAD_WORD] = 0
        links[peer, OUT_KEY] = TAIL
    else:
        slot = next_run(loop, peer)
        if slot == NONE:
            return False
        _begin_key(engine_of(loop, slot), peer)
        links[peer, OUT_SLOT] = slot
        if loop.numbers[SUMS_PAYLOADS]:
            length = links[peer, OUT_WORDS + LENGTH_WORD]
            parts = checksum_at(links[peer, OUT_AT], length, np.int64(0))
            links[peer, OUT_WORDS + PAYLOAD_WORD] = payload_checksum(parts)
    links[peer, OUT_WORDS + CHECK_WORD] = header_checksum(links[peer, OUT_WORDS:])
    links[peer, OUT_DONE] = 0
    return True


@plain_kernel
def _begin_key(e, peer):  # type: ignore[no-untyped-def]
    key = heap_pop(e, peer)
    move = key % e.numbers[N_MOVES]
    e.ports[peer, UNSENT] -= 1
    e.links[peer, N_TO_SEND] -= 1
    e.links[peer, OUT_WORDS + CALL_WORD] = e.numbers[CALL]
    e.links[peer, OUT_WORDS + ROW_WORD] = (key // e.numbers[N_MOVES]) << 32 | e.moves[ROW, move]
    e.links[peer, OUT_WORDS + LENGTH_WORD] = e.keys[SIZE, key]
    e.links[peer, OUT_WORDS + FINGERPRINT_WORD] = e.numbers[FINGERPRINT]
    e.links[peer, OUT_WORDS + PAYLOAD_WORD] = 0
    e.links[peer, OUT_AT] = address_of(e, e.keys[START, key])
    e.links[peer, OUT_KEY] = key
