"""What the event loop reads and writes: frames on the wire, the state of links, moves and keys.

A frame is a header of four words and the payload:

    generation << 32 | sequence    of the membership, of the collective
    slice << 32 | row              which bytes these are; -1: the sender gave up, a text follows
    length                         of what follows, in bytes
    fingerprint                    what the sender takes the collective for
"""

from typing import Final, NamedTuple

from meshmend.execute.rank_program import Numbers

HEADER_BYTES: Final = 32
BLOCK_BYTES: Final = 1 << 17  # what is added at a time: small enough to stay in the cache
GAVE_UP: Final = -1
TURN: Final = 64  # calls of the system in a row for one peer while others may have data

# Columns of `links`, one line per peer.
FD: Final = 0  # -1: no connection
CLOSED: Final = 1  # the other end has closed
IN_HEADER: Final = 2  # bytes of the header read so far
IN_KEY: Final = 3
IN_MODE: Final = 4
IN_DONE: Final = 5  # bytes of the payload read so far
IN_PARKED: Final = 6  # the header read is of a later collective
IN_EXPECTED: Final = 7  # frames still to come in this collective
OUT_KEY: Final = 8  # NONE: nothing under way
OUT_DONE: Final = 9  # bytes sent so far, header included
HEAP_BASE: Final = 10  # where the keys that are ready for this peer begin in `heap`
HEAP_SIZE: Final = 11
IN_WORDS: Final = 12  # the header that is being read
OUT_WORDS: Final = 16  # the header that is being sent
N_LINK_COLUMNS: Final = 20

# The words of a header.
CALL_WORD, ROW_WORD, LENGTH_WORD, FINGERPRINT_WORD = 0, 1, 2, 3

# Lines of `moves`, one column per move, and one more to end FOLLOWING.
KIND, ROW, PEER, FIRST_NEEDS, FOLLOWING = 0, 1, 2, 3, 4

# Lines of `keys`, one column per key.
START, SIZE, SHELF, NEEDS, STATE = 0, 1, 2, 3, 4

# Entries of `numbers`; the last three are addresses.
LEFT, CALL, FINGERPRINT, CODE, N_MOVES, PAYLOAD, ARENA, SCRATCH = 0, 1, 2, 3, 4, 5, 6, 7

NONE: Final = -1
TAIL: Final = -2  # the rest of a frame that was given up: the length must be kept

DIRECT_PUT, DIRECT_ADD, SHELVE, DROP = 0, 1, 2, 3

# What `progress` returns, and with it the peer that caused it.
DONE, INTERRUPTED, TIMED_OUT, LOST, MISMATCH, TOLD, NONSENSE, BLOCKED = 0, 1, 2, 3, 4, 5, 6, 7
SILENT: Final = 8  # not the event loop says so, but who looks at the connections while it waits

FREE, BEGUN, SHELVED = 0, 1, 2


class Engine(NamedTuple):
    """All that one run of a program reads and writes, as few arrays of one type: what is compiled
    stays small. `links` outlives the run; `stack` is scratch, and all of it is as long as keys."""

    moves: Numbers
    following: Numbers
    keys: Numbers
    heap: Numbers
    stack: Numbers
    links: Numbers
    numbers: Numbers
