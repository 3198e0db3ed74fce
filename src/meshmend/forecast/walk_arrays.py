"""What an answer walks through a year with: the fields of its record, its parts, and their making.

`walk` is the record and `cells` are the parts (`records`).

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

from meshmend.forecast.machine import NS, Machine
from meshmend.forecast.records import Figures, Floats, Ints, packed
from meshmend.forecast.scenario import SLOW_LINK
from meshmend.topology.failures import Link

if TYPE_CHECKING:
    from meshmend.forecast.hole_prices import StepPrices

Walk = np.record

# Where the time of a year goes: places in `walk.spent`.
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

MOST_CUT = 50  # holes up to which the largest box is found by cutting; less than the bits of a word
_N_CUT_HOLES = 6 * 68  # numbers of their places, and of one box
_N_CUT_PARTS = 4 * (6 * MOST_CUT + 7)  # numbers on its stack

# What the job is doing. All of it but `spent` is 0 when a walk begins.
_NOW = (
    "phase",
    "until",  # when the phase ends
    "now",
    "cycle_ns",  # since a checkpoint was finished
    "unsaved_ns",  # useful time since then
    "config",  # where the job runs
    "chips",  # how many it runs on
    "n_holes",
    "n_dead",
    "n_idle",
    "n_slow",
    "n_log",
    "recheck",  # whether something came back that was not looked at yet
    "n_touching",  # pairs of holes that lie side by side or corner to corner
    "is_hit",  # these four are of `intact_box`
    "came_back",
    "none_of",
    "bits_used",
)
# What an answer does, and the times of the job.
_RULES = (
    "on_holes",
    "uses_spares",
    "holes_before_spares",
    "keeps_batch",
    "support",
    "detection_ns",
    "restart_ns",
    "recovery_ns",
    "switch_in_ns",
    "interval_ns",
    "write_ns",
    "between_failures_ns",
)
# How many there are of what; `n_colours` are the chips of a tile, 1 without tiles.
_COUNTS = (
    "n_chips",
    "n_all_holes",
    "n_mesh_domains",
    "n_units",
    "n_slots",
    "n_domains",
    "n_colours",
    "most_log",
    "table_size",
)
# Three numbers each: the extents of the mesh, which axes wrap, the extents of a tile.
_ON_AXES = ("extents", "wrap", "tile")
# Where the parts begin.
_PARTS = (
    "box",  # in which the job runs: three starts, three lengths
    "found",  # the one that was found last
    "hole_boxes",  # of each hole: its box as `intact_box` wants it
    "hole_first",  # where its chips begin in `hole_chips`
    "hole_chips",
    "hole_extra_ns",  # what it adds to a sum
    "hole_flags",
    "link_of",  # the number of its link or -1
    "hole_at",  # where it stands in `holes` or -1
    "holes",  # those that there are now
    "bit_of",  # its bit in `intact_box` or 0
    "chains",
    "unit_first",  # of each domain: where its units begin in `domain_units`
    "domain_units",
    "wrong_since",  # the useful time that was saved when its chip went wrong, or `IS_RIGHT`
    "is_link",
    "slow_domains",  # those that are slow now
    "dead",  # of each chip: how many holes cover it
    "part",
    "queue",
    "neighbors",
    "down_links",  # of each link: whether it is down
    "unit_down",  # of each unit: how many of its domains are down
    "unit_slot",  # its slot or -1
    "idle",  # a bit if it is idle
    "slot_unit",
    "cut_parts",
    "cut_holes",
    "cut_tables",
    "grid",
    "plane",
    "line",
    "bands",
    "log",  # the time of each change, and the bits of the rate from then on; the last part
)
# How fast the job trains, next to one without failures: with missing chips alone, with the slower
# sum as well, with checks of shares too, and with slow chips and links.
_RATES = ("chip_rate", "sum_rate", "check_rate", "rate")
# What checks add to compute; the speeds of slow chips and links, and what one such link adds to a
# sum that is planned for it, or -1 if none is; compute, the sum on the full mesh, and where the job
# runs now.
_FIGURES = (
    "check_share",
    "chip_speed",
    "link_speed",
    "slow_link_ns",
    "compute_ns",
    "full_ns",
    "sum_ns",
)
_WALK = np.dtype(
    (
        np.record,
        [
            ("spent", np.int64, (N_CAUSES,)),
            *((name, np.int64) for name in (*_NOW, *_RULES, *_COUNTS, *_PARTS)),
            *((name, np.int64, (3,)) for name in _ON_AXES),
            *((name, np.float64) for name in (*_RATES, *_FIGURES)),
            ("box_ns", np.float64, (8,)),  # the sum in a box for each set of axes that it spans
        ],
    )
)


@dataclass(frozen=True, eq=False)
class WalkArrays:
    """The record and the cells of one machine; not for two threads at the same time."""

    walk: Walk
    cells: Ints

    def copy(self) -> "WalkArrays":
        """Return arrays for another thread."""
        return WalkArrays(self.walk.copy(), self.cells.copy())

    def set_rules(self, rules: Mapping[str, int]) -> None:
        """Let the next walk follow the rules of an answer."""
        for name, value in rules.items():
            self.walk[name] = value

    def spent(self) -> Ints:
        """Return where the time of the last walk went."""
        return np.array(self.walk.spent)

    def changes(self) -> tuple[Ints, Floats]:
        """Return when the rate of the last walk changed, and to what, as far as there is room."""
        log = self.cells[self.walk.log :].reshape(-1, 2)[: self.walk.n_log]
        return log[:, 0], log[:, 1].copy().view(np.float64)


def walk_of(figures: Figures, parts: Mapping[str, int | Ints]) -> WalkArrays:
    """Return arrays with these figures and parts; of a part that is a number, so many zeros."""
    return WalkArrays(*packed(_WALK, figures, parts))


def box_parts(shape: Sequence[int], n_holes: int) -> dict[str, int]:
    """Return the sizes of the parts that `intact_box` works with."""
    return {
        "found": 6,
        "cut_parts": _N_CUT_PARTS,
        "cut_holes": _N_CUT_HOLES,
        "cut_tables": 6 * (max(shape) + 1),
        "grid": 8 * math.prod(shape),
        "plane": 4 * shape[1] * shape[2],
        "line": 2 * shape[2],
        **dict.fromkeys(("hole_at", "holes", "bit_of"), n_holes),
    }


def walk_arrays(machine: Machine, prices: "StepPrices", n_log: int) -> WalkArrays:
    """Return the arrays for a machine; `n_log` changes of a walk are written down."""
    mesh, holes = machine.scenario.mesh, hole_arrays(machine)
    shape = padded(mesh.shape, 1)
    wraps = padded(mesh.rings, 0)
    n_chips, n_holes, n_slots = mesh.n_chips, len(holes.boxes), machine.n_slots
    n_domains, table_size = len(machine.kind_of), max(shape) + 1
    supported = np.array(prices.is_supported, dtype=bool)
    tile = padded(machine.scenario.job.tile, 1)
    wrong, slow = machine.scenario.wrong, machine.scenario.slow
    figures: Figures = {
        "extents": shape,
        "wrap": wraps,
        "tile": tile,
        "n_chips": n_chips,
        "n_all_holes": n_holes,
        "n_mesh_domains": n_holes - n_slots,
        "n_units": machine.n_units,
        "n_slots": n_slots,
        "n_domains": n_domains,
        "n_colours": math.prod(tile),
        "most_log": n_log,
        "table_size": table_size,
        **dict.fromkeys(_RATES, 1.0),
        "check_share": wrong.compute_share,
        "chip_speed": slow.chip_speed,
        "link_speed": slow.link_speed,
        "slow_link_ns": prices.slow_link_s * NS if slow.is_known else -1.0,
        "compute_ns": prices.compute_s * NS,
        "full_ns": prices.full_s * NS,
        "sum_ns": prices.full_s * NS,
        "box_ns": [each * NS for each in prices.box_s],
    }
    parts: dict[str, int | Ints] = {
        **box_parts(shape, n_holes),
        **dict.fromkeys(("dead", "part", "queue"), n_chips),
        **dict.fromkeys(("unit_down", "unit_slot", "idle"), machine.n_units + 1),
        "box": 6,
        "chains": 2 * n_holes,
        "bands": 2 * table_size,
        "down_links": 3 * n_chips,
        "slot_unit": n_slots,
        "wrong_since": n_domains,
        "slow_domains": n_domains,
        "hole_boxes": holes.boxes.ravel(),
        "hole_first": holes.first,
        "hole_chips": holes.chips,
        "hole_extra_ns": np.rint(prices.extra_s * NS).astype(np.int64),
        "hole_flags": np.where(supported, holes.flags, holes.flags & ~SUPPORTED),
        "link_of": holes.link_of,
        "unit_first": machine.unit_first,
        "domain_units": machine.domain_units,
        "neighbors": neighbors(shape, wraps).ravel(),
        "is_link": (machine.kind_of == machine.number_of(SLOW_LINK)).astype(np.int64),
        "log": 2 * n_log,
    }
    return walk_of(figures, parts)


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
    """Where each hole lies, on three axes; the fields go by the parts of the cells."""

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
