"""The one array that an answer walks through a year with, and the names of its places.

Compiled loops that pass many arrays to each other compile slowly and run slowly. So all whole
numbers stand in one array: first single ones by name, among them where each part begins, then the
parts. `own[NOW]` is a number, `own[own[DEAD] + chip]` an entry of a part. Figures that are not
whole stand in a second array.

A **hole** is a domain that is down, or, where spares are used, a **slot** of the mesh that no unit
fills. A **unit** is what a spare replaces: a host, a row, a cube.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Where the time of a year goes.
USEFUL, DETECTION, RESTART, LOST_WORK, SLOW_DOWN, MISSING_CHIPS, WAITING, CHECKPOINTS = range(8)
N_CAUSES = 8

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
) = range(8, 25)

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
) = range(25, 37)
FIRST_RULE, N_RULES = ON_HOLES, 12

# The extents of the mesh on three axes, which of them wrap, the box in which the job runs and the
# one that was found last: three starts, three lengths.
SHAPE, WRAP, BOX, FOUND = 37, 40, 43, 49
N_CHIPS, N_ALL_HOLES, N_MESH_DOMAINS, N_UNITS, N_SLOTS, MOST_LOG, TABLE_SIZE = range(55, 62)

# Where the parts begin. Of each hole: its box as `intact_box` wants it, where its chips begin among
# all, what it adds to a sum, flags, the number of its link or -1, where it stands among those there
# are now or -1, its bit in `box_cuts` or 0. Of each domain: where its units begin. Of each chip:
# how many holes cover it, and scratch. Of each unit: how many of its domains are down, its slot or
# -1, and a bit if it is idle.
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
) = range(62, 89)
PARTS_BEGIN = 89
MOST_CUT = 50  # holes up to which the largest box is found by cutting; less than the bits of a word
N_CUT_HOLES = 6 * 68  # numbers of their places, and of one box
N_CUT_PARTS = 4 * (6 * MOST_CUT + 7)  # numbers on its stack

# Places in the second array: the rates with missing chips alone and with the slower sum as well;
# compute, the sum on the full mesh, the sum in a box for each set of axes that it spans; and then
# the log: time, phase and rate of each change.
CHIP_RATE, RATE, COMPUTE_NS, FULL_NS, BOX_NS, LOG = 0, 1, 2, 3, 4, 12

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
    own = np.zeros(PARTS_BEGIN + sum(sizes), dtype=np.int64)
    for place, value in singles.items():
        own[place] = value
    begin = PARTS_BEGIN
    for place, part in parts.items():
        own[place] = begin
        own[begin : begin + len(part)] = part
        begin += len(part)
    return own
