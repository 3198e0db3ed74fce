"""Cuts the rows of a schedule into copies of single blocks, and packs these into steps.

The payload is a row of **blocks** of one size. A **transfer** is one block of one row of the
schedule. A **channel** is an ordered pair of ranks that exchanges blocks; for neighbours it is one
direction of a link.

A channel has at most one transfer per step. In step t a rank first sends its transfers of step t,
then takes the blocks that were sent to it in step t - 1. So a block that is sent to a rank in step
t can be sent on in step t + 2, and in the step between the rank has other blocks to send. Steps
only order the work of each rank: no rank waits for a step to end. Uses NumPy alone.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel
from meshmend.schedule.table import COPY, Schedule

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Transfers:
    """Every copy of a block, in the steps that it is sent in.

    `channel` counts the ordered pairs (`channel_src`, `channel_dst`), sorted.
    """

    row: Numbers
    block: Numbers
    step: Numbers
    channel: Numbers
    channel_src: Numbers
    channel_dst: Numbers

    @property
    def n_steps(self) -> int:
        return int(self.step.max(initial=-1)) + 1

    @property
    def busiest_channel(self) -> int:
        """How many transfers the busiest channel has: no packing has fewer steps."""
        return int(np.bincount(self.channel).max(initial=0))


def most_channels_in(schedule: Schedule) -> int:
    """Return the most channels that reach a rank; at least 1."""
    receivers = _pairs(schedule)[0] % schedule.n_ranks
    return int(np.bincount(receivers).max(initial=1))


def pack(schedule: Schedule, n_blocks: int) -> Transfers:
    """Return the transfers of a schedule, packed into steps.

    Blocks are placed one after another, the first block of each chunk before the second of any.
    Each transfer of a block takes the first step in which what it waits for is there and its
    channel is free; so later blocks fill the gaps that earlier ones leave.

    Raises:
        UnsupportedError: the schedule needs scratch buffers, which a kernel does not have.
    """
    schedule.refuse_scratch("a kernel of remote copies")
    pair_of_channel, channel_of_row = _pairs(schedule)
    bounds = np.rint(schedule.cuts * n_blocks).astype(np.int64)
    sizes = np.diff(bounds)
    chunk_of_block = np.repeat(np.arange(schedule.n_chunks), sizes)
    place = (np.arange(n_blocks) - bounds[chunk_of_block] + 0.5) / sizes[chunk_of_block]
    ptr, rows = _rows_of_chunks(schedule)
    row, block, step = _packed(
        np.lexsort((chunk_of_block, place)),
        chunk_of_block,
        (ptr, rows),
        (
            schedule.src.astype(np.int64),
            schedule.dst.astype(np.int64),
            schedule.op == COPY,
            channel_of_row.astype(np.int64),
        ),
        (schedule.n_ranks, len(pair_of_channel)),
    )
    return Transfers(
        row=row,
        block=block,
        step=step,
        channel=channel_of_row[row],
        channel_src=pair_of_channel // schedule.n_ranks,
        channel_dst=pair_of_channel % schedule.n_ranks,
    )


def _pairs(schedule: Schedule) -> tuple[Numbers, Numbers]:
    """Return the pair of each channel as one number, source first, and the channel of each row."""
    pairs = schedule.src.astype(np.int64) * schedule.n_ranks + schedule.dst
    pair_of_channel, channel_of_row = np.unique(pairs, return_inverse=True)
    return pair_of_channel, channel_of_row


def _rows_of_chunks(schedule: Schedule) -> tuple[Numbers, Numbers]:
    """Return for each chunk the rows that move it, in row order, as one list and its bounds."""
    lo, hi = schedule.lo.astype(np.int64), schedule.hi.astype(np.int64)
    widths = hi - lo
    row = np.repeat(np.arange(schedule.n_rows), widths)
    first = np.repeat(np.cumsum(widths) - widths, widths)
    chunk = lo[row] + np.arange(len(row)) - first
    ptr = np.searchsorted(np.sort(chunk), np.arange(schedule.n_chunks + 1))
    return ptr, row[np.argsort(chunk, kind="stable")]


@kernel
def _packed(order, chunk_of_block, rows_of_chunk, columns, sizes):  # type: ignore[no-untyped-def]
    """Return row, block and step of every transfer.

    For the block in hand, `written`, `put` and `sent` are the last steps in which anything was
    sent to a rank, was sent to replace the rank's own, and was sent by the rank.
    """
    ptr, rows = rows_of_chunk
    src, dst, is_copy, channel = columns
    n_ranks, n_channels = sizes
    n_transfers = 0
    for block in order:
        n_transfers += ptr[chunk_of_block[block] + 1] - ptr[chunk_of_block[block]]
    result = np.empty((3, n_transfers), dtype=np.int64)
    next_free = _grown(np.empty((n_channels, 0), dtype=np.int32), 64)
    state = np.empty((3, n_ranks), dtype=np.int64)
    written, put, sent = state[0], state[1], state[2]
    at = 0
    for block in order:
        for rank in range(n_ranks):
            written[rank], put[rank], sent[rank] = -2, 0, 0
        chunk = chunk_of_block[block]
        for which in range(ptr[chunk], ptr[chunk + 1]):
            row = rows[which]
            before = written[dst[row]] if is_copy[row] else put[dst[row]]
            step = max(written[src[row]] + 2, sent[dst[row]] - 1, before)
            next_free, step = _take_step(next_free, channel[row], step)
            written[dst[row]] = max(written[dst[row]], step)
            sent[src[row]] = max(sent[src[row]], step)
            if is_copy[row]:
                put[dst[row]] = step
            result[0, at], result[1, at], result[2, at] = row, block, step
            at += 1
    return result


@kernel
def _take_step(next_free, channel, step):  # type: ignore[no-untyped-def]
    """Return the first step from `step` on in which a channel is free, and mark it as taken.

    `next_free[channel, step]` is the step itself while it is free, and a later one once taken.
    """
    while True:
        if step + 1 >= next_free.shape[1]:
            next_free = _grown(next_free, 2 * (step + 2))
        found = next_free[channel, step]
        if found == step:
            next_free[channel, step] = step + 1
            return next_free, step
        if found < next_free.shape[1]:  # shortens the way for those who come after
            next_free[channel, step] = next_free[channel, found]
        step = found


@kernel
def _grown(next_free, n_steps):  # type: ignore[no-untyped-def]
    grown = np.empty((next_free.shape[0], n_steps), dtype=np.int32)
    for channel in range(grown.shape[0]):
        for step in range(n_steps):  # assigning slices would take seconds to compile
            grown[channel, step] = step
            if step < next_free.shape[1]:
                grown[channel, step] = next_free[channel, step]
    return grown
