"""Reads the frames of one peer: writes, adds or stages their bytes, and marks keys as done.

A frame of an older generation is read and dropped. A frame of a run that has not begun on this rank
waits, and so does what the peer sends after it, until this rank begins that run. This cannot block
this rank: the peer has sent it all frames of older runs before, see `next_run`.

A header is believed only if it matches its checksum and every word of it is possible. What comes
after one that does not is never read: it is unknown where the next frame begins.
"""

import numpy as np

from meshmend.kernels import kernel, plain_kernel
from meshmend.transport.checksum import checksum_at, header_checksum, payload_checksum
from meshmend.transport.combine import combine_at
from meshmend.transport.engine import end_if_done, engine_of
from meshmend.transport.frames import (
    BAD_CALL,
    BAD_FRAME,
    BAD_HEADER,
    BAD_KEY,
    BAD_LENGTH,
    BAD_PAYLOAD,
    BEGUN,
    BLOCK_BYTES,
    CALL,
    CALL_WORD,
    CHECK_WORD,
    CLOSED,
    CODE,
    DIRECT_ADD,
    DIRECT_PUT,
    DONE,
    DROP,
    ENDED,
    FAULT,
    FD,
    FINGERPRINT,
    FINGERPRINT_WORD,
    FREE,
    GAVE_UP,
    GENERATION,
    HEADER_BYTES,
    IN_AT,
    IN_CHECKSUM,
    IN_DONE,
    IN_HEADER,
    IN_KEY,
    IN_MODE,
    IN_PARKED,
    IN_SLOT,
    IN_WORDS,
    KIND,
    LAST_BEGUN,
    LENGTH_WORD,
    LONGEST_FRAME,
    LONGEST_TEXT,
    LOST,
    MISMATCH,
    MOST_RUNS,
    N_MOVES,
    N_TO_COME,
    N_TO_SEND,
    NEEDS,
    NONE,
    NOT_SUMMED,
    OLDEST,
    OUT_KEY,
    PAYLOAD_WORD,
    PEER,
    PEER_FAILED,
    PEER_STARTED,
    ROW,
    ROW_WORD,
    SIZE,
    STAGE,
    STAGED,
    STAGING,
    STAGING_OFFSET,
    START,
    STARTED,
    STATE,
    SUMS_PAYLOADS,
    TURN,
)
from meshmend.transport.keys import address_of, apply_staged, finish
from meshmend.transport.libc import EAGAIN, EINTR, receive
from meshmend.transport.rank_program import ADD, LOCAL_ADD, SEND


@kernel
def pull(loop, peer, block):  # type: ignore[no-untyped-def]
    """Read what one peer has sent, with at most TURN system calls; return a status.

    `block` is the address of the peer's block of scratch.
    """
    links = loop.links
    for _ in range(TURN):
        if links[peer, IN_PARKED]:
            return DONE
        if links[peer, FAULT]:
            return BAD_FRAME
        in_header = links[peer, IN_HEADER]
        if in_header < HEADER_BYTES:
            address = links[peer, IN_WORDS:].ctypes.data + in_header
            n_wanted = HEADER_BYTES - in_header
        else:
            address, n_wanted = _target(links, peer, block)
        n_read = receive(links[peer, FD], address, n_wanted)
        if n_read == -EINTR:
            continue
        if n_read == -EAGAIN:
            return DONE
        if n_read <= 0:
            return _mark_closed(links, peer)
        if in_header == HEADER_BYTES:
            status = _count_payload(loop, peer, n_read, block)
            if status != DONE:
                return status
            continue
        links[peer, IN_HEADER] += n_read
        if links[peer, IN_HEADER] == HEADER_BYTES:
            status = _check_header(loop, peer)
            if status == DONE:
                status = open_frame(loop, peer)
            if status != DONE:
                return status
    return DONE


@plain_kernel
def _mark_closed(links, peer):  # type: ignore[no-untyped-def]
    """Mark a peer as closed; return LOST if one end still has data for the other, else DONE."""
    links[peer, CLOSED] = 1
    has_to_receive = links[peer, N_TO_COME] > 0 or links[peer, IN_HEADER] > 0
    has_to_send = links[peer, N_TO_SEND] > 0 or links[peer, OUT_KEY] != NONE
    return LOST if has_to_receive or has_to_send else DONE


@plain_kernel
def _bad_frame(links, peer, fault):  # type: ignore[no-untyped-def]
    """Read nothing more from a peer, because of a fault; return BAD_FRAME."""
    links[peer, FAULT] = fault
    links[peer, CLOSED] = 1
    links[peer, IN_HEADER] = 0
    return BAD_FRAME


@plain_kernel
def _check_header(loop, peer):  # type: ignore[no-untyped-def]
    """Check what can be checked of a header without the run that it belongs to; return a status."""
    links = loop.links
    words = links[peer, IN_WORDS:]
    if header_checksum(words) != words[CHECK_WORD]:
        return _bad_frame(links, peer, BAD_HEADER)
    shortest, longest = 1, LONGEST_FRAME
    if words[ROW_WORD] == STARTED:
        shortest, longest = 0, 0
    elif words[ROW_WORD] == GAVE_UP:
        shortest, longest = 0, LONGEST_TEXT
    if not shortest <= words[LENGTH_WORD] <= longest:
        return _bad_frame(links, peer, BAD_LENGTH)
    if words[CALL_WORD] < 0:
        return _bad_frame(links, peer, BAD_CALL)
    is_data = words[ROW_WORD] != STARTED and words[ROW_WORD] != GAVE_UP
    if is_data and words[ROW_WORD] < 0:
        return _bad_frame(links, peer, BAD_KEY)
    if is_data and loop.numbers[SUMS_PAYLOADS] and words[PAYLOAD_WORD] == 0:
        return _bad_frame(links, peer, NOT_SUMMED)
    return DONE


@plain_kernel
def open_frame(loop, peer):  # type: ignore[no-untyped-def]
    """Decide from a complete header that was checked where its payload goes; return a status."""
    links = loop.links
    call, row_word = links[peer, IN_WORDS + CALL_WORD], links[peer, IN_WORDS + ROW_WORD]
    if row_word == STARTED:
        links[peer, PEER_STARTED] = max(links[peer, PEER_STARTED], call)
        links[peer, IN_HEADER] = 0
        return DONE
    generations_ahead = (call >> 32) - loop.numbers[GENERATION]
    if row_word == GAVE_UP and generations_ahead >= 0:
        return PEER_FAILED
    links[peer, IN_DONE] = links[peer, IN_CHECKSUM] = 0
    if generations_ahead < 0:
        links[peer, IN_MODE] = DROP
        if links[peer, IN_WORDS + LENGTH_WORD] == 0:
            links[peer, IN_HEADER] = 0
        return DONE
    number = call & 0xFFFFFFFF
    if generations_ahead > 0 or number > loop.numbers[LAST_BEGUN]:
        links[peer, IN_PARKED] = 1
        is_early = generations_ahead > 0 or links[peer, N_TO_COME] == 0
        return DONE if is_early else MISMATCH
    slot = number % MOST_RUNS
    if number < loop.numbers[OLDEST] or loop.runs[slot, ENDED]:
        was_other = loop.runs[slot, FINGERPRINT] != links[peer, IN_WORDS + FINGERPRINT_WORD]
        if loop.runs[slot, CALL] == call and was_other:
            return MISMATCH
        return _bad_frame(links, peer, BAD_CALL)
    links[peer, IN_SLOT] = slot
    return _open_key(engine_of(loop, slot), peer)


@plain_kernel
def _open_key(e, peer):  # type: ignore[no-untyped-def]
    """Decide where the payload of a frame of a run goes; return a status."""
    if e.links[peer, IN_WORDS + FINGERPRINT_WORD] != e.numbers[FINGERPRINT]:
        return MISMATCH
    key = _key_of(e, peer)
    if key < 0:
        return _bad_frame(e.links, peer, BAD_KEY)
    e.keys[STATE, key] = BEGUN
    e.links[peer, IN_KEY] = key
    if e.keys[NEEDS, key] > 0:
        e.links[peer, IN_MODE] = STAGE
        e.links[peer, IN_AT] = e.numbers[STAGING] + e.keys[STAGING_OFFSET, key]
    else:
        is_sum = e.moves[KIND, key % e.numbers[N_MOVES]] == ADD
        e.links[peer, IN_MODE] = DIRECT_ADD if is_sum else DIRECT_PUT
        e.links[peer, IN_AT] = address_of(e, e.keys[START, key])
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
    is_receive = e.moves[ROW, low] == row and SEND < e.moves[KIND, low] < LOCAL_ADD
    is_expected = e.moves[PEER, low] == peer and e.keys[STATE, key] == FREE
    fits = e.links[peer, IN_WORDS + LENGTH_WORD] == e.keys[SIZE, key]
    return key if is_receive and is_expected and fits else np.int64(-1)


@plain_kernel
def _target(links, peer, block):  # type: ignore[no-untyped-def]
    """Return the address for the next bytes of the current frame, and how many to read at most."""
    done, mode = links[peer, IN_DONE], links[peer, IN_MODE]
    n_left = links[peer, IN_WORDS + LENGTH_WORD] - done
    if mode != DIRECT_ADD and mode != DROP:
        return links[peer, IN_AT] + done, n_left
    in_block = done % BLOCK_BYTES
    return block + in_block, min(BLOCK_BYTES - in_block, n_left)


@plain_kernel
def _count_payload(loop, peer, n_read, block):  # type: ignore[no-untyped-def]
    """Count payload bytes that were read; add a full block; finish the key of a complete frame.

    Returns a status. The bytes of a payload that does not match its checksum may have been added
    already; but its key is not finished, so the run fails before anybody uses them.
    """
    links = loop.links
    mode, slot = links[peer, IN_MODE], links[peer, IN_SLOT]
    in_block = links[peer, IN_DONE] % BLOCK_BYTES + n_read
    done = links[peer, IN_DONE] + n_read
    links[peer, IN_DONE] = done
    is_complete = done == links[peer, IN_WORDS + LENGTH_WORD]
    if mode == DIRECT_ADD and (is_complete or in_block == BLOCK_BYTES):
        first = done - in_block
        if links[peer, IN_WORDS + PAYLOAD_WORD]:
            links[peer, IN_CHECKSUM] += checksum_at(block, in_block, first)
        combine_at(loop.runs[slot, CODE], links[peer, IN_AT] + first, block, in_block)
    if not is_complete:
        return DONE
    links[peer, IN_HEADER] = 0
    if mode == DROP:
        return DONE
    if links[peer, IN_WORDS + PAYLOAD_WORD]:
        if mode != DIRECT_ADD:
            links[peer, IN_CHECKSUM] = checksum_at(links[peer, IN_AT], done, np.int64(0))
        if payload_checksum(links[peer, IN_CHECKSUM]) != links[peer, IN_WORDS + PAYLOAD_WORD]:
            return _bad_frame(links, peer, BAD_PAYLOAD)
    links[peer, N_TO_COME] -= 1
    _finish_received(engine_of(loop, slot), links[peer, IN_KEY], mode)
    end_if_done(loop, slot)
    return DONE


@plain_kernel
def _finish_received(e, key, mode):  # type: ignore[no-untyped-def]
    """Finish a key whose frame is complete, unless its data has to wait where it is staged."""
    if mode == STAGE:
        e.keys[STATE, key] = STAGED
        if e.keys[NEEDS, key] > 0:
            return
        apply_staged(e, key)
    finish(e, key)
