"""What each rank does, in which order, when a schedule runs as remote copies between chips.

One remote copy (DMA) moves one block (`block_transfers`). The receiver of a channel has two
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
from meshmend.schedule.table import COPY, Schedule
from meshmend.transport.block_transfers import Numbers, Transfers, pack

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
