"""The table of moves that one Ethernet core of a Wormhole chip walks, and where it lies in memory.

An Ethernet core has its own memory (L1), a cable to one core of another chip, and the chip's own
network (NOC) to all cores of its chip. A **move** is eight 32-bit words:

    op  target  source  bytes  counter  place  value  per_slice

- WAIT until the `counter` is at least the value.
- ADD, COPY `bytes` at `source` to `target`, both in this core's L1.
- SEND `bytes` at `source` over the cable to `target` in the other core's L1, then set the
  `counter` there to the value. Without bytes it only sets the counter.
- PASS does the same over the NOC, to the core at `place`.
- LOAD, STORE `bytes` from DRAM to L1 and back. The DRAM is at `place`.

A core walks its table once for each slice of the payload. In slice s the value is
`value + s * per_slice`, and so is the address in DRAM.

A **counter** is written by one core and read by one core, and only rises. `compiler` makes the
tables, `kernel/kernel.c` walks them on a core, `tests/helpers/wormhole_interpreter.py` in tests.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

WAIT: Final = 1
ADD: Final = 2
COPY: Final = 3
SEND: Final = 4
PASS: Final = 5
LOAD: Final = 6
STORE: Final = 7
N_WORDS: Final = 8
MOVE_BYTES: Final = 4 * N_WORDS

INT32: Final = 0
FLOAT32: Final = 1
BFLOAT16: Final = 2
TYPES: Final = {"int32": INT32, "float32": FLOAT32, "bfloat16": BFLOAT16}
ITEM_BYTES: Final = {"int32": 4, "float32": 4, "bfloat16": 2}

# L1 of an Ethernet core. Below lies what the vendor's firmware uses.
KERNEL_AT: Final = 0x1C000
HEADER_AT: Final = 0x1E000
DATA_AT: Final = 0x1E080
L1_BYTES: Final = 0x40000

# Words of the header. The host writes the first four, the kernel the others.
N_MOVES_WORD: Final = 0
TABLE_WORD: Final = 1
N_SLICES_WORD: Final = 2
TYPE_WORD: Final = 3
SENT_BYTES_WORD: Final = 4  # over the cable
DONE_MOVES_WORD: Final = 5
FIRST_CLOCK_WORD: Final = 6
LAST_CLOCK_WORD: Final = 7
DONE_WORD: Final = 8
HEADER_BYTES: Final = DATA_AT - HEADER_AT
DONE_MARK: Final = 0x600D600D

ALIGNMENT: Final = 16  # of all that crosses a cable or the NOC
DRAM_ALIGNMENT: Final = 32
DRAM_AT: Final = 0x2000000  # where payloads begin in a DRAM

# The NOC places of a chip's sixteen Ethernet cores by channel, and of four of its DRAMs.
_ETHERNET_X: Final = (9, 1, 8, 2, 7, 3, 6, 4)
ETHERNET_PLACES: Final = tuple(x | y << 6 for y in (0, 6) for x in _ETHERNET_X)
DRAM_PLACES: Final = tuple(x | y << 6 for x, y in ((0, 0), (0, 5), (5, 0), (5, 2)))
N_CHANNELS: Final = len(ETHERNET_PLACES)


@dataclass(frozen=True, order=True)
class Core:
    """An Ethernet core: the rank whose chip it is on, and its channel there."""

    rank: int
    channel: int


@dataclass(frozen=True)
class Region:
    """Where a part of each slice of a rank's payload lies in DRAM.

    The slices follow each other in steps of `stride` bytes. `blocks` says which blocks of a lane's
    piece are there, one after another.
    """

    rank: int
    lane: int
    place: int
    address: int
    stride: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """Bytes of a lane's piece of the payload that move together: elements of one chunk.

    `start` and `stop` count elements of the piece; `n_bytes` is padded.
    """

    start: int
    stop: int
    n_bytes: int


@dataclass(frozen=True, eq=False)
class Program:
    """The tables of all cores that run a plan, and where they expect the payload.

    `peer` is the core at the other end of a core's cable. A lane's piece of a slice has
    `piece_elements` elements; the payload is cut into slices, and those into lanes.
    """

    type_name: str
    n_ranks: int
    n_lanes: int
    n_slices: int
    n_elements: int
    piece_elements: int
    blocks: tuple[Block, ...]
    regions: tuple[Region, ...]
    moves: dict[Core, NDArray[np.uint32]]
    table_at: dict[Core, int]
    peer: dict[Core, Core]

    @property
    def n_moves(self) -> int:
        """How many moves all tables have together."""
        return sum(len(table) for table in self.moves.values())

    def header(self, core: Core) -> NDArray[np.uint32]:
        """Return the words that the host writes before a core starts."""
        words = np.zeros(HEADER_BYTES // 4, dtype=np.uint32)
        words[N_MOVES_WORD] = len(self.moves[core])
        words[TABLE_WORD] = self.table_at[core]
        words[N_SLICES_WORD] = self.n_slices
        words[TYPE_WORD] = TYPES[self.type_name]
        return words
