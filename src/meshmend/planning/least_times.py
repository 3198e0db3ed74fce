"""Times that an algorithm does not beat, known before anything is built or searched for."""

from meshmend.planning.exchange_prices import (
    EXPRESS,
    PAIRS,
    REGIONS,
    SCATTERED_AXES,
    TWO_ROOTS,
    WHOLE_SUMS,
    least_exchange_s,
    least_express_s,
    least_whole_sums_s,
    optimistic_regions_s,
)
from meshmend.planning.target import Question
from meshmend.planning.tree_finalists import least_tree_hops, optimistic_s
from meshmend.planning.tree_formula import PipelineRequest
from meshmend.planning.two_root_prices import optimistic_two_roots_s
from meshmend.schedule.all_to_all import straight_blocks
from meshmend.schedule.table import Collective
from meshmend.topology.figures import mesh_figures

_FEW_CHIPS = 256
_FORMULA_ERROR = 0.85  # the formula of trees is off by up to 15 %,
_FORMULA_ERROR_OF_FEW = 0.75  # on few chips by 25 %: 4x4x4 less 2x2x1 at 1 MB
_NO_GAIN = 0.002  # nothing is searched for to gain less than this


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
        return least_exchange_s(question.mesh, fabric, question.payload_bytes, name)
    if name in WHOLE_SUMS:
        return least_whole_sums_s(question.mesh, fabric, question.payload_bytes, name)
    if name in REGIONS:
        return optimistic_regions_s(question.mesh, fabric, question.payload_bytes, name)
    if name == PAIRS:
        block_s = question.payload_bytes / n / fabric.link_bandwidth_bytes_per_s
        return straight_blocks(question.mesh) * block_s
    if name == EXPRESS:
        return least_express_s(question.mesh, fabric, question.payload_bytes)
    if name == TWO_ROOTS:
        return optimistic_two_roots_s(question.mesh, fabric, question.payload_bytes)
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
