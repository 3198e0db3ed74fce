"""Turns a plan into tables of moves for the Ethernet cores of Wormhole chips.

**Lanes.** A link has several cables, and each ends in a core of its own. The payload is cut into as
many lanes, and each lane runs the whole plan over one cable of every link. A link that lost cables
shares out its lanes to those that are left.

**Homes.** A lane's piece is cut into blocks. Each block of a rank lives in the L1 of one of its
cores, its home, and only its home changes it. A transfer of a block goes from its home over the NOC
to the core of the link, over the cable, and over the NOC to its home on the next chip, where it is
added or stored. Homes are chosen so that the cores of a chip have equally much to add.

**Slots.** Wherever a block goes from one core to another, it lands in a slot of that channel. A
counter at the receiver says how often the slot was filled, and one at the sender how often it was
emptied. A sender waits until the slot that it fills is empty, so nothing is overwritten.

**Times.** Every move gets a time by what moves cost a core, in clocks. Blocks are placed one after
another, and each transfer of a block takes the first gaps in the times of its cores and slots. A
core does its moves in the order of their times. How fast a core really is changes nothing but
speed.

**Why no core waits forever.** In the order of the times, a move waits only for moves before it: for
one that filled a slot, or for one that emptied it. So the first move that is not done could be
done. In the next slice every core walks the same table again, and the same holds.

**Why the bits are those of `plan.run`.** Chunks are cut as there, for each lane and slice. What
comes to a block of a rank comes in the order of the schedule's rows.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from meshmend.errors import InputError
from meshmend.planning.plan import Plan
from meshmend.schedule.table import COPY as COPY_ROW
from meshmend.schedule.table import Schedule
from meshmend.transport.reference import element_bounds
from meshmend.wormhole.table import (
    ADD,
    ALIGNMENT,
    COPY,
    DATA_AT,
    DRAM_ALIGNMENT,
    DRAM_AT,
    DRAM_PLACES,
    ETHERNET_PLACES,
    ITEM_BYTES,
    L1_BYTES,
    LOAD,
    MOVE_BYTES,
    PASS,
    SEND,
    STORE,
    WAIT,
    Block,
    Core,
    Program,
    Region,
)

_N_SLOTS: Final = 4  # of a channel
_BLOCK_BYTES: Final = {"int32": 1024, "float32": 256, "bfloat16": 256}
_PIECE_BYTES: Final = 16384  # of a lane in a slice: about 16 blocks keep all cores busy
_LARGEST_PIECE: Final = 1 << 17

End = tuple[int, int]  # a rank and the port of it that a link leaves by
Cable = tuple[int, int]  # the channel at this end and at the other
Channel = tuple[End, End]  # blocks go from the core of one end to the core of another

# What moves cost a core in clocks, about: measured under ttsim.
_WAIT_CLOCKS: Final = 25
_SEND_CLOCKS: Final = 100
_EMPTY_CLOCKS: Final = 60
_MOVE_CLOCKS: Final = 40
_COPY_WORD_CLOCKS: Final = 2.3
ADD_WORD_CLOCKS: Final = {"int32": 5.0, "float32": 63.0, "bfloat16": 145.0}


@dataclass(frozen=True)
class Wiring:
    """The cables of every link end: the channels here and there, in one order for both ends."""

    cables: Mapping[End, tuple[Cable, ...]]

    @property
    def n_lanes(self) -> int:
        """How many cables the best link has."""
        return max((len(cables) for cables in self.cables.values()), default=0)

    def core(self, end: End, lane: int) -> Core:
        """Return the core of a link end that carries a lane."""
        cables = self.cables[end]
        return Core(end[0], cables[lane % len(cables)][0])


@dataclass(frozen=True)
class _Transfer:
    """A block that one row of the schedule moves, along the cores of these link ends.

    `starts` has a time for each hop, when the core before it sends, and one for the last core, when
    it adds or stores. `slots` has the slot of each hop.
    """

    row: int
    block: int
    path: tuple[End, ...]
    starts: tuple[float, ...]
    slots: tuple[int, ...]


@dataclass
class _Memory:
    """What of a core's L1 is given away."""

    used: int = DATA_AT

    def take(self, n_bytes: int) -> int:
        at = self.used
        self.used += -(-n_bytes // DRAM_ALIGNMENT) * DRAM_ALIGNMENT
        return at


@dataclass
class _Slot:
    """A slot of a channel in memory, for one lane, and its counters at both ends."""

    sender: Core
    receiver: Core
    address: int
    filled_at: int  # at the receiver
    emptied_at: int  # at the sender
    n_uses: int


@dataclass
class _Tables:
    """The tables as they are written."""

    moves: dict[Core, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))

    def wait(self, core: Core, counter: int, value: int, per_slice: int) -> None:
        self.add(core, WAIT, counter=counter, value=value, per_slice=per_slice)

    def add(
        self,
        core: Core,
        op: int,
        *,
        target: int = 0,
        source: int = 0,
        n_bytes: int = 0,
        counter: int = 0,
        place: int = 0,
        value: int = 0,
        per_slice: int = 0,
    ) -> None:
        self.moves[core].append((op, target, source, n_bytes, counter, place, value, per_slice))


def compiled(
    plan: Plan,
    wiring: Wiring,
    *,
    n_elements: int,
    type_name: str = "int32",
    slices: int | None = None,
) -> Program:
    """Return the tables that run a plan on a payload of so many elements.

    `slices` is how often each core walks its table; by default so often that a lane has 16 KiB a
    slice. Deterministic, in time about linear in the moves.

    Raises:
        InputError: a type that the kernel cannot add, a plan for tiles or of one chip, cables that
            do not fit the plan, or slices that do not fit into the memory of a core.
    """
    schedule = plan.schedule
    _check(plan, wiring, n_elements, type_name, slices)
    n_lanes, item_bytes = wiring.n_lanes, ITEM_BYTES[type_name]
    usual = max(1, -(-n_elements * item_bytes // (n_lanes * _PIECE_BYTES)))
    slices = usual if slices is None else slices
    piece_elements = -(-n_elements // (n_lanes * slices))
    if piece_elements * item_bytes > _LARGEST_PIECE:
        raise InputError(
            f"a Wormhole core needs slices of at most {_LARGEST_PIECE} bytes a lane, but {slices} "
            f"make {piece_elements * item_bytes}; use {usual} or leave them open"
        )
    blocks, blocks_of_chunk = _blocks(schedule, piece_elements, type_name)
    paths = _paths(plan)
    homes = _homes(plan, blocks, blocks_of_chunk, paths)
    transfers = _timed(schedule, blocks, blocks_of_chunk, paths, homes, ADD_WORD_CLOCKS[type_name])
    memory: dict[Core, _Memory] = {}
    slots, uses = _slots(transfers, blocks, wiring, memory)
    cells, regions = _cells(schedule, blocks, homes, wiring, memory, slices)
    tables = _Tables()
    for region, (core, at, n_bytes) in regions:
        _whole_region(tables, LOAD, region, core, at, n_bytes)
    _write_transfers(tables, schedule, transfers, blocks, slots, uses, cells)
    for region, (core, at, n_bytes) in regions:
        _whole_region(tables, STORE, region, core, at, n_bytes)
    return _program(
        plan, wiring, tables, memory, type_name, slices, n_elements, piece_elements, blocks, regions
    )


def _check(plan: Plan, wiring: Wiring, n_elements: int, type_name: str, slices: int | None) -> None:
    if type_name not in ITEM_BYTES:
        raise InputError(f"Wormhole's kernel adds {', '.join(ITEM_BYTES)}, but got {type_name}")
    plan.schedule.refuse_colours("a program for Wormhole")
    if plan.schedule.n_ranks < 2:
        raise InputError(f"a program for Wormhole needs two live chips, but {plan.mesh} has one")
    if n_elements < 1:
        raise InputError("a program for Wormhole needs a payload of one element or more")
    if slices is not None and not 1 <= slices <= n_elements:
        raise InputError(
            f"a program for Wormhole needs from 1 to {n_elements} slices, one for each element, "
            f"but got {slices}"
        )
    neighbors = plan.placement.mesh.neighbor_ranks
    for rank, port in zip(*np.nonzero(neighbors >= 0), strict=True):
        if not wiring.cables.get((int(rank), int(port))):
            here, there = (plan.placement.mesh.live[each] for each in (rank, neighbors[rank, port]))
            raise InputError(
                f"a plan for {plan.mesh} needs a live cable from chip {here} to chip {there}, but "
                "the machine has none; fail the link and plan again"
            )


def _blocks(
    schedule: Schedule, piece_elements: int, type_name: str
) -> tuple[tuple[Block, ...], list[range]]:
    """Return the blocks of a lane's piece, and which of them each chunk has."""
    item_bytes, most = ITEM_BYTES[type_name], _BLOCK_BYTES[type_name]
    bounds = element_bounds(schedule, piece_elements).tolist()
    per_line = ALIGNMENT // item_bytes
    blocks: list[Block] = []
    of_chunk = []
    for start, stop in pairwise(bounds):
        first = len(blocks)
        n_blocks = -(-(stop - start) * item_bytes // most)
        for number in range(n_blocks):
            low, high = (
                min(stop, start + -(-(stop - start) * each // (n_blocks * per_line)) * per_line)
                for each in (number, number + 1)
            )
            if low < high:
                n_bytes = -(-(high - low) * item_bytes // ALIGNMENT) * ALIGNMENT
                blocks.append(Block(low, high, n_bytes))
        of_chunk.append(range(first, len(blocks)))
    return tuple(blocks), of_chunk


def _paths(plan: Plan) -> dict[tuple[int, int], tuple[End, ...]]:
    """Return the link ends on the way from one rank to another, for each pair that exchanges."""
    routes, neighbors = plan.placement.routes, plan.placement.mesh.neighbor_ranks
    paths = {}
    for pair, (src, dst) in enumerate(zip(routes.src.tolist(), routes.dst.tolist(), strict=True)):
        ends: list[End] = []
        for channel in routes.channels[routes.hop_ptr[pair] : routes.hop_ptr[pair + 1]].tolist():
            rank, port = divmod(channel, routes.n_ports)
            ends += [(rank, port), (int(neighbors[rank, port]), port ^ 1)]
        paths[src, dst] = tuple(ends)
    return paths


def _homes(
    plan: Plan,
    blocks: Sequence[Block],
    blocks_of_chunk: Sequence[range],
    paths: Mapping[tuple[int, int], tuple[End, ...]],
) -> dict[tuple[int, int], End]:
    """Return the home of each block of each place that the schedule uses, and of each payload.

    A chip's adding is shared out evenly among its cores. Among equals, the core wins by which the
    block comes or goes: it saves a way over the NOC.
    """
    schedule = plan.schedule
    work: dict[tuple[int, int], int] = defaultdict(int)
    ends: dict[tuple[int, int], list[End]] = defaultdict(list)
    for rank in range(schedule.n_ranks):
        for block in range(len(blocks)):
            work[rank * schedule.n_buffers, block] = 1
    for src, dst, src_place, dst_place, lo, hi, op in _rows(schedule):
        path = paths.get((src, dst), ())
        for chunk in range(lo, hi):
            for block in blocks_of_chunk[chunk]:
                work[src_place, block] += 1
                work[dst_place, block] += blocks[block].n_bytes // (4 if op == COPY_ROW else 1)
                if path:
                    ends[src_place, block].append(path[0])
                    ends[dst_place, block].append(path[-1])
    neighbors = plan.placement.mesh.neighbor_ranks
    ports = [
        [(rank, int(port)) for port in np.flatnonzero(row >= 0)]
        for rank, row in enumerate(neighbors)
    ]
    load: dict[End, int] = defaultdict(int)
    homes = {}
    for cell in sorted(work, key=lambda cell: (cell[1], cell[0])):
        near = ends[cell]
        home = min(
            ports[cell[0] // schedule.n_buffers],
            key=lambda end: (load[end] - 64 * near.count(end), end),
        )
        load[home] += work[cell]
        homes[cell] = home
    return homes


def _rows(schedule: Schedule) -> "zip[tuple[int, ...]]":
    columns = (
        schedule.src,
        schedule.dst,
        schedule.src_place,
        schedule.dst_place,
        schedule.lo,
        schedule.hi,
        schedule.op,
    )
    return zip(*(column.tolist() for column in columns), strict=True)


class _Timeline:
    """When a core, or a slot, is taken: intervals that do not overlap, sorted."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def gap(self, earliest: float, length: float) -> float:
        """Return the first time from `earliest` on that begins a gap of this length."""
        at = bisect_right(self._ends, earliest)
        while at < len(self._starts) and self._starts[at] < earliest + length:
            earliest = self._ends[at]
            at += 1
        return earliest

    def take(self, start: float, end: float) -> None:
        """Take an interval in a gap; it melts together with those that it touches."""
        at = bisect_right(self._starts, start)
        joins_before = at > 0 and self._ends[at - 1] == start
        joins_after = at < len(self._starts) and self._starts[at] == end
        if joins_before and joins_after:
            self._ends[at - 1] = self._ends[at]
            del self._starts[at], self._ends[at]
        elif joins_before:
            self._ends[at - 1] = end
        elif joins_after:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)


def _timed(
    schedule: Schedule,
    blocks: Sequence[Block],
    blocks_of_chunk: Sequence[range],
    paths: Mapping[tuple[int, int], tuple[End, ...]],
    homes: Mapping[tuple[int, int], End],
    add_word_clocks: float,
) -> list[_Transfer]:
    """Return all transfers of a lane's piece with their times and slots.

    The first blocks of all chunks are placed before the second of any. A transfer begins when its
    block has been summed, and ends after what it changes was sent on and changed before, in the
    order of the rows.
    """
    rows = list(_rows(schedule))
    rows_of_chunk: list[list[int]] = [[] for _ in range(schedule.n_chunks)]
    for row, (_, _, _, _, lo, hi, _) in enumerate(rows):
        for chunk in range(lo, hi):
            rows_of_chunk[chunk].append(row)
    order = sorted(
        ((block - numbers.start + 0.5) / len(numbers), chunk, block)
        for chunk, numbers in enumerate(blocks_of_chunk)
        for block in numbers
    )
    cores: dict[End, _Timeline] = defaultdict(_Timeline)
    slots: dict[Channel, list[_Timeline]] = defaultdict(
        lambda: [_Timeline() for _ in range(_N_SLOTS)]
    )
    transfers = []
    for _, chunk, block in order:
        written: dict[int, float] = defaultdict(float)
        sent: dict[int, float] = defaultdict(float)
        n_words = blocks[block].n_bytes / 4
        for row in rows_of_chunk[chunk]:
            src, dst, src_place, dst_place, _, _, op = rows[row]
            ends = (homes[src_place, block], *paths.get((src, dst), ()), homes[dst_place, block])
            path = tuple(end for at, end in enumerate(ends) if not at or end != ends[at - 1])
            word_clocks = _COPY_WORD_CLOCKS if op == COPY_ROW else add_word_clocks
            lengths = [_WAIT_CLOCKS + _SEND_CLOCKS]
            lengths += [2 * _WAIT_CLOCKS + _SEND_CLOCKS + _EMPTY_CLOCKS] * (len(path) - 2)
            lengths = lengths[: len(path) - 1]
            lengths.append(_WAIT_CLOCKS + _MOVE_CLOCKS + int(n_words * word_clocks) + _EMPTY_CLOCKS)
            starts, taken = _placed(
                [cores[end] for end in path],
                [slots[hop] for hop in pairwise(path)],
                lengths,
                first=written[src_place],
                last=max(written[dst_place], sent[dst_place]),
            )
            written[dst_place] = starts[-1] + lengths[-1]
            sent[src_place] = max(sent[src_place], starts[0] + lengths[0])
            transfers.append(_Transfer(row, block, path, starts, taken))
    return transfers


def _placed(
    cores: Sequence[_Timeline],
    slots: Sequence[Sequence[_Timeline]],
    lengths: Sequence[float],
    *,
    first: float,
    last: float,
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Take the first gaps of a transfer's cores and slots; return its starts and its slots.

    `first` bounds the start of its first move, and `last` that of its last.
    """
    earliest = [0.0] * len(cores)
    earliest[0] = first
    earliest[-1] = max(earliest[-1], last)
    while True:
        starts: list[float] = []
        ready = 0.0
        for core, length, bound in zip(cores, lengths, earliest, strict=True):
            starts.append(core.gap(max(ready, bound), length))
            ready = starts[-1] + length
        taken: list[int] = []
        for hop, choices in enumerate(slots):
            start, end = starts[hop], starts[hop + 1] + lengths[hop + 1]
            gaps = [slot.gap(start, end - start) for slot in choices]
            best = min(range(len(gaps)), key=gaps.__getitem__)
            if gaps[best] > start:
                earliest[hop] = gaps[best]
                break
            taken.append(best)
        else:
            break
    for core, start, length in zip(cores, starts, lengths, strict=True):
        core.take(start, start + length)
    for hop, number in enumerate(taken):
        slots[hop][number].take(starts[hop], starts[hop + 1] + lengths[hop + 1])
    return tuple(starts), tuple(taken)


_SlotKey = tuple[Channel, int]


def _slots(
    transfers: Sequence[_Transfer],
    blocks: Sequence[Block],
    wiring: Wiring,
    memory: dict[Core, _Memory],
) -> tuple[dict[_SlotKey, list[_Slot]], dict[tuple[int, int], int]]:
    """Return each slot, once for each lane, and how often it was used before each hop.

    A hop is named by its transfer's number and its own.
    """
    largest: dict[_SlotKey, int] = defaultdict(int)
    filled: dict[_SlotKey, list[tuple[float, int, int]]] = defaultdict(list)
    for number, transfer in enumerate(transfers):
        for hop, channel in enumerate(pairwise(transfer.path)):
            key = channel, transfer.slots[hop]
            largest[key] = max(largest[key], blocks[transfer.block].n_bytes)
            filled[key].append((transfer.starts[hop], number, hop))
    slots: dict[_SlotKey, list[_Slot]] = {}
    uses = {}
    for key in sorted(largest):
        for use, (_, number, hop) in enumerate(sorted(filled[key])):
            uses[number, hop] = use
        slots[key] = []
        for lane in range(wiring.n_lanes):
            sender, receiver = (wiring.core(end, lane) for end in key[0])
            at_sender, at_receiver = (
                memory.setdefault(core, _Memory()) for core in (sender, receiver)
            )
            slots[key].append(
                _Slot(
                    sender,
                    receiver,
                    address=at_receiver.take(largest[key]),
                    filled_at=at_receiver.take(ALIGNMENT),
                    emptied_at=at_sender.take(ALIGNMENT),
                    n_uses=len(filled[key]),
                )
            )
    return slots, uses


_Regions = list[tuple[Region, tuple[Core, int, int]]]


def _cells(
    schedule: Schedule,
    blocks: Sequence[Block],
    homes: Mapping[tuple[int, int], End],
    wiring: Wiring,
    memory: dict[Core, _Memory],
    slices: int,
) -> tuple[dict[tuple[int, int, int], tuple[Core, int]], _Regions]:
    """Return the core and address of each cell (place, block, lane), and the payload's regions.

    The payload's blocks of one home lie side by side, so that one move loads them all. A region
    names the core that has it, its address there, and its bytes.
    """
    at_home: dict[End, list[int]] = defaultdict(list)
    for (place, block), home in sorted(homes.items()):
        if place % schedule.n_buffers == 0:
            at_home[home].append(block)
    cells: dict[tuple[int, int, int], tuple[Core, int]] = {}
    regions: _Regions = []
    for (rank, port), kept in sorted(at_home.items()):
        n_bytes = sum(blocks[block].n_bytes for block in kept)
        stride = -(-n_bytes // DRAM_ALIGNMENT) * DRAM_ALIGNMENT
        for lane in range(wiring.n_lanes):
            core = wiring.core((rank, port), lane)
            at = start = memory.setdefault(core, _Memory()).take(n_bytes)
            for block in kept:
                cells[rank * schedule.n_buffers, block, lane] = core, at
                at += blocks[block].n_bytes
            # Each DRAM serves the cores of every fourth port; ports beyond the fourth follow.
            row = port // len(DRAM_PLACES) * wiring.n_lanes + lane
            region = Region(
                rank=rank,
                lane=lane,
                place=DRAM_PLACES[port % len(DRAM_PLACES)],
                address=DRAM_AT + row * _DRAM_STRIDE,
                stride=stride,
                blocks=tuple(kept),
            )
            if slices * stride > _DRAM_STRIDE:
                raise InputError(
                    f"a program for Wormhole needs at most {_DRAM_STRIDE} bytes for a core, but "
                    f"got {slices * stride}; use a smaller payload"
                )
            regions.append((region, (core, start, n_bytes)))
    for (place, block), home in sorted(homes.items()):
        if place % schedule.n_buffers:
            for lane in range(wiring.n_lanes):
                core = wiring.core(home, lane)
                at = memory.setdefault(core, _Memory()).take(blocks[block].n_bytes)
                cells[place, block, lane] = core, at
    return cells, regions


_DRAM_STRIDE: Final = 1 << 26  # between the regions of two lanes


def _whole_region(
    tables: _Tables, op: int, region: Region, core: Core, at: int, n_bytes: int
) -> None:
    target, source = (at, region.address) if op == LOAD else (region.address, at)
    tables.add(
        core,
        op,
        target=target,
        source=source,
        n_bytes=n_bytes,
        place=region.place,
        per_slice=region.stride,
    )


def _write_transfers(
    tables: _Tables,
    schedule: Schedule,
    transfers: Sequence[_Transfer],
    blocks: Sequence[Block],
    slots: Mapping[_SlotKey, Sequence[_Slot]],
    uses: Mapping[tuple[int, int], int],
    cells: Mapping[tuple[int, int, int], tuple[Core, int]],
) -> None:
    """Write the moves of all transfers, in the order of their times."""
    src_place, dst_place = schedule.src_place.tolist(), schedule.dst_place.tolist()
    is_copy = (schedule.op == COPY_ROW).tolist()
    order = sorted(
        (start, number, at)
        for number, transfer in enumerate(transfers)
        for at, start in enumerate(transfer.starts)
    )
    n_lanes = 1 + max(lane for _, _, lane in cells)
    for _, number, at in order:
        transfer = transfers[number]
        channels = list(pairwise(transfer.path))
        n_bytes = blocks[transfer.block].n_bytes
        for lane in range(n_lanes):
            core, source = cells[src_place[transfer.row], transfer.block, lane]
            before = None
            if at > 0:
                before = slots[channels[at - 1], transfer.slots[at - 1]][lane]
                n_filled = uses[number, at - 1] + 1
                core, source = before.receiver, before.address
                tables.wait(core, before.filled_at, n_filled, before.n_uses)
            if at < len(channels):
                slot = slots[channels[at], transfer.slots[at]][lane]
                tables.wait(core, slot.emptied_at, uses[number, at], slot.n_uses)
                _signal(
                    tables,
                    (slot.sender, slot.receiver),
                    slot.filled_at,
                    uses[number, at] + 1,
                    slot.n_uses,
                    target=slot.address,
                    source=source,
                    n_bytes=n_bytes,
                )
            else:
                _, target = cells[dst_place[transfer.row], transfer.block, lane]
                op = COPY if is_copy[transfer.row] else ADD
                tables.add(core, op, target=target, source=source, n_bytes=n_bytes)
            if before is not None:
                ends = before.receiver, before.sender
                _signal(tables, ends, before.emptied_at, n_filled, before.n_uses)


def _signal(
    tables: _Tables,
    ends: tuple[Core, Core],
    counter: int,
    value: int,
    per_slice: int,
    *,
    target: int = 0,
    source: int = 0,
    n_bytes: int = 0,
) -> None:
    """Write the move by which one core sets a counter of another, after some bytes."""
    here, there = ends
    is_cable = here.rank != there.rank
    tables.add(
        here,
        SEND if is_cable else PASS,
        target=target,
        source=source,
        n_bytes=n_bytes,
        counter=counter,
        place=0 if is_cable else ETHERNET_PLACES[there.channel],
        value=value,
        per_slice=per_slice,
    )


def _program(
    plan: Plan,
    wiring: Wiring,
    tables: _Tables,
    memory: Mapping[Core, _Memory],
    type_name: str,
    slices: int,
    n_elements: int,
    piece_elements: int,
    blocks: tuple[Block, ...],
    regions: _Regions,
) -> Program:
    moves, table_at = {}, {}
    for core in sorted(tables.moves):
        words = np.array(tables.moves[core], dtype=np.int64).astype(np.uint32)
        needed = memory[core].used + len(words) * MOVE_BYTES
        if needed > L1_BYTES:
            raise InputError(
                f"a Wormhole core needs its blocks and moves within {L1_BYTES - DATA_AT} bytes, "
                f"but channel {core.channel} of rank {core.rank} needs {needed - DATA_AT}; use "
                "more slices, or 'trees'"
            )
        moves[core], table_at[core] = words, memory[core].used
    neighbors = plan.placement.mesh.neighbor_ranks
    peer = {
        Core(rank, here): Core(int(neighbors[rank, port]), there)
        for (rank, port), cables in wiring.cables.items()
        for here, there in cables
    }
    return Program(
        type_name=type_name,
        n_ranks=plan.schedule.n_ranks,
        n_lanes=wiring.n_lanes,
        n_slices=slices,
        n_elements=n_elements,
        piece_elements=piece_elements,
        blocks=blocks,
        regions=tuple(region for region, _ in regions),
        moves=moves,
        table_at=table_at,
        peer=peer,
    )
