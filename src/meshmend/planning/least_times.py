"""What is known of an algorithm before it is built: a time that it does not beat, and its delays.

Trees are searched for, so their times are those of a formula. The others are exchanges, `direct`,
`flood`, regions, `express`, `two-roots` and rings; and an all-to-all, for delays alone.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.target import Question
from meshmend.planning.tree_finalists import least_tree_hops, optimistic_s
from meshmend.planning.tree_formula import PipelineRequest
from meshmend.planning.two_root_prices import optimistic_two_roots_s
from meshmend.schedule.all_to_all import straight_blocks
from meshmend.schedule.hazards import Hazards
from meshmend.schedule.priority import delay_slices, remaining_hops
from meshmend.schedule.regions import n_region_chunks
from meshmend.schedule.rings_nd import axis_orders
from meshmend.schedule.table import Collective, Schedule
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import distances_from
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import Routes

Delays = NDArray[np.float64]  # of each row, in slices

SCATTERED_AXES: Final = {"exchange": 0, "exchange-1": 1, "exchange-2": 2}

# Around holes and on open axes chains of hops differ in length, and the longest go first: without
# delays 16x16 less 4x2 at 1 MB takes 42.6 us, with a skew of 0.5, 1, 2 and 4 it takes 38.2, 37.6,
# 36.7 and 36.7. Open 4x4 at 300 KB takes 1.60, 1.39, 1.35 and 1.35 times the limit with 0, 1, 4
# and 100.
SKEW: Final = 4.0

RINGS_ND: Final = "rings-nd"
# The parts of a torus with unequal sides pass an axis at different times. 4x4x2 at 10 MB and 1 GB
# on tpu-v4 takes 1.098 and 1.025 times the limit without delays, 1.039 and 1.000 with a skew of 1.
# Open and broken meshes get slower by up to 6 %. A few full tori get slower by up to 4 %, so there
# it is simulated without delays too.
RINGS_SKEW: Final = 1.0

EXPRESS: Final = "express"
# 32x32 less 4x2 at 100 KB in 3 slices takes 45.7 us without delays, 38.2 us with a skew of 1.
EXPRESS_SKEW: Final = 1.0

TWO_ROOTS: Final = "two-roots"
# 32x32 at 1 MB takes 1.782, 1.642 and 1.629 times the limit with a skew of 1, 2 and 4, or 8.
TWO_ROOTS_SKEW: Final = 4.0
DIRECT: Final = "direct"
FLOOD: Final = "flood"
WHOLE_SUMS: Final = frozenset({DIRECT, FLOOD})
REGIONS: Final = {"regions-2": 2, "regions-4": 4, "regions-8": 8}
PAIRS: Final = "pairs"
ALL_TO_ALL: Final = frozenset({PAIRS, "relays"})
# 8x8 as a torus at 1 MB a pair takes 1.08 times the limit without delays, 1.023 with a skew of 1 or
# more; 8x8 takes 1.030, 1.028 and 1.052 with 0, 1 and 4.
ALL_TO_ALL_SKEW: Final = 1.0

# Regions take as long as the longer of their hops and their messages, and this part of the shorter,
# times 1.00 in the middle of 67 random cases, and 0.83 at least.
_REST_OF_REGIONS: Final = 0.3
_HOPE_OF_REGIONS: Final = 0.82

# 4x4x4, 8x8x8 and 16x16x16, 6x6, 8x8 and 16x16 less a chip, a link or a board: 1.15 to 1.6.
_BUSIER: Final = 1.15

_FEW_CHIPS: Final = 256
_FORMULA_ERROR: Final = 0.85  # the formula of trees is off by up to 15 %,
_FORMULA_ERROR_OF_FEW: Final = 0.75  # on few chips by 25 %: 4x4x4 less 2x2x1 at 1 MB
_NO_GAIN: Final = 0.002  # nothing is searched for to gain less than this


def exchange_skew(mesh: Mesh, name: str) -> float:
    """Return the skew of an algorithm of one schedule; on full tori exchanges have none,
    and elsewhere rings."""
    if name == EXPRESS:
        return EXPRESS_SKEW
    if name == TWO_ROOTS:
        return TWO_ROOTS_SKEW
    if name in ALL_TO_ALL:
        return ALL_TO_ALL_SKEW
    if name in REGIONS:
        return SKEW
    is_uneven = mesh.has_failures or not all(
        wraps or size <= 2 for size, wraps in zip(mesh.shape, mesh.wrap, strict=True)
    )
    if name == RINGS_ND:
        return 0.0 if is_uneven else RINGS_SKEW
    return SKEW if name in {*SCATTERED_AXES, *WHOLE_SUMS} and is_uneven else 0.0


def skewed_delays(
    schedule: Schedule, hazards: Hazards, routes: Routes, skew: float
) -> Delays | None:
    """Return the delays of all rows; None without a skew."""
    return delay_slices(remaining_hops(schedule, hazards, routes), skew) if skew else None


def n_exchange_rows(mesh: Mesh) -> int:
    """Return about how many rows `exchange` has: each chip gets and adds the sums of its lines."""
    sizes = [size for size in mesh.shape if size > 1]
    return 2 * mesh.n_live * len(sizes) * sum(sizes)


def optimistic_tree_s(question: Question) -> float:
    """Return a time that no trees were seen to beat by more than `_NO_GAIN`.

    No tree takes fewer hops than `least_tree_hops`, and none moves less than all links
    together have to. What the formula adds to that may be 15 % too much.
    """
    mesh, fabric = question.mesh, question.fabric
    if question.collective is not Collective.ALLREDUCE:
        return _optimistic_owner_tree_s(question)
    request = PipelineRequest(fabric, question.payload_bytes, mesh.n_live)
    formula_s = optimistic_s(mesh, request)
    bytes_s = question.payload_bytes / fabric.link_bandwidth_bytes_per_s
    all_links_s = bytes_s * (mesh.n_live - 1) / max(1, len(mesh.links))
    hops, stops = least_tree_hops(mesh_figures(mesh))
    hops_s = hops * fabric.hop_latency_s + stops * fabric.message_overhead_s
    error = _FORMULA_ERROR if mesh.n_live > _FEW_CHIPS else _FORMULA_ERROR_OF_FEW
    likely_s = all_links_s + error * max(0.0, formula_s - all_links_s)
    return max(likely_s, (1 + _NO_GAIN) * max(all_links_s, hops_s))


def _optimistic_owner_tree_s(question: Question) -> float:
    """Return a time that trees hung from owners do not beat: that of their busiest links and hops.

    Each chunk goes over one link of every other rank and way.
    """
    mesh, fabric = question.mesh, question.fabric
    n_channels = 2 * max(1, len(mesh.links))
    share = question.n_halves * (mesh.n_live - 1) / n_channels
    share = max(share, (1 - 1 / mesh.n_live) / max(1, mesh_figures(mesh).min_degree))
    hop_s = fabric.hop_latency_s + fabric.message_overhead_s
    bytes_s = share * question.payload_bytes / fabric.link_bandwidth_bytes_per_s
    return max(bytes_s, question.n_halves * mesh_figures(mesh).diameter * hop_s)


def least_time(question: Question, name: str) -> float:
    """Return a time that an algorithm other than trees cannot beat, known without building it.

    One ring through all chips takes n - 1 steps in each half. In one slice every step waits for a
    hop; in more, every step pays overhead twice or more. Rings over pairs of lines carry half of
    the payload each way in each half. Rings over lines take a step for each chip but one of a row,
    and of a column.
    """
    n, fabric, halves = question.mesh.n_live, question.fabric, question.n_halves
    half_s = halves * question.payload_bytes / 2 / fabric.link_bandwidth_bytes_per_s
    if name in SCATTERED_AXES:
        return least_exchange_s(question, name)
    if name in WHOLE_SUMS:
        return least_whole_sums_s(question, name)
    if name in REGIONS:
        return optimistic_regions_s(question, name)
    if name == PAIRS:
        block_s = question.payload_bytes / n / fabric.link_bandwidth_bytes_per_s
        return straight_blocks(question.mesh) * block_s
    if name == EXPRESS:
        return least_express_s(question)
    if name == TWO_ROOTS:
        return optimistic_two_roots_s(question)
    hop_s = fabric.hop_latency_s + fabric.message_overhead_s
    if name == "two-d":
        return halves * (sum(question.mesh.shape) - 2) * hop_s
    if name in {"row-pair", "ft-two-d"}:
        length = 2 * min(question.mesh.shape)
        return max((length - 1) / length * half_s, halves * (length - 1) * hop_s)
    if name not in {"ring-1d", "rank-ring"}:
        return 0.0
    steps, overhead_s = halves * (n - 1), fabric.message_overhead_s
    busy_s = (n - 1) / n * half_s + steps * min(fabric.hop_latency_s + overhead_s, 2 * overhead_s)
    return max(steps * hop_s, busy_s)


def least_exchange_s(question: Question, name: str) -> float:
    """Return a time that the exchange of this name cannot beat on a connected mesh."""
    mesh, fabric = question.mesh, question.fabric
    n_scattered = SCATTERED_AXES[name]
    n_channels = 2 * max(1, len(mesh.links))
    received = mesh.n_live * _received_payloads(mesh, n_scattered)
    busiest = received / n_channels
    bytes_s = busiest * question.payload_bytes / fabric.link_bandwidth_bytes_per_s
    hop_s = fabric.hop_latency_s
    if not mesh.has_failures:  # no message goes around a hole: all stop everywhere
        hop_s += fabric.message_overhead_s
    return max(bytes_s, _hops(mesh, n_scattered) * hop_s)


def least_whole_sums_s(question: Question, name: str) -> float:
    """Return a time that `direct` or `flood` cannot beat: messages on the links, and hops."""
    mesh, fabric = question.mesh, question.fabric
    if mesh.n_live == 1:
        return 0.0
    figures = mesh_figures(mesh)
    bytes_s = question.payload_bytes / fabric.link_bandwidth_bytes_per_s
    message_s = fabric.message_overhead_s + bytes_s
    n_entered = (mesh.n_live - 1) / figures.min_degree
    if name == FLOOD:
        hop_s = fabric.hop_latency_s + fabric.message_overhead_s
        return max(n_entered * message_s, figures.diameter * hop_s)
    hops = sum(int(distances_from(mesh, rank).sum()) for rank in range(mesh.n_live))
    busiest = max(n_entered, hops / (2 * len(mesh.links)))
    hops_s = figures.diameter * fabric.hop_latency_s + fabric.message_overhead_s
    return max(busiest * message_s, hops_s)


def least_regions_s(question: Question, name: str) -> float:
    """Return a time that regions cannot beat: messages on the links, sums in the chips, and hops.

    In each chunk every chip but a centre sends its sum, and every chip gets those of all regions,
    a centre all but its own.
    """
    busy_s, _ = _busy_and_hops_of_regions(question, name)
    hop_s = question.fabric.hop_latency_s + question.fabric.message_overhead_s
    return max(busy_s, mesh_figures(question.mesh).diameter * hop_s)


def optimistic_regions_s(question: Question, name: str) -> float:
    """Return a time that regions were not seen to beat: links are not busy during all hops."""
    busy_s, hops_s = _busy_and_hops_of_regions(question, name)
    likely_s = max(busy_s, hops_s) + _REST_OF_REGIONS * min(busy_s, hops_s)
    return max(_HOPE_OF_REGIONS * likely_s, least_regions_s(question, name))


def _busy_and_hops_of_regions(question: Question, name: str) -> tuple[float, float]:
    """Return how long the busiest link or chip works at least, and about how long the hops take.

    A region is about so many times narrower than the mesh that all of them fill it.
    """
    mesh, fabric = question.mesh, question.fabric
    payload_bytes = question.payload_bytes
    n, n_regions, figures = mesh.n_live, REGIONS[name], mesh_figures(mesh)
    n_messages = (n - n_regions) + n_regions * (n - 1)
    busiest = max(n_messages / (2 * len(mesh.links)), (n_regions - 1) / figures.min_degree)
    bytes_s = payload_bytes / fabric.link_bandwidth_bytes_per_s
    busy_s = busiest * (n_region_chunks(n_regions) * fabric.message_overhead_s + bytes_s)
    n_added = (n - n_regions) / n + n_regions - 1
    adds_s = n_added * payload_bytes / (fabric.chip_bandwidth_bytes_per_s or math.inf)
    n_axes = max(1, sum(size > 1 for size in mesh.shape))
    hops = figures.diameter + figures.radius / n_regions ** (1 / n_axes)
    return max(busy_s, adds_s), hops * (fabric.hop_latency_s + fabric.message_overhead_s)


def least_express_s(question: Question) -> float:
    """Return a time that `express` cannot beat: a tree up and down the radius, and its bytes."""
    mesh, fabric = question.mesh, question.fabric
    if mesh.n_live == 1:
        return 0.0
    n_trees = max(1, sum(size > 1 for size in mesh.shape))
    bytes_s = question.payload_bytes / n_trees / fabric.link_bandwidth_bytes_per_s
    return 2 * mesh_figures(mesh).radius * fabric.hop_latency_s + bytes_s


def _hops(mesh: Mesh, n_scattered: int) -> int:
    """Return how many hops follow one another at least: scattered axes are passed twice.

    With failed chips, ways around holes may be shorter than along the axes.
    """
    hops = mesh_figures(mesh).diameter
    if not mesh.has_failures:
        sizes = zip(mesh.shape, mesh.rings, strict=True)
        farthest = [size // 2 if on_ring else size - 1 for size, on_ring in sizes if size > 1]
        hops += sum(sorted(farthest)[:n_scattered])
    return hops


def _received_payloads(mesh: Mesh, n_scattered: int) -> float:
    """Return how many payloads a chip receives at least, on average, or what that comes to.

    With failed chips lines are shorter. Then only the last axis is counted, along which a chip
    gets a sum from each position where some chip lives. Where chips own different shares, what
    goes around a hole makes the busiest link carry more; with few failures, `_BUSIER` times more
    was the least that was seen.
    """
    if mesh.has_failures:
        if not n_scattered:
            positions = [len(np.unique(at)) for at in mesh.coordinates.T if at.max() > at.min()]
            return min(positions, default=1) - 1
        if len(mesh.failed) + len(mesh.failed_links) > mesh.n_chips / 8:
            return 0.0
    least = min(_received_in_order(mesh, order, n_scattered) for order in axis_orders(mesh))
    return least * _BUSIER if mesh.has_failures else least


def _received_in_order(mesh: Mesh, order: tuple[int, ...], n_scattered: int) -> float:
    received, left = 0.0, 1.0
    for number, axis in enumerate(order):
        size = mesh.shape[axis]
        if number < n_scattered:  # once on the way there, once on the way back
            received += 2 * left * (1 - 1 / size)
            left /= size
        else:
            received += left * (size - 1)
    return received
