"""What each rank does, in which order, when a schedule runs as remote copies between chips.

The payload is a row of **blocks** of one size. A **transfer** is one remote copy (DMA) of one block
of one row of the schedule. A **channel** is an ordered pair of ranks that exchanges blocks; for
neighbours it is one direction of a link. `pack` gives each transfer a step: a channel has at most
one transfer per step. In step t a rank first sends its transfers of step t, then takes the blocks
that were sent to it in step t - 1. So a block that is sent to a rank in step t can be sent on in
step t + 2, and in the step between the rank has other blocks to send. Steps only order the work of
each rank: no rank waits for a step to end.

`dma_program` makes of that what each rank does. The receiver of a channel has two
**slots** in which blocks land. The sender fills a slot again when it has a **credit** for it, which
the receiver gives when it has used what landed there.

**Why no rank waits forever.** In step t a rank sends its transfers of step t, then takes the blocks
that were sent to it in step t - 1. So it waits for two things of other ranks. It waits for a block
that was sent in step t - 1. And it waits for a credit: the block that used the slot before was sent
in step t - 2 or earlier, because a channel has two slots and one transfer per step, so its receiver
takes it in step t - 1 or earlier. A wait in step t is only for work of earlier steps. Take the
first step that some rank cannot finish: all that it waits for was done.

**Why nothing is lost or read too early.** A block is sent after the last change of it was stored,
changed after it has left, and a buffer or slot is filled again after it was read. Where the order
of the words does not see to it, they say so (`WAIT_SENT`, `WAIT_STORED`, `REUSED`, `CREDIT`). In
the end every semaphore is back at zero.

Each rank's program is a list of 32-bit words, so that one kernel serves all ranks. Uses NumPy
alone.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import UnsupportedError
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
    schedule.refuse_colours("a kernel of remote copies")
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


N_SLOTS: Final = 2
N_BUFFERS: Final = 2  # in which a rank makes the new values of its blocks

# What a word says: an operation, and what it is done with.
SEND: Final = 0  # send a block
ADD: Final = 1  # add the block that landed to the rank's own, and store the sum
PUT: Final = 2  # store the block that landed in place of the rank's own
WAIT_SENT: Final = 3  # wait until the last block that was sent into a slot has left
WAIT_STORED: Final = 4  # wait until the last block that was stored from a buffer is in place


@dataclass(frozen=True)
class Bits:
    """Where a number is in a word."""

    shift: int
    width: int

    @property
    def mask(self) -> int:
        return (1 << self.width) - 1


OP: Final = Bits(0, 3)
SLOT: Final = Bits(3, 1)  # ADD and PUT: where the block landed. SEND: where it lands
BUFFER: Final = Bits(4, 1)  # ADD and PUT: where the new value is until it is stored
CREDIT: Final = Bits(5, 1)  # SEND: wait for a credit first. ADD and PUT: give one afterwards
REUSED: Final = Bits(6, 1)  # first wait for what was last sent into the slot, or stored
CHANNEL: Final = Bits(7, 6)  # the number of the channel among those out of, or into, this rank
BLOCK: Final = Bits(13, 18)


@dataclass(frozen=True, eq=False)
class DmaProgram:
    """The programs of all ranks, one line of each array per rank.

    `sizes[rank]` counts the rank's words, its channels out and its channels in. Words after that
    number mean nothing. `channels[rank]` has four lines: the rank that each channel out leads to,
    its number among the channels into that rank, and the same two of each channel in.
    """

    n_blocks: int
    words: NDArray[np.int32]
    sizes: NDArray[np.int32]
    channels: NDArray[np.int32]


def field_of(words: NDArray[Any], bits: Bits) -> NDArray[Any]:
    """Return one number of each word."""
    return words >> bits.shift & bits.mask


def dma_program(schedule: Schedule, n_blocks: int) -> DmaProgram:
    """Return the programs that run a schedule on a payload of `n_blocks` blocks.

    The payload is cut into chunks at block bounds. Takes time about linear in the transfers.

    Raises:
        UnsupportedError: there are more blocks or channels than a word can name.
    """
    transfers = pack(schedule, n_blocks)
    src, dst = transfers.channel_src, transfers.channel_dst
    out_number, in_number = _numbers_within(src), _numbers_within(dst)
    most = max(int(out_number.max(initial=0)), int(in_number.max(initial=0))) + 1
    if n_blocks > BLOCK.mask or most > CHANNEL.mask:
        raise UnsupportedError(
            f"a program of remote copies needs at most {BLOCK.mask} blocks and {CHANNEL.mask} "
            f"peers per rank, but {schedule.algorithm} has {n_blocks} and {most}; ask for fewer "
            "slices, or use another algorithm"
        )
    words, n_words = _words(schedule, transfers, out_number, in_number)
    n_ranks = schedule.n_ranks
    channels = np.zeros((n_ranks, 4, most), dtype=np.int32)
    channels[src, 0, out_number], channels[src, 1, out_number] = dst, in_number
    channels[dst, 2, in_number], channels[dst, 3, in_number] = src, out_number
    n_out, n_in = (np.bincount(end, minlength=n_ranks) for end in (src, dst))
    sizes = np.stack([n_words, n_out, n_in], axis=1).astype(np.int32)
    return DmaProgram(n_blocks, words, sizes, channels)


def _numbers_within(groups: Numbers) -> Numbers:
    """Return for each entry how many of its group come before it."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    numbers = np.empty_like(groups)
    numbers[order] = np.arange(len(groups)) - np.searchsorted(ordered, ordered)
    return numbers


def _words(
    schedule: Schedule, transfers: Transfers, out_number: Numbers, in_number: Numbers
) -> tuple[NDArray[np.int32], Numbers]:
    """Return each rank's words, and how many they are."""
    words, rank = _moves(schedule, transfers, out_number, in_number)
    op = field_of(words, OP)
    is_send = op == SEND
    block = rank << BLOCK.width | field_of(words, BLOCK)
    slot = (rank << CHANNEL.width | field_of(words, CHANNEL)) << SLOT.width | field_of(words, SLOT)
    buffer = rank << BUFFER.width | field_of(words, BUFFER)
    # A block that is being sent must not change. One that is being stored must not be touched.
    sent = _waits(is_send, place=slot, block=block, disturbs=~is_send)
    stored = _waits(~is_send, place=buffer, block=block, disturbs=np.ones_like(is_send))
    reused = np.concatenate([sent.reused, stored.reused])
    words[reused] |= 1 << REUSED.shift
    kept = SLOT.mask << SLOT.shift | BUFFER.mask << BUFFER.shift | CHANNEL.mask << CHANNEL.shift
    waits = [words[sent.of] & kept | WAIT_SENT, words[stored.of] & kept | WAIT_STORED]
    key = np.concatenate([2 * np.arange(len(words)) + 1, 2 * sent.before, 2 * stored.before])
    rank = np.concatenate([rank, rank[sent.of], rank[stored.of]])
    words = np.concatenate([words, *waits])
    order = np.lexsort((key, rank))
    rank = rank[order]
    n_words = np.bincount(rank, minlength=schedule.n_ranks)
    table = np.zeros((schedule.n_ranks, max(1, n_words.max())), dtype=np.int32)
    table[rank, _numbers_within(rank)] = words[order]
    return table, n_words


def _moves(
    schedule: Schedule, transfers: Transfers, out_number: Numbers, in_number: Numbers
) -> tuple[Numbers, Numbers]:
    """Return the words that send and take blocks, rank by rank in program order, and the ranks."""
    channel, block, n_transfers = transfers.channel, transfers.block, len(transfers.row)
    # The slot and the credits follow from a transfer's place on its channel.
    order = np.lexsort((transfers.step, channel))
    place = np.empty(n_transfers, dtype=np.int64)
    place[order] = _numbers_within(channel[order])
    n_on_channel = np.bincount(channel, minlength=len(transfers.channel_src))[channel]
    slot = place % N_SLOTS << SLOT.shift | block << BLOCK.shift
    op = np.where(schedule.op[transfers.row] == COPY, PUT, ADD)
    waits, gives = place >= N_SLOTS, place + N_SLOTS < n_on_channel
    sends = SEND | waits << CREDIT.shift | out_number[channel] << CHANNEL.shift
    takes = op | gives << CREDIT.shift | in_number[channel] << CHANNEL.shift
    rank = np.concatenate([transfers.channel_src[channel], transfers.channel_dst[channel]])
    step = np.concatenate([transfers.step, transfers.step + 1])
    is_take = np.repeat([0, 1], n_transfers)
    order = np.lexsort((np.tile(transfers.row, 2), is_take, step, rank))
    words, rank, is_take = (
        np.concatenate([sends | slot, takes | slot])[order],
        rank[order],
        is_take[order],
    )
    buffer = _numbers_within(2 * rank + is_take) % N_BUFFERS
    return words | (is_take * buffer) << BUFFER.shift, rank


class _Waits(NamedTuple):
    """Where copies are waited for: once each.

    The words `reused` use the place of a copy again, and wait first. The copies `of` need a wait of
    their own before the words `before`, or at the end if that is the number of words.
    """

    reused: Numbers
    of: Numbers
    before: Numbers


def _waits(
    is_copy: NDArray[np.bool_], *, place: Numbers, block: Numbers, disturbs: NDArray[np.bool_]
) -> _Waits:
    """Return where each copy is waited for.

    That is when its place is used again, before a word that disturbs its block, or at the end,
    whatever comes first.
    """
    again = _next_of(is_copy, np.where(is_copy, place, -1))
    disturbed = _next_of(disturbs, block)
    is_early = is_copy & (again < disturbed)
    of = np.flatnonzero(is_copy & ~is_early)
    return _Waits(again[is_early], of, disturbed[of])


def _next_of(is_wanted: NDArray[np.bool_], group: Numbers) -> Numbers:
    """Return for each entry the next wanted one of its group; the number of entries if none."""
    order = np.argsort(group, kind="stable")
    n = len(group)
    places = np.where(is_wanted[order], np.arange(n), n)
    later = np.append(np.minimum.accumulate(places[::-1])[::-1], n)[1:]
    found = np.append(order, n)[later]
    found[np.append(group, -2)[found] != group[order]] = n
    result = np.empty(n, dtype=np.int64)
    result[order] = found
    return result
