"""The one array that an answer walks through a year with: the names of its entries, and its making.

Compiled loops that pass many arrays to each other compile slowly and run slowly. So all whole
numbers are in one array: first single ones by name, among them where each part begins, then the
parts. `state[NOW]` is a number, `state[state[DEAD] + chip]` an entry of a part. Figures that are
not whole are in a second array.

A **hole** is a domain that is down, or, where spares are used, a **slot** of the mesh that no unit
fills. A **unit** is what a spare replaces: a host, a row, a cube.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshmend.forecast.machine import Ints, Machine
from meshmend.forecast.scenario import SLOW_LINK
from meshmend.topology.failures import Link

if TYPE_CHECKING:
    from meshmend.forecast.hole_prices import StepPrices

# Where the time of a year goes.
(
    USEFUL,
    DETECTION,
    RESTART,
    LOST_WORK,
    SLOW_DOWN,
    MISSING_CHIPS,
    WAITING,
    CHECKPOINTS,
    CHECKS,
    SLOW_PARTS,
) = range(10)
N_CAUSES = 10

# What the job is doing.
(
    PHASE,
    UNTIL,
    NOW,
    CYCLE_NS,
    UNSAVED_NS,
    CONFIG,
    N_HOLES,
    N_DEAD,
    N_IDLE,
    RECHECK,
    CHIPS,
    N_LOG,
    N_TOUCHING,
    IS_HIT,
    CAME_BACK,
    NONE_OF,
    BITS_USED,
    N_SLOW,
) = range(10, 28)

# What an answer does, and the times of the job in ns.
(
    ON_HOLES,
    USES_SPARES,
    HOLES_BEFORE_SPARES,
    DETECTION_NS,
    RESTART_NS,
    RECOVERY_NS,
    SWITCH_IN_NS,
    INTERVAL_NS,
    WRITE_NS,
    BETWEEN_FAILURES_NS,
    KEEPS_BATCH,
    SUPPORT,
) = range(28, 40)
FIRST_RULE, N_RULES = ON_HOLES, 12

# The extents of the mesh on three axes, which of them wrap, the box in which the job runs and the
# one that was found last: three starts, three lengths.
SHAPE, WRAP, BOX, FOUND = 40, 43, 46, 52
N_CHIPS, N_ALL_HOLES, N_MESH_DOMAINS, N_UNITS, N_SLOTS, MOST_LOG, TABLE_SIZE = range(58, 65)
N_DOMAINS = 65
TILE, N_COLOURS = 66, 69  # the extents of a tile, and how many chips it has; 1 without tiles

# Where the parts begin. Of each hole: its box as `intact_box` wants it, where its chips begin among
# all, what it adds to a sum, flags, the number of its link or -1, where it stands among those there
# are now or -1, its bit in `box_cuts` or 0. Of each domain: where its units begin, the useful
# time that was saved when its chip went wrong, or `IS_RIGHT`, and whether it is a link. The domains
# that are slow now. Of each chip: how many holes cover it, and scratch. Of each unit: how many of
# its domains are down, its slot or -1, and a bit if it is idle.
(
    HOLE_BOXES,
    HOLE_FIRST,
    HOLE_CHIPS,
    HOLE_EXTRA_NS,
    HOLE_FLAGS,
    LINK_OF,
    HOLE_AT,
    HOLES,
    BIT_OF,
    CHAINS,
    UNIT_FIRST,
    DOMAIN_UNITS,
    DEAD,
    PART,
    QUEUE,
    DOWN_LINKS,
    NEIGHBORS,
    UNIT_DOWN,
    UNIT_SLOT,
    SLOT_UNIT,
    IDLE,
    CUT_PARTS,
    CUT_HOLES,
    CUT_TABLES,
    GRID,
    PLANE,
    LINE,
    WRONG_SINCE,
    BANDS,
    IS_LINK,
    SLOW_DOMAINS,
) = range(70, 101)
PARTS_BEGIN = 101
MOST_CUT = 50  # holes up to which the largest box is found by cutting; less than the bits of a word
N_CUT_HOLES = 6 * 68  # numbers of their places, and of one box
N_CUT_PARTS = 4 * (6 * MOST_CUT + 7)  # numbers on its stack

# Places in the second array: the rates with missing chips alone, with the slower sum as well, with
# the checks of shares too, and with slow chips and links; what checks add to compute; the speeds of
# slow chips and links, and what one such link adds to a sum that is planned for it, or -1 if none
# is; the sum in the place where the job runs; compute, the sum on the full mesh, the sum in a box
# for each set of axes that it spans; and then the log: time, phase and rate of each change.
CHIP_RATE, SUM_RATE, CHECK_RATE, RATE, CHECK_SHARE = range(5)
CHIP_SPEED, LINK_SPEED, SLOW_LINK_NS, SUM_NS = range(5, 9)
COMPUTE_NS, FULL_NS, BOX_NS, LOG = 9, 10, 11, 19

IS_RIGHT = 2**62

# What an answer does with holes.
WAIT, IN_LARGEST_BOX, GO_ON = 0, 1, 2
# Which holes the algorithm goes around.
ANY_HOLES, PAIRED_HOLES = 0, 1
# What a job is doing, and where it runs: nowhere, on the full mesh, in a box, on all live chips.
RUN, DETECT, START, RECOVER, STOPPED = range(5)
NOWHERE, FULL, IN_BOX, ON_MESH = range(4)
# Bits of the flags of a hole.
SUPPORTED, CUTS, AT_BORDER = 1, 2, 4


def packed(singles: Mapping[int, int], parts: Mapping[int, Sequence[int] | Ints]) -> Ints:
    """Return one array with these single numbers and parts, and where each part begins."""
    sizes = [len(part) for part in parts.values()]
    state = np.zeros(PARTS_BEGIN + sum(sizes), dtype=np.int64)
    for place, value in singles.items():
        state[place] = value
    begin = PARTS_BEGIN
    for place, part in parts.items():
        state[place] = begin
        state[begin : begin + len(part)] = part
        begin += len(part)
    return state


def walk_array(machine: Machine, prices: "StepPrices", n_log: int) -> Ints:
    """Return the array of `walk_arrays` for a machine."""
    mesh, holes = machine.scenario.mesh, hole_arrays(machine)
    shape = padded(mesh.shape, 1)
    wraps = padded([w and n > 2 for w, n in zip(mesh.wrap, mesh.shape, strict=True)], 0)
    n_chips, n_holes, n_slots = mesh.n_chips, len(holes.boxes), machine.n_slots
    supported = np.array(prices.is_supported, dtype=bool)
    flags = np.where(supported, holes.flags, holes.flags & ~SUPPORTED)
    singles = {SHAPE + axis: extent for axis, extent in enumerate(shape)}
    singles |= {WRAP + axis: wrap for axis, wrap in enumerate(wraps)}
    singles |= {N_CHIPS: n_chips, N_ALL_HOLES: n_holes, N_MESH_DOMAINS: n_holes - n_slots}
    singles |= {N_UNITS: machine.n_units, N_SLOTS: n_slots, MOST_LOG: n_log}
    singles |= {TABLE_SIZE: max(shape) + 1, N_DOMAINS: len(machine.kind_of)}
    tile = padded(machine.scenario.job.tile, 1)
    singles |= {TILE + axis: extent for axis, extent in enumerate(tile)}
    singles |= {N_COLOURS: math.prod(tile)}
    parts: dict[int, Sequence[int] | Ints] = {
        HOLE_BOXES: holes.boxes.ravel(),
        HOLE_FIRST: holes.first,
        HOLE_CHIPS: holes.chips,
        HOLE_EXTRA_NS: np.rint(prices.extra_s * 1e9).astype(np.int64),
        HOLE_FLAGS: flags,
        LINK_OF: holes.link_of,
        UNIT_FIRST: machine.unit_first,
        DOMAIN_UNITS: machine.domain_units,
        CHAINS: np.zeros(2 * n_holes, dtype=np.int64),
        CUT_PARTS: np.zeros(N_CUT_PARTS, dtype=np.int64),
        CUT_HOLES: np.zeros(N_CUT_HOLES, dtype=np.int64),
        CUT_TABLES: np.zeros(6 * (max(shape) + 1), dtype=np.int64),
        GRID: np.zeros(8 * n_chips, dtype=np.int64),
        PLANE: np.zeros(4 * shape[1] * shape[2], dtype=np.int64),
        LINE: np.zeros(2 * shape[2], dtype=np.int64),
        NEIGHBORS: neighbors(shape, wraps).ravel(),
        DOWN_LINKS: np.zeros(3 * n_chips, dtype=np.int64),
        SLOT_UNIT: np.zeros(n_slots, dtype=np.int64),
        WRONG_SINCE: np.zeros(len(machine.kind_of), dtype=np.int64),
        BANDS: np.zeros(2 * (max(shape) + 1), dtype=np.int64),
        IS_LINK: (machine.kind_of == machine.number_of(SLOW_LINK)).astype(np.int64),
        SLOW_DOMAINS: np.zeros(len(machine.kind_of), dtype=np.int64),
    }
    parts |= {part: np.zeros(n_holes, dtype=np.int64) for part in (HOLE_AT, HOLES, BIT_OF)}
    parts |= {part: np.zeros(n_chips, dtype=np.int64) for part in (DEAD, PART, QUEUE)}
    of_units = (UNIT_DOWN, UNIT_SLOT, IDLE)  # a bit for each would do for the last
    parts |= {part: np.zeros(machine.n_units + 1, dtype=np.int64) for part in of_units}
    return packed(singles, parts)


def padded(shape: Sequence[int], fill: int) -> list[int]:
    """Return a shape on three axes, with `fill` in front."""
    return [fill] * (3 - len(shape)) + list(shape)


def neighbors(shape: Sequence[int], wrap: Sequence[int]) -> Ints:
    """Return the chips beside each chip: before and behind it on three axes, or -1 for none."""
    chips = np.arange(math.prod(shape)).reshape(shape)
    beside = []
    for axis, side in itertools.product(range(3), (1, -1)):
        moved = np.roll(chips, side, axis)
        if not wrap[axis]:
            np.moveaxis(moved, axis, 0)[0 if side > 0 else -1] = -1
        beside.append(moved.ravel())
    return np.stack(beside, axis=1)


@dataclass(frozen=True, eq=False)
class HoleArrays:
    """Where each hole lies, on three axes; the fields go by the parts of `walk_arrays`."""

    boxes: Ints
    first: Ints
    chips: Ints
    link_of: Ints
    flags: Ints


def hole_arrays(machine: Machine) -> HoleArrays:
    """Return where the holes of a machine lie; all of them count as supported."""
    extents = machine.scenario.mesh.shape
    shape = padded(extents, 1)
    holes = machine.holes
    boxes = np.zeros((len(holes), 6), dtype=np.int64)
    link_of = np.full(len(holes), -1, dtype=np.int64)
    flags = np.full(len(holes), SUPPORTED, dtype=np.int64)
    chips: list[NDArray[np.int64]] = []
    for number, hole in enumerate(holes):
        if isinstance(hole, Link):
            boxes[number], link_of[number] = _link_place(hole, shape)
            chips.append(np.empty(0, dtype=np.int64))
        else:
            starts, sizes = padded(hole.origin, 0), padded(hole.shape, 1)
            boxes[number] = [
                at
                for start, size in zip(starts, sizes, strict=True)
                for at in (2 * start, 2 * (start + size) - 2)
            ]
            grid = np.ix_(*(np.arange(a, a + n) for a, n in zip(starts, sizes, strict=True)))
            chips.append(np.ravel_multi_index(grid, shape).ravel())
        flags[number] |= _cut_flags(boxes[number], shape, padded(machine.scenario.mesh.wrap, 0))
    first = np.cumsum([0, *map(len, chips)], dtype=np.int64)
    return HoleArrays(boxes, first, np.concatenate(chips), link_of, flags)


def _cut_flags(box: Ints, shape: Sequence[int], wrap: Sequence[int]) -> int:
    """Return the flags of a hole that may cut a mesh, alone or together with others."""
    lengths = (box[1::2] - box[::2]) // 2 + 1
    # A hole alone must reach from border to border on all axes but one.
    flags = CUTS if (lengths == shape).sum() >= 2 else 0
    for axis, extent in enumerate(shape):
        first, last = box[2 * axis], box[2 * axis + 1]
        # Around a torus, four holes or fewer reach only if each is long.
        is_near = 4 * lengths[axis] > extent if wrap[axis] else first <= 1 or last >= 2 * extent - 3
        if extent > 1 and is_near:
            flags |= AT_BORDER
    return int(flags)


def _link_place(link: Link, shape: Sequence[int]) -> tuple[list[int], int]:
    """Return the place of a link on the finer grid, and its number: chip x 3 + axis."""
    one, other = padded(link.first, 0), padded(link.second, 0)
    axis = next(axis for axis in range(3) if one[axis] != other[axis])
    if other[axis] - one[axis] > 1:  # the link that wraps around belongs to the last chip
        one, other = other, one
    places = [2 * at for at in one]
    places[axis] += 1
    number = 3 * int(np.ravel_multi_index(one, shape)) + axis
    return [place for place in places for _ in range(2)], number
