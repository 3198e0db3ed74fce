"""Runs the tasks of one rank over its connections: a compiled event loop without the GIL.

Several runs are in flight at once, over the same connections. It sends what is ready, the oldest
run and the smallest slice + delay first, and reads from every peer that has data. Data that may not
be written or added yet is staged in a buffer until then. It never waits for one peer while another
has data. It knows file descriptors and bytes; connections are made elsewhere.

A **link** is the connection to one peer, a line of `links`. A **run** is one run of a task. Python
makes its tables and enters their addresses in a line of `runs`; `progress` does the rest. A **key**
is one move of one slice. A key to send enters the heap of its peer when it waits for nothing more.
Data that arrived too early stays in the staging buffer until its key is released.

A **frame** is a header of six words and the payload:

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
payload. Whoever changes frames changes `_MAGIC` in `transport/handshake.py` too.
"""

from functools import cache
from typing import Any, Final, NamedTuple

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
from numba import carray, types  # type: ignore[attr-defined]  # as its stubs have it
from numba.extending import intrinsic
from numba.np import arrayobj

from meshmend.kernels import c_function, inlined, kernel, plain_kernel
from meshmend.schedule.priority import LEVELS_PER_SLICE
from meshmend.transport.combine import bind_combine, combine_at
from meshmend.transport.libc import (
    EAGAIN,
    EINTR,
    POLLIN,
    POLLOUT,
    copy_memory,
    read_event,
    receive,
    send_two,
    wait,
    write_event,
)
from meshmend.transport.tasks import ADD, LOCAL_ADD, SEND, Numbers

# Frames, and the tables of links, runs and keys.

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
COUNTS_OF_RUNS: Final = [N_TO_COME, N_TO_SEND, N_READY, N_USERS]
PEER_STARTED: Final = 17  # the last call that the peer said it has started
ANNOUNCED: Final = 18  # the last call that this rank has told the peer it started
TO_ANNOUNCE: Final = 19  # the last call that it has to tell
IN_CHECKSUM: Final = 20  # of the payload read so far
FAULT: Final = 21  # what is wrong with a frame of this peer: one of FAULTS, or 0
CORRUPTED: Final = 22  # a fault is injected: data from this peer changes on its way
IN_WORDS: Final = 23  # the header that is being read
OUT_WORDS: Final = IN_WORDS + HEADER_WORDS  # the header that is being sent
SENT_BYTES: Final = OUT_WORDS + HEADER_WORDS  # to this peer, over all connections to it
N_LINK_COLUMNS: Final = SENT_BYTES + 1

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
KIND, ROW, PEER, FIRST_NEEDS, FOLLOWING, LEVEL = 0, 1, 2, 3, 4, 5
N_MOVE_LINES: Final = 6

# Lines of a run's `keys`, one column per key.
START, SIZE, STAGING_OFFSET, NEEDS, STATE, SOURCE = 0, 1, 2, 3, 4, 5
N_KEY_LINES: Final = 6

# Columns of `runs`, one line per slot. From PAYLOAD to STACK_AT they are addresses.
LEFT, CALL, FINGERPRINT, CODE, N_MOVES, N_KEYS = 0, 1, 2, 3, 4, 5
PAYLOAD, MOVES_AT, FOLLOWING_AT, STAGING, KEYS_AT, HEAP_AT, STACK_AT = 6, 7, 8, 9, 10, 11, 12
ENDED: Final = 13
DONE_FD: Final = 14  # an event descriptor to write to when the run has ended
N_RUN_COLUMNS: Final = 15

# Entries of `numbers`: the generation, the numbers of the oldest run that has not ended, of the
# last run that was started and of the last that has begun; a mark that other links are in use now;
# the number 1, for event descriptors; and whether payloads have checksums: none, those that this
# rank sends, or those of all ranks, which it then needs.
GENERATION, OLDEST, LAST_STARTED, LAST_BEGUN, LINKS_CHANGED, ONE, SUMS_PAYLOADS = range(7)
N_NUMBERS: Final = 7
NOT_SENT, SENT, NEEDED = 0, 1, 2  # of SUMS_PAYLOADS

NONE: Final = -1
TAIL: Final = -2  # a frame whose payload is void: the rest of an abandoned one, or one without any

DIRECT_PUT, DIRECT_ADD, STAGE, DROP = 0, 1, 2, 3

# The status that `progress` returns with a peer. PEER_FAILED: the peer sent why it gave up.
# BAD_FRAME: FAULT says what is wrong.
DONE, INTERRUPTED, TIMED_OUT, LOST, MISMATCH, PEER_FAILED, BAD_FRAME, BLOCKED = range(8)
# Found by the caller of `progress`: the peer's kernel answers nothing, or the peer is in a later
# generation, so that what this rank waits for does not come.
SILENT, AHEAD = 8, 9
SIGNALLED: Final = 10  # a status of `progress`

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
    compiled = c_function(_checksum_at, signature)
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


class Loop(NamedTuple):
    """What the event loop reads and writes: few arrays of one type, so that it compiles fast."""

    links: Numbers
    runs: Numbers
    ports: Numbers
    numbers: Numbers


class Run(NamedTuple):
    """One run in the event loop: its own tables, and the links, which all runs share."""

    moves: Numbers
    following: Numbers
    keys: Numbers
    heap: Numbers
    stack: Numbers
    ports: Numbers
    numbers: Numbers
    links: Numbers


def empty_loop(n_links: int) -> Loop:
    """Return a loop without connections and runs."""
    loop = Loop(
        links=np.zeros((n_links, N_LINK_COLUMNS), dtype=np.int64),
        runs=np.zeros((MOST_RUNS, N_RUN_COLUMNS), dtype=np.int64),
        ports=np.zeros((MOST_RUNS, n_links, N_PORT_COLUMNS), dtype=np.int64),
        numbers=np.zeros(N_NUMBERS, dtype=np.int64),
    )
    loop.numbers[[OLDEST, ONE]] = 1
    return loop


def load_event_loop() -> None:
    """Compile or load `progress` by running it with nothing to do."""
    bind_combine()
    bind_checksum()
    progress(empty_loop(1), 0, 0, 0, np.full(2, -1, dtype=np.int64))


@kernel
def progress(loop, number, scratch, timeout_ms, fds):  # type: ignore[no-untyped-def]
    """Go on until a run has ended; return a status, and the peer that caused it or -1.

    With number 0, goes on until every run that was started has ended. `scratch` is the address of a
    block of bytes for each link; `fds` are two event descriptors. Begins the runs that were
    started, also those that are started meanwhile, when the first descriptor can be read. Returns
    INTERRUPTED at once when the second can be read. Returns TIMED_OUT when nothing moves for
    `timeout_ms`, and SIGNALLED when a signal interrupts that, so that Python can handle it; a
    second call then goes on.
    """
    links, numbers = loop.links, loop.numbers
    peers, n_peers = np.empty(len(links), dtype=np.int64), 0
    waits = np.zeros((len(links) + 2, 2), dtype=np.int32)
    message, parts = np.zeros(7, dtype=np.int64), np.zeros(4, dtype=np.int64)
    has_started = numbers[LAST_STARTED]
    numbers[LINKS_CHANGED] = 1
    while True:
        while numbers[LAST_BEGUN] < has_started:
            status, peer = _begin(loop, numbers[LAST_BEGUN] + 1)
            if status != DONE:
                return status, peer
        if numbers[LINKS_CHANGED]:
            n_peers = _list_peers(loop, peers)
        for peer in peers[:n_peers]:
            block = scratch + peer * BLOCK_BYTES
            if _push(loop, peer, message, parts, block) == LOST:
                status = _pull(loop, peer, block)  # it may have sent a reason before it closed
                has_reason = status in (PEER_FAILED, BAD_FRAME)
                return (status if has_reason else LOST), peer
        if _has_ended(loop, number):
            return DONE, np.int64(-1)
        _enter_waits(loop, peers[:n_peers], fds, waits)
        n_ready = wait(waits[: n_peers + 2], timeout_ms)
        if n_ready == 0:
            return TIMED_OUT, np.int64(-1)
        if n_ready < 0:
            return SIGNALLED, np.int64(-1)
        if waits[1, 1] >> 16:
            return INTERRUPTED, np.int64(-1)
        if waits[0, 1] >> 16:
            read_event(fds[0], parts.ctypes.data)
            has_started = numbers[LAST_STARTED]
        for at in range(n_peers):
            if (waits[at + 2, 1] >> 16) & ~POLLOUT:
                status = _pull(loop, peers[at], scratch + peers[at] * BLOCK_BYTES)
                if status != DONE:
                    return status, peers[at]


@plain_kernel
def _has_ended(loop, number):  # type: ignore[no-untyped-def]
    if number == 0:
        return loop.numbers[OLDEST] > loop.numbers[LAST_STARTED]
    return number < loop.numbers[OLDEST] or loop.runs[number % MOST_RUNS, ENDED] == 1


@plain_kernel
def _list_peers(loop, peers):  # type: ignore[no-untyped-def]
    """List the peers of all runs in flight; return how many there are."""
    loop.numbers[LINKS_CHANGED] = 0
    n_peers = 0
    for peer in range(loop.links.shape[0]):
        if loop.links[peer, N_USERS] > 0:
            peers[n_peers] = peer
            n_peers += 1
    return n_peers


@plain_kernel
def _enter_waits(loop, peers, fds, waits):  # type: ignore[no-untyped-def]
    waits[0, 0], waits[0, 1] = fds[0], POLLIN
    waits[1, 0], waits[1, 1] = fds[1], POLLIN
    for at in range(len(peers)):
        link = loop.links[peers[at]]
        events = 0 if link[IN_PARKED] or link[CLOSED] else POLLIN
        if link[OUT_KEY] != NONE or _must_announce(link) or next_run(loop, peers[at]) != NONE:
            events |= POLLOUT
        waits[at + 2, 0] = link[FD] if events else -1
        waits[at + 2, 1] = events


# Beginning and ending runs, and whose turn it is on a link.


@plain_kernel
def _begin(loop, number):  # type: ignore[no-untyped-def]
    """Begin a run: count its frames, open parked headers, release keys without needs.

    Returns a status and a peer, as `progress` does.
    """
    slot = number % MOST_RUNS
    loop.numbers[LAST_BEGUN] = number
    loop.numbers[LINKS_CHANGED] = 1
    for peer in range(loop.links.shape[0]):
        if loop.ports[slot, peer, IS_USED]:
            status = _begin_on_link(loop, slot, peer)
            if status != DONE:
                return status, peer
    run = _run_of(loop, slot)
    for key in range(run.keys.shape[1]):
        if run.moves[FIRST_NEEDS, key % run.numbers[N_MOVES]] == 0 and _release(run, key):
            _finish(run, key)
    _end_if_done(loop, slot)
    return DONE, np.int64(-1)


@plain_kernel
def _begin_on_link(loop, slot, peer):  # type: ignore[no-untyped-def]
    """Count the frames of a run that one peer sends and gets; return a status.

    A peer that still has to send frames of older runs may not send those of this run before it is
    told that this rank has started it. Any other peer needs no permission: see `next_run`.
    """
    link, n_expected = loop.links[peer], loop.ports[slot, peer, EXPECTED]
    if n_expected > 0 and link[N_TO_COME] > 0:
        link[TO_ANNOUNCE] = loop.runs[slot, CALL]
    link[N_USERS] += 1
    link[N_TO_COME] += n_expected
    link[N_TO_SEND] += loop.ports[slot, peer, UNSENT]
    if link[FAULT]:
        return BAD_FRAME
    if link[CLOSED] and n_expected > 0:
        return LOST
    if link[IN_PARKED]:
        link[IN_PARKED] = 0
        return _open_frame(loop, peer)
    return DONE


@plain_kernel
def next_run(loop, peer):  # type: ignore[no-untyped-def]
    """Return the slot of the oldest run that may send to a peer now, or NONE.

    A run may send what is ready if the peer has said that it started the run, or if all frames of
    older runs have gone to this peer. In the second case the peer may leave the frame unread until
    it starts the run: no frame that it needs before is behind it.
    """
    if loop.links[peer, N_READY] == 0:
        return NONE
    is_behind = False
    for number in range(loop.numbers[OLDEST], loop.numbers[LAST_BEGUN] + 1):
        slot = number % MOST_RUNS
        if is_behind and loop.runs[slot, CALL] > loop.links[peer, PEER_STARTED]:
            return NONE
        if loop.ports[slot, peer, HEAP_SIZE] > 0:
            return slot
        is_behind = is_behind or loop.ports[slot, peer, UNSENT] > 0
    return NONE


@plain_kernel
def _must_announce(link):  # type: ignore[no-untyped-def]
    """Whether a peer waits to be told which runs this rank has started; `link` is its line."""
    return link[TO_ANNOUNCE] > link[ANNOUNCED] and link[N_TO_COME] > 0


@plain_kernel
def _end_if_done(loop, slot):  # type: ignore[no-untyped-def]
    """End a run if all its keys are done: free its links, and tell who waits for it."""
    if loop.runs[slot, LEFT] > 0 or loop.runs[slot, ENDED]:
        return
    for peer in range(loop.links.shape[0]):
        loop.links[peer, N_USERS] -= loop.ports[slot, peer, IS_USED]
        loop.ports[slot, peer, IS_USED] = 0
    loop.numbers[LINKS_CHANGED] = 1
    loop.runs[slot, ENDED] = 1
    write_event(loop.runs[slot, DONE_FD], loop.numbers[ONE:].ctypes.data)
    # Python closes the descriptors of runs before the oldest, so this comes last.
    while (
        loop.numbers[OLDEST] <= loop.numbers[LAST_BEGUN]
        and loop.runs[loop.numbers[OLDEST] % MOST_RUNS, ENDED]
    ):
        loop.numbers[OLDEST] += 1


@inlined
def _run_of(loop, slot):  # type: ignore[no-untyped-def]
    """Return the run of a slot; only for plain kernels, because its use is not counted."""
    line = loop.runs[slot]
    n_moves, n_keys = line[N_MOVES], line[N_KEYS]
    return Run(
        _table(line[MOVES_AT], N_MOVE_LINES, n_moves + 1),
        _table(line[FOLLOWING_AT], 1, n_keys)[0],  # no kernel asks for the length of this one
        _table(line[KEYS_AT], N_KEY_LINES, n_keys),
        _table(line[HEAP_AT], 1, n_keys)[0],
        _table(line[STACK_AT], 1, n_keys + 1)[0],
        loop.ports[slot],
        line,
        loop.links,
    )


def _typed_table(context: Any, address: Any, n_lines: Any, n_columns: Any) -> Any:
    """Return the table of 64-bit integers that lies at an address.

    Numba's own `carray` is a function that returns an array, which plain kernels may not call.
    """
    array_type = types.Array(types.int64, 2, "C")
    library: Any = arrayobj  # it has no types

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        array = library.make_array(array_type)(context, builder)
        word = context.get_constant(types.intp, 8)
        library.populate_array(
            array,
            data=builder.inttoptr(arguments[0], array.data.type),
            shape=(arguments[1], arguments[2]),
            strides=(builder.mul(arguments[2], word), word),
            itemsize=word,
            meminfo=None,
        )
        return array._getvalue()

    return array_type(types.int64, types.int64, types.int64), generate


_table: Any = intrinsic(_typed_table)  # called in compiled code without the context


# Sending.


@kernel
def _push(loop, peer, message, parts, void):  # type: ignore[no-untyped-def]
    """Send ready keys to one peer until its connection blocks, with at most TURN system calls.

    `message` and `parts` are scratch; `void` is an address with a block of bytes that nobody reads.
    """
    link = loop.links[peer]
    for _ in range(TURN):
        if link[OUT_KEY] == NONE:
            if not _begin_frame(loop, peer):
                return DONE
            if link[CLOSED]:
                return LOST
        key, length = link[OUT_KEY], link[OUT_WORDS + LENGTH_WORD]
        in_header = min(link[OUT_DONE], HEADER_BYTES)
        in_body = link[OUT_DONE] - in_header
        parts[0] = link[OUT_WORDS:].ctypes.data + in_header
        parts[1] = HEADER_BYTES - in_header
        parts[2] = link[OUT_AT] + in_body
        parts[3] = length - in_body
        if key == TAIL:
            parts[2], parts[3] = void, min(parts[3], BLOCK_BYTES)
        n_sent = send_two(link[FD], message, parts)
        if n_sent < 0:
            if n_sent == -EINTR:
                continue
            return BLOCKED if n_sent == -EAGAIN else LOST
        link[OUT_DONE] += n_sent
        link[SENT_BYTES] += n_sent
        if link[OUT_DONE] == HEADER_BYTES + length:
            link[OUT_KEY] = NONE
            if key != TAIL:
                _finish_sent(loop, link[OUT_SLOT], key)
    return DONE


@plain_kernel
def _begin_frame(loop, peer):  # type: ignore[no-untyped-def]
    """Begin the frame that is next for a peer; return whether there is one."""
    link = loop.links[peer]
    if _must_announce(link):
        link[ANNOUNCED] = link[TO_ANNOUNCE]
        link[OUT_WORDS + CALL_WORD] = link[TO_ANNOUNCE]
        link[OUT_WORDS + ROW_WORD] = STARTED
        link[OUT_WORDS + LENGTH_WORD] = 0
        link[OUT_WORDS + FINGERPRINT_WORD] = 0
        link[OUT_WORDS + PAYLOAD_WORD] = 0
        link[OUT_KEY] = TAIL
    else:
        slot = next_run(loop, peer)
        if slot == NONE:
            return False
        _begin_key(_run_of(loop, slot), peer)
        link[OUT_SLOT] = slot
        if loop.numbers[SUMS_PAYLOADS] != NOT_SENT:
            length = link[OUT_WORDS + LENGTH_WORD]
            parts = checksum_at(link[OUT_AT], length, np.int64(0))
            link[OUT_WORDS + PAYLOAD_WORD] = payload_checksum(parts)
    link[OUT_WORDS + CHECK_WORD] = header_checksum(link[OUT_WORDS:])
    link[OUT_DONE] = 0
    return True


@plain_kernel
def _begin_key(run, peer):  # type: ignore[no-untyped-def]
    link, key = run.links[peer], _heap_pop(run, peer)
    move = key % run.numbers[N_MOVES]
    run.ports[peer, UNSENT] -= 1
    link[N_TO_SEND] -= 1
    link[OUT_WORDS + CALL_WORD] = run.numbers[CALL]
    link[OUT_WORDS + ROW_WORD] = (key // run.numbers[N_MOVES]) << 32 | run.moves[ROW, move]
    link[OUT_WORDS + LENGTH_WORD] = run.keys[SIZE, key]
    link[OUT_WORDS + FINGERPRINT_WORD] = run.numbers[FINGERPRINT]
    link[OUT_WORDS + PAYLOAD_WORD] = 0
    link[OUT_AT] = _address_of(run, run.keys[START, key])
    link[OUT_KEY] = key


@plain_kernel
def _finish_sent(loop, slot, key):  # type: ignore[no-untyped-def]
    _finish(_run_of(loop, slot), key)
    _end_if_done(loop, slot)


# Receiving. A frame of an older generation is read and dropped. A frame of a run that has not begun
# on this rank waits, and so does what the peer sends after it, until this rank begins that run.
# This cannot block this rank: the peer has sent all frames of older runs before, see `next_run`.
#
# A header is believed only if it matches its checksum and every word of it is possible. What comes
# after one that does not is never read: it is unknown where the next frame begins.


@kernel
def _pull(loop, peer, block):  # type: ignore[no-untyped-def]
    """Read what one peer has sent, with at most TURN system calls; return a status.

    `block` is the address of the peer's block of scratch.
    """
    link = loop.links[peer]
    for _ in range(TURN):
        if link[IN_PARKED]:
            return DONE
        if link[FAULT]:
            return BAD_FRAME
        in_header = link[IN_HEADER]
        if in_header < HEADER_BYTES:
            address = link[IN_WORDS:].ctypes.data + in_header
            n_wanted = HEADER_BYTES - in_header
        else:
            address, n_wanted = _target(link, block)
        n_read = receive(link[FD], address, n_wanted)
        if n_read == -EINTR:
            continue
        if n_read == -EAGAIN:
            return DONE
        if n_read <= 0:
            return _mark_closed(link)
        if in_header == HEADER_BYTES:
            if link[CORRUPTED]:
                _corrupt(address, n_read)
            status = _count_payload(loop, peer, n_read, block)
            if status != DONE:
                return status
            continue
        link[IN_HEADER] += n_read
        if link[IN_HEADER] == HEADER_BYTES:
            status = _check_header(loop, peer)
            if status == DONE:
                status = _open_frame(loop, peer)
            if status != DONE:
                return status
    return DONE


@plain_kernel
def _corrupt(address, n_bytes):  # type: ignore[no-untyped-def]
    """Flip one bit in each 64 of these bytes, as a broken lane of a link would."""
    first = (address + 7) // 8 * 8
    n_words = (address + n_bytes - first) // 8
    for at in range(0, n_words, 8):
        _table(first, 1, n_words)[0, at] ^= 1 << 20


@plain_kernel
def _mark_closed(link):  # type: ignore[no-untyped-def]
    """Mark a peer as closed; return LOST if one end still has data for the other, else DONE."""
    link[CLOSED] = 1
    has_to_receive = link[N_TO_COME] > 0 or link[IN_HEADER] > 0
    has_to_send = link[N_TO_SEND] > 0 or link[OUT_KEY] != NONE
    return LOST if has_to_receive or has_to_send else DONE


@plain_kernel
def _bad_frame(link, fault):  # type: ignore[no-untyped-def]
    """Read nothing more from a peer, because of a fault; return BAD_FRAME."""
    link[FAULT] = fault
    link[CLOSED] = 1
    link[IN_HEADER] = 0
    return BAD_FRAME


@plain_kernel
def _check_header(loop, peer):  # type: ignore[no-untyped-def]
    """Check what can be checked of a header without the run that it belongs to; return a status."""
    link = loop.links[peer]
    words = link[IN_WORDS:]
    if header_checksum(words) != words[CHECK_WORD]:
        return _bad_frame(link, BAD_HEADER)
    shortest, longest = 1, LONGEST_FRAME
    if words[ROW_WORD] == STARTED:
        shortest, longest = 0, 0
    elif words[ROW_WORD] == GAVE_UP:
        shortest, longest = 0, LONGEST_TEXT
    if not shortest <= words[LENGTH_WORD] <= longest:
        return _bad_frame(link, BAD_LENGTH)
    if words[CALL_WORD] < 0:
        return _bad_frame(link, BAD_CALL)
    is_data = words[ROW_WORD] != STARTED and words[ROW_WORD] != GAVE_UP
    if is_data and words[ROW_WORD] < 0:
        return _bad_frame(link, BAD_KEY)
    if is_data and loop.numbers[SUMS_PAYLOADS] == NEEDED and words[PAYLOAD_WORD] == 0:
        return _bad_frame(link, NOT_SUMMED)
    return DONE


@plain_kernel
def _open_frame(loop, peer):  # type: ignore[no-untyped-def]
    """Decide from a complete header that was checked where its payload goes; return a status."""
    link = loop.links[peer]
    call, row_word = link[IN_WORDS + CALL_WORD], link[IN_WORDS + ROW_WORD]
    if row_word == STARTED:
        link[PEER_STARTED] = max(link[PEER_STARTED], call)
        link[IN_HEADER] = 0
        return DONE
    generations_ahead = (call >> 32) - loop.numbers[GENERATION]
    if row_word == GAVE_UP and generations_ahead >= 0:
        return PEER_FAILED
    link[IN_DONE] = link[IN_CHECKSUM] = 0
    if generations_ahead < 0:
        link[IN_MODE] = DROP
        if link[IN_WORDS + LENGTH_WORD] == 0:
            link[IN_HEADER] = 0
        return DONE
    number = call & 0xFFFFFFFF
    if generations_ahead > 0 or number > loop.numbers[LAST_BEGUN]:
        link[IN_PARKED] = 1
        is_early = generations_ahead > 0 or link[N_TO_COME] == 0
        return DONE if is_early else MISMATCH
    slot = number % MOST_RUNS
    if number < loop.numbers[OLDEST] or loop.runs[slot, ENDED]:
        was_other = loop.runs[slot, FINGERPRINT] != link[IN_WORDS + FINGERPRINT_WORD]
        if loop.runs[slot, CALL] == call and was_other:
            return MISMATCH
        return _bad_frame(link, BAD_CALL)
    link[IN_SLOT] = slot
    return _open_key(_run_of(loop, slot), peer)


@plain_kernel
def _open_key(run, peer):  # type: ignore[no-untyped-def]
    """Decide where the payload of a frame of a run goes; return a status."""
    link = run.links[peer]
    if link[IN_WORDS + FINGERPRINT_WORD] != run.numbers[FINGERPRINT]:
        return MISMATCH
    key = _key_of(run, peer)
    if key < 0:
        return _bad_frame(link, BAD_KEY)
    run.keys[STATE, key] = BEGUN
    link[IN_KEY] = key
    if run.keys[NEEDS, key] > 0:
        link[IN_MODE] = STAGE
        link[IN_AT] = run.numbers[STAGING] + run.keys[STAGING_OFFSET, key]
    else:
        is_sum = run.moves[KIND, key % run.numbers[N_MOVES]] == ADD
        link[IN_MODE] = DIRECT_ADD if is_sum else DIRECT_PUT
        link[IN_AT] = _address_of(run, run.keys[START, key])
    return DONE


@plain_kernel
def _key_of(run, peer):  # type: ignore[no-untyped-def]
    """Return the key that a header names, or -1 if no such frame is expected from this peer."""
    link = run.links[peer]
    word = link[IN_WORDS + ROW_WORD]
    part, row = word >> 32, word & 0xFFFFFFFF
    low, high = np.int64(0), run.numbers[N_MOVES]
    while low < high:
        middle = (low + high) // 2
        if run.moves[ROW, middle] < row:
            low = middle + 1
        else:
            high = middle
    key = part * run.numbers[N_MOVES] + low
    if part < 0 or low == run.numbers[N_MOVES] or key >= run.keys.shape[1]:
        return np.int64(-1)
    is_receive = run.moves[ROW, low] == row and SEND < run.moves[KIND, low] < LOCAL_ADD
    is_expected = run.moves[PEER, low] == peer and run.keys[STATE, key] == FREE
    fits = link[IN_WORDS + LENGTH_WORD] == run.keys[SIZE, key]
    return key if is_receive and is_expected and fits else np.int64(-1)


@plain_kernel
def _target(link, block):  # type: ignore[no-untyped-def]
    """Return the address for the next bytes of the current frame, and how many to read at most."""
    done, mode = link[IN_DONE], link[IN_MODE]
    n_left = link[IN_WORDS + LENGTH_WORD] - done
    if mode != DIRECT_ADD and mode != DROP:
        return link[IN_AT] + done, n_left
    in_block = done % BLOCK_BYTES
    return block + in_block, min(BLOCK_BYTES - in_block, n_left)


@plain_kernel
def _count_payload(loop, peer, n_read, block):  # type: ignore[no-untyped-def]
    """Count payload bytes that were read; add a full block; finish the key of a complete frame.

    Returns a status. The bytes of a payload that does not match its checksum may have been added
    already; but its key is not finished, so the run fails before anybody uses them.
    """
    link = loop.links[peer]
    mode, slot = link[IN_MODE], link[IN_SLOT]
    in_block = link[IN_DONE] % BLOCK_BYTES + n_read
    done = link[IN_DONE] + n_read
    link[IN_DONE] = done
    is_complete = done == link[IN_WORDS + LENGTH_WORD]
    if mode == DIRECT_ADD and (is_complete or in_block == BLOCK_BYTES):
        first = done - in_block
        if link[IN_WORDS + PAYLOAD_WORD]:
            link[IN_CHECKSUM] += checksum_at(block, in_block, first)
        combine_at(loop.runs[slot, CODE], link[IN_AT] + first, block, in_block)
    if not is_complete:
        return DONE
    link[IN_HEADER] = 0
    if mode == DROP:
        return DONE
    if link[IN_WORDS + PAYLOAD_WORD]:
        if mode != DIRECT_ADD:
            link[IN_CHECKSUM] = checksum_at(link[IN_AT], done, np.int64(0))
        if payload_checksum(link[IN_CHECKSUM]) != link[IN_WORDS + PAYLOAD_WORD]:
            return _bad_frame(link, BAD_PAYLOAD)
    link[N_TO_COME] -= 1
    _finish_received(_run_of(loop, slot), link[IN_KEY], mode)
    _end_if_done(loop, slot)
    return DONE


@plain_kernel
def _finish_received(run, key, mode):  # type: ignore[no-untyped-def]
    """Finish a key whose frame is complete, unless its data has to wait where it is staged."""
    if mode == STAGE:
        run.keys[STATE, key] = STAGED
        if run.keys[NEEDS, key] > 0:
            return
        _apply_staged(run, key)
    _finish(run, key)


# Keys: which are done, and which waited for them.


@plain_kernel
def _finish(run, key):  # type: ignore[no-untyped-def]
    """Mark a key as done, and release the keys that waited for it."""
    run.stack[0] = key
    top = 1
    while top > 0:
        top -= 1
        key = run.stack[top]
        run.numbers[LEFT] -= 1
        move = key % run.numbers[N_MOVES]
        for at in range(run.moves[FOLLOWING, move], run.moves[FOLLOWING, move + 1]):
            freed = key - move + run.following[at]
            run.keys[NEEDS, freed] -= 1
            if run.keys[NEEDS, freed] == 0 and _release(run, freed):
                run.stack[top] = freed
                top += 1


@plain_kernel
def _release(run, key):  # type: ignore[no-untyped-def]
    """Release a key that waits for nothing more; return whether this also makes it done."""
    move = key % run.numbers[N_MOVES]
    if run.keys[SIZE, key] == 0:
        return True
    if run.moves[KIND, move] == SEND:
        _heap_push(run, run.moves[PEER, move], key)
        return False
    if run.moves[KIND, move] >= LOCAL_ADD:
        _apply_local(run, key)
        return True
    if run.keys[STATE, key] != STAGED:
        return False
    _apply_staged(run, key)
    return True


@inlined
def _address_of(run, start):  # type: ignore[no-untyped-def]
    """Return the address of a place in the payload, or in scratch if it is below zero."""
    return run.numbers[PAYLOAD] + start if start >= 0 else run.numbers[STAGING] + ~start


@plain_kernel
def _apply_local(run, key):  # type: ignore[no-untyped-def]
    """Copy or add from one buffer of this rank to another."""
    place, source = _address_of(run, run.keys[START, key]), _address_of(run, run.keys[SOURCE, key])
    if run.moves[KIND, key % run.numbers[N_MOVES]] == LOCAL_ADD:
        combine_at(run.numbers[CODE], place, source, run.keys[SIZE, key])
    else:
        copy_memory(place, source, run.keys[SIZE, key])


@plain_kernel
def _apply_staged(run, key):  # type: ignore[no-untyped-def]
    """Copy or add staged data to its place."""
    place = _address_of(run, run.keys[START, key])
    staged = run.numbers[STAGING] + run.keys[STAGING_OFFSET, key]
    if run.moves[KIND, key % run.numbers[N_MOVES]] == ADD:
        combine_at(run.numbers[CODE], place, staged, run.keys[SIZE, key])
    else:
        copy_memory(place, staged, run.keys[SIZE, key])


@plain_kernel
def _heap_push(run, peer, key):  # type: ignore[no-untyped-def]
    """Enter a key in a peer's heap, as level << 32 | move: its level counts slices and delay."""
    n_moves = run.numbers[N_MOVES]
    move = key % n_moves
    entry = (key // n_moves * LEVELS_PER_SLICE + run.moves[LEVEL, move]) << 32 | move
    base, at = run.ports[peer, HEAP_BASE], run.ports[peer, HEAP_SIZE]
    run.ports[peer, HEAP_SIZE] = at + 1
    run.links[peer, N_READY] += 1
    while at > 0 and run.heap[base + (at - 1) // 2] > entry:
        run.heap[base + at] = run.heap[base + (at - 1) // 2]
        at = (at - 1) // 2
    run.heap[base + at] = entry


@plain_kernel
def _heap_pop(run, peer):  # type: ignore[no-untyped-def]
    """Remove the first entry of a peer's heap and return its key."""
    base, size = run.ports[peer, HEAP_BASE], run.ports[peer, HEAP_SIZE] - 1
    first, last = run.heap[base], run.heap[base + size]
    run.ports[peer, HEAP_SIZE] = size
    run.links[peer, N_READY] -= 1
    at, child = 0, 1
    while child < size:
        if child + 1 < size and run.heap[base + child + 1] < run.heap[base + child]:
            child += 1
        if run.heap[base + child] >= last:
            break
        run.heap[base + at] = run.heap[base + child]
        at, child = child, 2 * child + 1
    run.heap[base + at] = last
    move = first & 0xFFFFFFFF
    part = ((first >> 32) - run.moves[LEVEL, move]) // LEVELS_PER_SLICE
    return part * run.numbers[N_MOVES] + move
