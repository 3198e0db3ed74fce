"""Defines the data of the event loop: frames on the wire, and the tables of links, moves and keys.

A frame is a header of four words and the payload:

    generation << 32 | sequence    number of the generation, number of the collective in it
    slice << 32 | row              which bytes these are; -1: the sender gave up, a text follows
    length                         of the payload, in bytes
    fingerprint                    of the collective that the sender runs
"""

from typing import Final, NamedTuple

from meshmend.execute.rank_program import Numbers

HEADER_BYTES: Final = 32
BLOCK_BYTES: Final = 1 << 17  # added at a time: small enough to stay in the cache
GAVE_UP: Final = -1
TURN: Final = 64  # system calls in a row for one peer, while others may have data

# Columns of `links`, one line per peer.
FD: Final = 0  # -1: no connection
CLOSED: Final = 1  # the other end has closed
IN_HEADER: Final = 2  # bytes of the header read so far
IN_KEY: Final = 3
IN_MODE: Final = 4
IN_DONE: Final = 5  # bytes of the payload read so far
IN_PARKED: Final = 6  # the header that was read belongs to a later collective
IN_EXPECTED: Final = 7  # frames still to come in this collective
OUT_KEY: Final = 8  # the key that is being sent, NONE or TAIL
OUT_DONE: Final = 9  # bytes sent so far, header included
HEAP_BASE: Final = 10  # where this peer's heap of ready keys begins in `heap`
HEAP_SIZE: Final = 11
IN_WORDS: Final = 12  # the header that is being read
OUT_WORDS: Final = 16  # the header that is being sent
N_LINK_COLUMNS: Final = 20

# The words of a header.
CALL_WORD, ROW_WORD, LENGTH_WORD, FINGERPRINT_WORD = 0, 1, 2, 3

# Lines of `moves`, one column per move; an extra last column ends FOLLOWING.
KIND, ROW, PEER, FIRST_NEEDS, FOLLOWING = 0, 1, 2, 3, 4

# Lines of `keys`, one column per key.
START, SIZE, STAGING_OFFSET, NEEDS, STATE = 0, 1, 2, 3, 4

# Entries of `numbers`; the last three are addresses.
LEFT, CALL, FINGERPRINT, CODE, N_MOVES, PAYLOAD, STAGING, SCRATCH = 0, 1, 2, 3, 4, 5, 6, 7

NONE: Final = -1
TAIL: Final = -2  # the rest of an abandoned frame: its bytes are void, its length is kept

DIRECT_PUT, DIRECT_ADD, STAGE, DROP = 0, 1, 2, 3

# The status that `progress` returns with a peer. PEER_FAILED: the peer sent why it gave up.
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
SILENT: Final = 8  # found by the caller of `progress`: the peer's kernel answers nothing

FREE, BEGUN, STAGED = 0, 1, 2  # STATE of a key: nothing read, being read, read but not yet used


class Engine(NamedTuple):
    """All data that one run of a program reads and writes.

    These are few arrays of one type, so that the compiled code stays small. `links` outlives the
    run. `stack` is scratch memory.
    """

    moves: Numbers
    following: Numbers
    keys: Numbers
    heap: Numbers
    stack: Numbers
    links: Numbers
    numbers: Numbers
