"""The event loop of one rank over its connections, compiled, without the interpreter lock.

Sends what is ready, the smallest key first; reads whichever peer has data; writes or adds it as
soon as what it waits for is done, else shelves it. Never waits for one peer while another has
data. Knows descriptors and bytes; who the peers are and how they were let in is not its business.
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
    SIZE,
    TIMED_OUT,
    TOLD,
    Engine,
)
from meshmend.execute.keys import finish, release
from meshmend.execute.libc import POLLIN, POLLOUT, wait
from meshmend.execute.rank_program import SEND
from meshmend.execute.receiving import open_frame, pull
from meshmend.execute.sending import push
from meshmend.kernels import kernel, plain_kernel


def load_event_loop() -> None:
    """Compile `begin` and `progress`, or load them, by running them on nothing."""
    bind_combine()
    table, line = np.zeros((5, 0), dtype=np.int64), np.zeros(0, dtype=np.int64)
    links = np.zeros((1, N_LINK_COLUMNS), dtype=np.int64)
    nothing = Engine(table, line, table, line, line, links, np.zeros(8, dtype=np.int64))
    begin(nothing, line)
    progress(nothing, line, -1, 0)


@kernel
def progress(e, peers, stop_fd, timeout_ms):  # type: ignore[no-untyped-def]
    """Run a program that was begun to its end; return (DONE, -1), or what stopped it and the peer.

    Stops at once when `stop_fd` can be read, and when nothing moves for `timeout_ms`: then it may
    be called again, and goes on.
    """
    waits = np.zeros((len(peers) + 1, 2), dtype=np.int32)
    waits[len(peers), 0] = stop_fd
    waits[len(peers), 1] = POLLIN
    message, parts = np.zeros(7, dtype=np.int64), np.zeros(4, dtype=np.int64)
    while e.numbers[LEFT] > 0:
        for peer in peers:
            if push(e, peer, message, parts) == LOST:
                status = pull(e, peer)  # it may have said why before it closed
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
                status = pull(e, peers[at])
                if status != DONE:
                    return status, peers[at]
    return DONE, np.int64(-1)


@kernel
def begin(e, peers):  # type: ignore[no-untyped-def]
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
