"""The runs in flight, as compiled code sees them: whose turn it is on a link, and when one ends.

A **run** is one run of a task. Python makes its tables and enters their addresses in a line of
`runs`; the event loop does the rest.
"""

from typing import Any, NamedTuple

from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

from meshmend.kernels import inlined, plain_kernel
from meshmend.transport.frames import (
    ANNOUNCED,
    CALL,
    DONE_FD,
    ENDED,
    FOLLOWING_AT,
    HEAP_AT,
    HEAP_SIZE,
    IS_USED,
    KEYS_AT,
    LAST_BEGUN,
    LEFT,
    LINKS_CHANGED,
    MOST_RUNS,
    MOVES_AT,
    N_KEY_LINES,
    N_KEYS,
    N_MOVES,
    N_READY,
    N_TO_COME,
    N_USERS,
    NONE,
    OLDEST,
    ONE,
    PEER_STARTED,
    STACK_AT,
    TO_ANNOUNCE,
    UNSENT,
)
from meshmend.transport.libc import write_event
from meshmend.transport.rank_program import Numbers


class Loop(NamedTuple):
    """What the event loop reads and writes: few arrays of one type, so that it compiles fast."""

    links: Numbers
    runs: Numbers
    ports: Numbers
    numbers: Numbers


class Engine(NamedTuple):
    """One run in the event loop: its own tables, and the links, which all runs share."""

    moves: Numbers
    following: Numbers
    keys: Numbers
    heap: Numbers
    stack: Numbers
    ports: Numbers
    numbers: Numbers
    links: Numbers


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


@inlined
def engine_of(loop, slot):  # type: ignore[no-untyped-def]
    """Return the run of a slot; only for plain kernels, because its use is not counted."""
    run = loop.runs[slot]
    n_moves, n_keys = run[N_MOVES], run[N_KEYS]
    return Engine(
        _table(run[MOVES_AT], 5, n_moves + 1),
        _table(run[FOLLOWING_AT], 1, n_keys)[0],  # no kernel asks for the length of this one
        _table(run[KEYS_AT], N_KEY_LINES, n_keys),
        _table(run[HEAP_AT], 1, n_keys)[0],
        _table(run[STACK_AT], 1, n_keys + 1)[0],
        loop.ports[slot],
        run,
        loop.links,
    )


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
def must_announce(links):  # type: ignore[no-untyped-def]
    """Whether a peer waits to be told which runs this rank has started; `links` is its line."""
    return links[TO_ANNOUNCE] > links[ANNOUNCED] and links[N_TO_COME] > 0


@plain_kernel
def end_if_done(loop, slot):  # type: ignore[no-untyped-def]
    """End a run if all its keys are done: free its links, and tell who waits for it."""
    if loop.runs[slot, LEFT] > 0 or loop.runs[slot, ENDED]:
        return
    for peer in range(loop.links.shape[0]):
        loop.links[peer, N_USERS] -= loop.ports[slot, peer, IS_USED]
        loop.ports[slot, peer, IS_USED] = 0
    loop.numbers[LINKS_CHANGED] = 1
    loop.runs[slot, ENDED] = 1
    if loop.runs[slot, DONE_FD] >= 0:
        write_event(loop.runs[slot, DONE_FD], loop.numbers[ONE:].ctypes.data)
    # Python closes the descriptors of runs before the oldest, so this comes last.
    while (
        loop.numbers[OLDEST] <= loop.numbers[LAST_BEGUN]
        and loop.runs[loop.numbers[OLDEST] % MOST_RUNS, ENDED]
    ):
        loop.numbers[OLDEST] += 1
