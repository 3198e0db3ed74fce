"""Runs the tasks of one rank over its connections: a compiled event loop without the GIL.

Several runs are in flight at once, over the same connections. It sends what is ready, the oldest
run and the smallest key first, and reads from every peer that has data. Data that may not be
written or added yet is staged in a buffer until then. It never waits for one peer while another has
data. It knows file descriptors and bytes; connections are made elsewhere.
"""

import numpy as np

from meshmend.kernels import kernel, plain_kernel
from meshmend.transport.checksum import bind_checksum
from meshmend.transport.combine import bind_combine
from meshmend.transport.engine import Loop, end_if_done, engine_of, must_announce, next_run
from meshmend.transport.frames import (
    BAD_FRAME,
    BLOCK_BYTES,
    CALL,
    CLOSED,
    DONE,
    ENDED,
    EXPECTED,
    FAULT,
    FD,
    FIRST_NEEDS,
    IN_PARKED,
    INTERRUPTED,
    IS_USED,
    LAST_BEGUN,
    LAST_STARTED,
    LINKS_CHANGED,
    LOST,
    MOST_RUNS,
    N_LINK_COLUMNS,
    N_MOVES,
    N_NUMBERS,
    N_PORT_COLUMNS,
    N_RUN_COLUMNS,
    N_TO_COME,
    N_TO_SEND,
    N_USERS,
    NONE,
    OLDEST,
    ONE,
    OUT_KEY,
    PEER_FAILED,
    TIMED_OUT,
    TO_ANNOUNCE,
    UNSENT,
)
from meshmend.transport.keys import finish, release
from meshmend.transport.libc import POLLIN, POLLOUT, read_event, wait
from meshmend.transport.receiving import open_frame, pull
from meshmend.transport.sending import push


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
    `timeout_ms`; a second call then goes on.
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
            if push(loop, peer, message, parts, block) == LOST:
                status = pull(loop, peer, block)  # it may have sent a reason before it closed
                has_reason = status in (PEER_FAILED, BAD_FRAME)
                return (status if has_reason else LOST), peer
        if _has_ended(loop, number):
            return DONE, np.int64(-1)
        _enter_waits(loop, peers[:n_peers], fds, waits)
        n_ready = wait(waits[: n_peers + 2], timeout_ms)
        if n_ready == 0:
            return TIMED_OUT, np.int64(-1)
        if waits[1, 1] >> 16:
            return INTERRUPTED, np.int64(-1)
        if waits[0, 1] >> 16:
            read_event(fds[0], parts.ctypes.data)
            has_started = numbers[LAST_STARTED]
        for at in range(n_peers):
            if (waits[at + 2, 1] >> 16) & ~POLLOUT:
                status = pull(loop, peers[at], scratch + peers[at] * BLOCK_BYTES)
                if status != DONE:
                    return status, peers[at]


@plain_kernel
def _has_ended(loop, number):  # type: ignore[no-untyped-def]
    if number == 0:
        return loop.numbers[OLDEST] > loop.numbers[LAST_STARTED]
    return number < loop.numbers[OLDEST] or loop.runs[number % MOST_RUNS, ENDED] == 1


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
    e = engine_of(loop, slot)
    for key in range(e.keys.shape[1]):
        if e.moves[FIRST_NEEDS, key % e.numbers[N_MOVES]] == 0 and release(e, key):
            finish(e, key)
    end_if_done(loop, slot)
    return DONE, np.int64(-1)


@plain_kernel
def _begin_on_link(loop, slot, peer):  # type: ignore[no-untyped-def]
    """Count the frames of a run that one peer sends and gets; return a status.

    A peer that still has to send frames of older runs may not send those of this run before it is
    told that this rank has started it. Any other peer needs no permission: see `next_run`.
    """
    links, n_expected = loop.links[peer], loop.ports[slot, peer, EXPECTED]
    if n_expected > 0 and links[N_TO_COME] > 0:
        links[TO_ANNOUNCE] = loop.runs[slot, CALL]
    links[N_USERS] += 1
    links[N_TO_COME] += n_expected
    links[N_TO_SEND] += loop.ports[slot, peer, UNSENT]
    if links[FAULT]:
        return BAD_FRAME
    if links[CLOSED] and n_expected > 0:
        return LOST
    if links[IN_PARKED]:
        links[IN_PARKED] = 0
        return open_frame(loop, peer)
    return DONE


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
        links = loop.links[peers[at]]
        events = 0 if links[IN_PARKED] or links[CLOSED] else POLLIN
        if links[OUT_KEY] != NONE or must_announce(links) or next_run(loop, peers[at]) != NONE:
            events |= POLLOUT
        waits[at + 2, 0] = links[FD] if events else -1
        waits[at + 2, 1] = events
