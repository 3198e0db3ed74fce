"""Runs one rank's program over its connections: a compiled event loop without the GIL.

It sends what is ready, the smallest key first, and reads from every peer that has data. Data that
may not be written or added yet is staged in a buffer until then. It never waits for one peer while
another has data. It knows file descriptors and bytes; connections are made elsewhere.
"""

import numpy as np

from meshmend.execute.combine import bind_combine
from meshmend.execute.frames import (
    CLOSED,
    DONE,
    FD,
    FIRST_NEEDS,
    HEAP_SIZE,
    IN_EXPECTED,
    IN_PARKED,
    INTERRUPTED,
    KIND,
    LEFT,
    LOST,
    N_LINK_COLUMNS,
    N_MOVES,
    NONE,
    OUT_KEY,
    PEER,
    PEER_FAILED,
    SIZE,
    TIMED_OUT,
    Engine,
)
from meshmend.execute.keys import finish, release
from meshmend.execute.libc import POLLIN, POLLOUT, wait
from meshmend.execute.rank_program import SEND
from meshmend.execute.receiving import open_frame, pull
from meshmend.execute.sending import push
from meshmend.kernels import kernel, plain_kernel


def load_event_loop() -> None:
    """Compile or load `begin` and `progress` by running them on an empty program."""
    bind_combine()
    table, line = np.zeros((5, 0), dtype=np.int64), np.zeros(0, dtype=np.int64)
    links = np.zeros((1, N_LINK_COLUMNS), dtype=np.int64)
    nothing = Engine(table, line, table, line, line, links, np.zeros(8, dtype=np.int64))
    begin(nothing, line)
    progress(nothing, line, -1, 0)


@kernel
def progress(e, peers, stop_fd, timeout_ms):  # type: ignore[no-untyped-def]
    """Run a program to its end after `begin`; return a status, and the peer that caused it or -1.

    Returns INTERRUPTED at once when `stop_fd` can be read. Returns TIMED_OUT when nothing moves for
    `timeout_ms`; a second call then continues the program.
    """
    waits = np.zeros((len(peers) + 1, 2), dtype=np.int32)
    waits[len(peers), 0] = stop_fd
    waits[len(peers), 1] = POLLIN
    message, parts = np.zeros(7, dtype=np.int64), np.zeros(4, dtype=np.int64)
    while e.numbers[LEFT] > 0:
        for peer in peers:
            if push(e, peer, message, parts) == LOST:
                status = pull(e, peer)  # it may have sent a reason before it closed
                return (status if status == PEER_FAILED else LOST), peer
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
                status = pull(e, peers[at])
                if status != DONE:
                    return status, peers[at]
    return DONE, np.int64(-1)


@kernel
def begin(e, peers):  # type: ignore[no-untyped-def]
    """Begin a program: count expected frames, open parked headers, release keys without needs.

    Returns a status and a peer, as `progress` does.
    """
    for key in range(e.keys.shape[1]):
        move = key % e.numbers[N_MOVES]
        if e.moves[KIND, move] != SEND and e.keys[SIZE, key] > 0:
            e.links[e.moves[PEER, move], IN_EXPECTED] += 1
    for peer in peers:
        if e.links[peer, CLOSED] and e.links[peer, IN_EXPECTED] > 0:
            return LOST, peer
        if e.links[peer, IN_PARKED]:
            e.links[peer, IN_PARKED] = 0
            status = open_frame(e, peer)
            if status != DONE:
                return status, peer
    for key in range(e.keys.shape[1]):
        if e.moves[FIRST_NEEDS, key % e.numbers[N_MOVES]] == 0 and release(e, key):
            finish(e, key)
    return DONE, np.int64(-1)


@plain_kernel
def _enter_waits(e, peers, waits):  # type: ignore[no-untyped-def]
    for at in range(len(peers)):
        peer = peers[at]
        events = 0 if e.links[peer, IN_PARKED] or e.links[peer, CLOSED] else POLLIN
        if e.links[peer, OUT_KEY] != NONE or e.links[peer, HEAP_SIZE]:
            events |= POLLOUT
        waits[at, 0] = e.links[peer, FD] if events else -1
        waits[at, 1] = events
