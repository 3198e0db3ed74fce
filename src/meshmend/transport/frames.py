"""Defines the data of the event loop: frames on the wire, and the tables of links, runs and keys.

A frame is a header of six words and the payload:

    generation << 32 | sequence    the call: number of the generation, number of the run in it
    slice << 32 | row              which bytes these are, or one of the two words below
    length                         of the payload, in bytes
    fingerprint                    of the collective that the sender runs
    payload checksum               0 if the sender makes none
    header checksum                of the five words before it

Where the second word is STARTED, the sender says that it has started all runs up to this call; the
frame has no payload. Where it is GAVE_UP, the sender failed, and the payload says why.

The checksums find what a network, a cable or a memory changes by accident; they are no proof
against a liar. Each finds every change that lies within one word: of 8 bytes in a header, of 4 in a
payload.

Whoever changes any of this changes `_MAGIC` in `transport/handshake.py` too.
"""

from functools import cache
from typing import Any, Final

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
from numba import carray, cfunc, types  # type: ignore[attr-defined]  # as its stubs have it

from meshmend.kernels import plain_kernel

HEADER_WORDS: Final = 6
HEADER_BYTES: Final = 8 * HEADER_WORDS
LONGEST_FRAME: Final = 1 << 39  # bytes; the fingerprint has no room for larger payloads
LONGEST_TEXT: Final = 4096  # bytes of the reason why a peer gave up
BLOCK_BYTES: Final = 1 << 17  # added at a time: small enough to stay in the cache
GAVE_UP: Final = -1
STARTED: Final = -2
TURN: Final = 64  # system calls in a row for one peer, while others may have data
MOST_RUNS: Final = 128  # in flight at a time; run number n has the slot n % MOST_RUNS

# Columns of `links`, one line per peer. The counts are over all runs in flight.
FD: Final = 0  # -1: no connection
CLOSED: Final = 1  # the other end has closed
IN_HEADER: Final = 2  # bytes of the header read so far
IN_SLOT: Final = 3  # the run of the frame that is being read,
IN_KEY: Final = 4  # its key,
IN_AT: Final = 5  # the address where its payload goes, or will be added or staged,
IN_MODE: Final = 6  # and which of these
IN_DONE: Final = 7  # bytes of the payload read so far
IN_PARKED: Final = 8  # the header that was read belongs to a run that has not begun
N_TO_COME: Final = 9  # frames that have not arrived
OUT_SLOT: Final = 10  # the run of the frame that is being sent,
OUT_KEY: Final = 11  # its key, NONE or TAIL,
OUT_AT: Final = 12  # and the address of its payload
OUT_DONE: Final = 13  # bytes sent so far, header included
N_TO_SEND: Final = 14  # frames that have not begun
N_READY: Final = 15  # frames that could begin
N_USERS: Final = 16  # runs that exchange data with this peer
PEER_STARTED: Final = 17  # the last call that the peer said it has started
ANNOUNCED: Final = 18  # the last call that this rank has told the peer it started
TO_ANNOUNCE: Final = 19  # the last call that it has to tell
IN_CHECKSUM: Final = 20  # of the payload read so far
FAULT: Final = 21  # what is wrong with a frame of this peer: one of FAULTS, or 0
CORRUPTED: Final = 22  # a fault is injected: data from this peer changes on its way
IN_WORDS: Final = 23  # the header that is being read
OUT_WORDS: Final = IN_WORDS + HEADER_WORDS  # the header that is being sent
N_LINK_COLUMNS: Final = OUT_WORDS + HEADER_WORDS

# The words of a header.
CALL_WORD, ROW_WORD, LENGTH_WORD, FINGERPRINT_WORD, PAYLOAD_WORD, CHECK_WORD = 0, 1, 2, 3, 4, 5

# What may be wrong with a frame. Its sender is then a lost peer: where the next begins is unknown.
BAD_HEADER, BAD_LENGTH, BAD_CALL, BAD_KEY, BAD_PAYLOAD, NOT_SUMMED = 1, 2, 3, 4, 5, 6
FAULTS: Final = {
    BAD_HEADER: "a frame whose header does not match its checksum",
    BAD_LENGTH: "a frame of an impossible length",
    BAD_CALL: "a frame of a collective that has ended",
    BAD_KEY: "a frame that was not expected, or came twice",
    BAD_PAYLOAD: "a frame whose payload does not match its checksum",
    NOT_SUMMED: "a frame without a checksum of its payload",
}

# Columns of `ports`, one line per slot and peer: what one run exchanges with one peer.
HEAP_BASE, HEAP_SIZE, UNSENT, EXPECTED, IS_USED = 0, 1, 2, 3, 4
N_PORT_COLUMNS: Final = 5

# Lines of a run's `moves`, one column per move; an extra last column ends FOLLOWING.
KIND, ROW, PEER, FIRST_NEEDS, FOLLOWING = 0, 1, 2, 3, 4

# Lines of a run's `keys`, one column per key.
START, SIZE, STAGING_OFFSET, NEEDS, STATE, SOURCE = 0, 1, 2, 3, 4, 5
N_KEY_LINES: Final = 6

# Columns of `runs`, one line per slot. From PAYLOAD to STACK_AT they are addresses.
LEFT, CALL, FINGERPRINT, CODE, N_MOVES, N_KEYS = 0, 1, 2, 3, 4, 5
PAYLOAD, STAGING, MOVES_AT, FOLLOWING_AT, KEYS_AT, HEAP_AT, STACK_AT = 6, 7, 8, 9, 10, 11, 12
ENDED: Final = 13
DONE_FD: Final = 14  # an event descriptor to write to when the run has ended, or -1
N_RUN_COLUMNS: Final = 15

# Entries of `numbers`: the generation, the numbers of the oldest run that has not ended, of the
# last run that was started and of the last that has begun; a mark that other links are in use now;
# the number 1, for event descriptors; and whether payloads have checksums: none, those that this
# rank sends, or those of all ranks, which it then needs.
GENERATION, OLDEST, LAST_STARTED, LAST_BEGUN, LINKS_CHANGED, ONE, SUMS_PAYLOADS = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
)
N_NUMBERS: Final = 7
NOT_SENT, SENT, NEEDED = 0, 1, 2  # of SUMS_PAYLOADS

NONE: Final = -1
TAIL: Final = -2  # a frame whose payload is void: the rest of an abandoned one, or one without any

DIRECT_PUT, DIRECT_ADD, STAGE, DROP = 0, 1, 2, 3

# The status that `progress` returns with a peer. PEER_FAILED: the peer sent why it gave up.
# BAD_FRAME: FAULT says what is wrong.
DONE, INTERRUPTED, TIMED_OUT, LOST, MISMATCH, PEER_FAILED, BAD_FRAME, BLOCKED = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
)
# Found by the caller of `progress`: the peer's kernel answers nothing, or the peer is in a later
# generation, so that what this rank waits for does not come.
SILENT, AHEAD = 8, 9

FREE, BEGUN, STAGED = 0, 1, 2  # STATE of a key: nothing read, being read, read but not yet used


_SYMBOL: Final = "meshmend_checksum"
_WORD_BYTES: Final = 4
# Odd numbers whose multiples are spread evenly: 2^64 and 2^32 over the golden ratio, and others.
_SEED: Final = np.uint64(0x243F6A8885A308D3)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_STEP: Final = np.uint32(0x9E3779B1)
_FIRST: Final = np.uint32(0x85EBCA6B)
_HALF: Final = np.uint64(32)
_ODD: Final = np.uint32(1)

# For compiled code: checksum_at(address, number of bytes, place of the first byte in the payload)
# is the part of these bytes in the checksum of a payload: the parts are added. All places are
# multiples of 4. Call `bind_checksum` before code that uses it is compiled or loaded.
checksum_at: Any = types.ExternalFunction(
    _SYMBOL, types.int64(types.intp, types.int64, types.int64)
)


@cache
def bind_checksum() -> Any:
    """Compile or load the function behind `checksum_at`, and register its symbol."""
    signature = types.int64(types.voidptr, types.int64, types.int64)
    compiled = cfunc(signature, cache=True)(_checksum_at)
    llvmlite.binding.add_symbol(_SYMBOL, compiled.address)
    return compiled


@plain_kernel
def header_checksum(words):  # type: ignore[no-untyped-def]
    """Return the checksum of a header's first five words."""
    # Each step is one to one, so headers that differ in one word have different checksums.
    mixed = _SEED
    for at in range(CHECK_WORD):
        mixed = (mixed ^ np.uint64(words[at])) * _MIX
        mixed ^= mixed >> _HALF
    return np.int64(mixed)


@plain_kernel
def payload_checksum(parts):  # type: ignore[no-untyped-def]
    """Return the checksum that a header names, from the sum of the parts; it is never 0."""
    return parts if parts != 0 else np.int64(1)


def _checksum_at(address, n_bytes, place):  # type: ignore[no-untyped-def]
    """Return the sum of all 4-byte words, each times an odd number that depends on its place.

    A product of two numbers below 2^32, one of them changed, changes by less than 2^64, not by 0.
    """
    n_words = n_bytes // _WORD_BYTES
    words = carray(address, n_words, np.uint32)
    first = np.uint32(place // _WORD_BYTES)
    total = np.uint64(0)
    for at in range(n_words):
        factor = np.uint32((first + np.uint32(at)) * _STEP + _FIRST) | _ODD
        total += np.uint64(words[at]) * np.uint64(factor)
    n_left = n_bytes - n_words * _WORD_BYTES
    if n_left:
        every = carray(address, n_bytes, np.uint8)
        last = np.uint64(0)
        for at in range(n_left):
            last = (last << np.uint64(8)) | np.uint64(every[n_words * _WORD_BYTES + at])
        factor = np.uint32((first + np.uint32(n_words)) * _STEP + _FIRST) | _ODD
        total += last * np.uint64(factor)
    return np.int64(total)
