"""Writes the plan of an allreduce as MSCCL XML, which MSCCL's and RCCL's runtimes execute.

Each rank gets a thread block for every rank it sends to, and one for every rank it receives from.
A row becomes a step `s` at its source and a step `r` (copy) or `rrc` (reduce) at its destination.
Both ends take the rows of a connection in the order of the table, so they match. What else must
wait is written as a dependency; a step that waits for several has `nop` steps before it.

No circle of waiting is possible: every step waits for steps of earlier rows only.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import UnsupportedError
from meshmend.planning.plan import Plan
from meshmend.schedule.table import REDUCE, Collective, Schedule

_MOST_CHUNKS = 4096
_CLOSE = 1e-9


def equal_cuts(schedule: Schedule, who: str) -> NDArray[np.int64]:
    """Return the cuts of a schedule as whole numbers of equal chunks; the last is their number.

    Raises:
        UnsupportedError: the cuts are not at multiples of one part of at most 1/4096.
    """
    parts = [Fraction(float(cut)).limit_denominator(_MOST_CHUNKS) for cut in schedule.cuts]
    n_chunks = lcm(*(part.denominator for part in parts))
    exact = np.array([float(part) for part in parts])
    if n_chunks > _MOST_CHUNKS or not np.allclose(exact, schedule.cuts, rtol=0, atol=_CLOSE):
        raise UnsupportedError(
            f"{who} needs a payload in at most {_MOST_CHUNKS} equal chunks, but this plan cuts it "
            "in parts that share no such chunk; plan with another algorithm"
        )
    return np.array([int(part * n_chunks) for part in parts], dtype=np.int64)


# The limits of the runtime's own parser.
MOST_STEPS = 256  # of a thread block, `nop` steps included
MOST_COUNT = 71  # chunks of a step
MOST_BLOCKS = 32  # thread blocks of a rank and channel
MOST_RANKS = 1024
_MOST_ELEMENTS = 4096  # that a rank reads: all <gpu>, its own thread blocks and steps
_MOST_NAME = 63  # characters
_MOST_BYTES = 1 << 40  # without a figure the runtime uses the program up to 128 MB only

_Place = tuple[int, int]  # a thread block and a step of it


@dataclass
class _Step:
    kind: str
    first: int
    count: int
    waits_for: _Place | None = None
    is_waited_for: bool = False


@dataclass
class _Block:
    """A thread block: it sends to one rank, or receives from one."""

    send: int
    recv: int
    steps: list[_Step] = field(default_factory=list)


@dataclass
class _Cell:
    """Who wrote a chunk of a rank last, and who has read it since."""

    writer: _Place | None = None
    readers: list[_Place] = field(default_factory=list)


class _Rank:
    """The thread blocks of one rank, filled row by row."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self._number: dict[_Place, int] = {}
        self._cells: dict[int, _Cell] = defaultdict(_Cell)

    def send(self, peer: int, first: int, count: int) -> None:
        cells = [self._cells[chunk] for chunk in range(first, first + count)]
        place = self._add(_Block(peer, -1), "s", first, count, [cell.writer for cell in cells])
        for cell in cells:
            cell.readers.append(place)

    def receive(self, peer: int, first: int, count: int, *, reduces: bool) -> None:
        cells = [self._cells[chunk] for chunk in range(first, first + count)]
        before = [each for cell in cells for each in (cell.writer, *cell.readers)]
        place = self._add(_Block(-1, peer), "rrc" if reduces else "r", first, count, before)
        for cell in cells:
            cell.writer, cell.readers = place, []

    def _add(
        self, like: _Block, kind: str, first: int, count: int, before: list[_Place | None]
    ) -> _Place:
        """Append a step to the thread block of its peer, after `nop`s for further waits."""
        number = self._number.setdefault((like.send, like.recv), len(self.blocks))
        if number == len(self.blocks):
            self.blocks.append(like)
        block = self.blocks[number]
        # Steps of one block run in order: of each other block only the last step counts.
        latest: dict[int, int] = {}
        for place in before:
            if place is not None and place[0] != number:
                latest[place[0]] = max(place[1], latest.get(place[0], -1))
        waits = sorted(latest.items())
        for wait in waits:
            self.blocks[wait[0]].steps[wait[1]].is_waited_for = True
        for wait in waits[1:]:
            block.steps.append(_Step("nop", -1, 0, wait))
        block.steps.append(_Step(kind, first, count, waits[0] if waits else None))
        return number, len(block.steps) - 1


def msccl_xml(plan: Plan) -> str:
    """Return the plan of an allreduce as MSCCL XML, in place, with one channel.

    Raises:
        UnsupportedError: not an allreduce, chunks that are not equal, scratch buffers, or more
            ranks, steps or thread blocks than the runtime takes.
    """
    schedule = plan.schedule
    if schedule.collective is not Collective.ALLREDUCE:
        raise UnsupportedError(
            f"MSCCL XML needs the plan of an allreduce, but got one of the collective "
            f"{schedule.collective}"
        )
    schedule.refuse_scratch("MSCCL XML")
    schedule.refuse_colours("MSCCL XML")
    if schedule.n_ranks > MOST_RANKS:  # before minutes of work
        raise UnsupportedError(
            f"MSCCL runs at most {MOST_RANKS} ranks, but this plan needs {schedule.n_ranks}; plan "
            "for fewer chips"
        )
    cuts = equal_cuts(schedule, "MSCCL XML").tolist()
    ranks = [_Rank() for _ in range(schedule.n_ranks)]
    columns = (schedule.src, schedule.dst, schedule.lo, schedule.hi, schedule.op)
    for src, dst, lo, hi, op in zip(*(column.tolist() for column in columns), strict=True):
        for first in range(cuts[lo], cuts[hi], MOST_COUNT):
            count = min(MOST_COUNT, cuts[hi] - first)
            ranks[src].send(dst, first, count)
            ranks[dst].receive(src, first, count, reduces=op == REDUCE)
    _check_sizes(ranks)
    return _document(plan, ranks, cuts[-1])


def _check_sizes(ranks: list[_Rank]) -> None:
    sizes = [[len(block.steps) for block in rank.blocks] for rank in ranks]
    most_read = max(len(steps) + sum(steps) for steps in sizes) + len(ranks) + 1
    for what, most, got in (
        ("steps in a thread block", MOST_STEPS, max(max(steps, default=0) for steps in sizes)),
        ("thread blocks on a rank", MOST_BLOCKS, max(map(len, sizes))),
        ("elements that a rank reads", _MOST_ELEMENTS, most_read),
    ):
        if got > most:
            raise UnsupportedError(
                f"MSCCL runs at most {most} {what}, but this plan needs {got}; plan with trees, or "
                "for fewer chips"
            )


def _document(plan: Plan, ranks: list[_Rank], n_chunks: int) -> str:
    root = ElementTree.Element(
        "algo",
        name=f"meshmend {plan.schedule.algorithm} {plan.mesh}"[:_MOST_NAME],
        proto="Simple",
        nchannels="1",
        nchunksperloop=str(n_chunks),
        ngpus=str(len(ranks)),
        coll="allreduce",
        inplace="1",
        outofplace="0",
        minBytes="0",
        maxBytes=str(_MOST_BYTES),
    )
    for number, rank in enumerate(ranks):
        size = str(n_chunks)
        chunks = {"id": str(number), "i_chunks": size, "o_chunks": size, "s_chunks": "0"}
        gpu = ElementTree.SubElement(root, "gpu", chunks)
        for at, block in enumerate(rank.blocks):
            peers = {"send": str(block.send), "recv": str(block.recv), "chan": "0"}
            element = ElementTree.SubElement(gpu, "tb", {"id": str(at), **peers})
            for place, step in enumerate(block.steps):
                element.append(_step_element(place, step))
    ElementTree.indent(root)
    # The runtime's parser is simple: no blank before the end of an element.
    return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>") + "\n"


def _step_element(number: int, step: _Step) -> ElementTree.Element:
    block, before = step.waits_for or (-1, -1)
    where = str(step.first)
    return ElementTree.Element(
        "step",
        s=str(number),
        type=step.kind,
        srcbuf="i",
        srcoff=where,
        dstbuf="i",
        dstoff=where,
        cnt=str(step.count),
        depid=str(block),
        deps=str(before),
        hasdep=str(int(step.is_waited_for)),
    )
