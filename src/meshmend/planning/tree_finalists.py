"""Finds the packings that are worth simulating: by formula, until no other packing can win.

First every shape gets the figures that it will probably reach. Then the overlay packs shapes in the
order of the formula, and the formula ranks them again by the figures that they reached. Nothing is
simulated here.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshmend.planning.packed_trees import TreeKind, Trees, TreeShape, trees_of
from meshmend.planning.tree_formula import SPREAD_OVERLAP, PipelineRequest, TreeFigures
from meshmend.topology.figures import MeshFigures, mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.trees.spread_trees import FEWEST_RANKS
from meshmend.trees.tree_counts import MOST_TREES, least_load, pace, tree_counts

# Found by trying. Losses and gains are what `benchmarks/tune_trees.py` finds on small meshes.
#
# With 3 finalists schedules are up to 2.3 % slower, 18 gain nothing.
MOST_FINALISTS = 9
# Numbers of trees to consider beside those of `tree_counts`: powers of two, for short payloads.
_FEW_TREES = (1, 2, 4, 8)
# On tori `tree_counts` ends at the number of axes, whose even packings are deep and hard to find.
# Many trees are packed in a moment: 16x16x16 at 1 MB takes 10 % less time with 32 than with 3.
_MANY_TREES = (16, 32)
_FEWEST_COUNTED = 8  # a mesh whose own numbers of trees end below this gets those as well
# With failures a torus has no even packing of few trees, but ever evener ones of ever more, whose
# roots are everywhere: links are busy both ways from the start. 16x16x16 less 2x2x1 at 100 MB takes
# 1.22, 1.17, 1.14 times the limit with 32, 62, 92 trees, 16x16 less 4x2 at 10 MB 1.46, 1.36, 1.35
# with 31, 61, 91. More take longer to simulate. By the number of axes that wrap around.
_MOST_TREES_ON_TORI = {2: (61, 91, 107), 3: (62, 92)}
_MOST_RANKS_TIMES_TREES_ON_TORI = 600_000
# Where every chip is about as central as any, as on tori, roots may be anywhere. Then all links are
# busy from the start, and a payload that takes as long as its hops takes little longer than these:
# 14x9 as a torus less seven links at 512 KB takes 1.92 times the limit with trees from few roots,
# 1.66 with 128 from everywhere. More trees are shorter messages at every hop, but more overhead.
_ROOTED_TREES = (32, 48, 64, 96, 128)
_MOST_RANKS_WITH_ROOTED = 256
_MOST_RADII_OF_DIAMETER = 1.25
# Where the bytes take so many times as long as the hops, links that carry alike are faster: 3x4x4
# as a torus less a link at 83 MB takes 1.07 times the limit with them, 1.10 with few late messages.
_LONG_HOPS = 2.0
# Trees whose sums meet, where that saves hops: on tori and where an axis wraps around. Fewer suit
# short payloads and long overheads: 4x5x4 with one such axis less four chips at 1 KB
# (testbed-50mbit) takes 1.82, 1.91, 2.34 times the limit with 16, 32, 64; 12x16 as a torus less 3x5
# at 607 KB takes 1.76, 1.71, 1.64.
_MEETING_TREES = (16, 32, 64, 96)
# Trees that come out this many times as slow as the formula hoped for trees of any depth are too
# crowded around the middle: then the latter are packed too. A slit in 32x32: 1.97 times the limit
# without, 1.26 with.
_CROWDED = 1.05
_DEPTH_SLACKS_HOPS = (0, 1, 2)  # beside "as deep as even loads need"
# A packing whose formula is this many times the best of its kind is not tried further. 1.01 loses
# up to 4.3 %; 1.16 gains up to 1.2 % in 1.9 times the time.
_FAR_BEHIND = 1.04
# Windows to choose from, in hops: each up to 10, then steps of about 20 %, so that payloads not
# far apart try the same trees. Two radii of 32x32 are 64 hops; 126 are enough for 64x64.
_WINDOWS_HOPS = (*range(1, 11), 12, 14, 16, 19, 22, 26, 31, 37, 44, 52, 62, 74, 88, 105, 126)
_WINDOWS_PER_PAYLOAD = 3  # one loses up to 1.5 %, six gain nothing
# A payload whose window is longer than this many radii is not for disjoint trees: links still carry
# data up long after other data comes down. One loses up to 14 %, six gain nothing.
_LONGEST_WINDOW_RADII = 3
_MOST_DISJOINT_FOUND = 4
# Trees that fill gaps: for payloads whose gap is between these parts of the time. So many of them
# fit into the gap of a link of a corner; with fewer the leaves of one tree do not fit. 32x32 less
# 4x2 takes 1.94, 1.18 and 1.06 times the limit at 10 MB, 100 MB and 1 GB, with 18, 28 and 80.
_SHORTEST_GAP, _LONGEST_GAP = 0.02, 1.1
_TREES_PER_GAP = 1.4
_FEWEST_WITH_GAPS, _MANY_WITH_GAPS, _MOST_WITH_GAPS = 12, 60, 74
# How many numbers of trees to try: their times differ by a percent, for no reason that shows before
# they are simulated. Trees for long gaps are packed and simulated soon, many trees late.
_MOST_TRIED, LONG_GAP = 6, 0.3
_LEAST_RANKS_WITH_GAPS = 32
_SHORT_RADIUS_HOPS = 12  # up to here a slack of two hops is slower than one, above faster
# Packing takes time that grows with the mesh. So its size limits how many balanced packings are
# tried.
_SMALL_RANKS, _HUGE_RANKS = 128, 2048
_RANKS_OF_ONE_KIND = 512
_PACKINGS_IF_SMALL, _PACKINGS_USUALLY, _PACKINGS_IF_HUGE = 25, 5, 2


def finalists(mesh: Mesh, request: PipelineRequest) -> list[Trees]:
    """Return the packings that may be fastest, the best of each kind first, nine at most."""
    figures = mesh_figures(mesh)
    packed = _packed_by_formula(figures, request)
    order = sorted(packed, key=lambda shape: packed[shape])
    near = [shape for shape in order if not _is_far_behind(packed[shape], shape, packed)]
    best_of_each_kind = {shape.kind: shape for shape in reversed(near)}.values()
    near.sort(key=lambda shape: shape not in best_of_each_kind)
    return [trees_of(mesh, shape) for shape in near[:MOST_FINALISTS]]


def balanced_shapes(figures: MeshFigures) -> Iterator[tuple[TreeShape, TreeFigures]]:
    """Yield balanced packings worth trying, with the figures that they will probably reach.

    Shallow trees have their roots at the few ranks in the middle and crowd the links there: the
    busiest link carries about `n_trees / n_central` more trees than the least load.
    """
    radius, counts = figures.radius, tree_counts(figures, MOST_TREES)
    many = _MANY_TREES if max(counts) < _FEWEST_COUNTED else ()
    for n_trees in sorted({*_FEW_TREES, *many, *counts, *_many_on_tori(figures)}):
        least = least_load(figures, n_trees)
        yield TreeShape(n_trees), TreeFigures(n_trees, radius + radius // 10 + 1, least)
        for slack in _DEPTH_SLACKS_HOPS if n_trees > 1 else ():
            n_central = len(figures.ranks_within(radius + slack))
            load = min(n_trees, least + n_trees // n_central)
            yield TreeShape(n_trees, slack), TreeFigures(n_trees, radius + slack, load)


def rooted_shapes(
    figures: MeshFigures, request: PipelineRequest
) -> Iterator[tuple[TreeShape, TreeFigures]]:
    """Yield trees whose roots are all over the mesh; none where some chips are far from central.

    Long payloads need links that carry alike, others that few messages are late.
    """
    if _may_root_anywhere(figures):
        fabric, n_links = request.fabric, max(1, len(figures.mesh.links))
        bytes_s = request.payload_bytes / fabric.link_bandwidth_bytes_per_s / n_links
        hops_s = 2 * figures.radius * (fabric.hop_latency_s + fabric.message_overhead_s)
        is_long = request.n_ranks * bytes_s > _LONG_HOPS * hops_s
        for n_trees in _ROOTED_TREES:
            load = least_load(figures, n_trees)
            likely = TreeFigures(n_trees, figures.diameter, load, SPREAD_OVERLAP)
            if is_long:
                yield TreeShape(n_trees, 0, rooted=True, both_ways=True), likely
            else:
                yield TreeShape(n_trees, spread=1), likely


def meeting_shapes(figures: MeshFigures) -> Iterator[tuple[TreeShape, TreeFigures]]:
    """Yield trees whose sums meet; none where that saves no hops."""
    hops, stops = least_tree_hops(figures)
    if hops < 2 * figures.radius:
        for n_trees in _MEETING_TREES:
            load = math.ceil(n_trees * figures.mesh.n_live / max(1, len(figures.mesh.links)))
            likely = TreeFigures(n_trees, hops / 2, load, SPREAD_OVERLAP, hops - stops)
            yield TreeShape(n_trees, spread=2), likely


def least_tree_hops(figures: MeshFigures) -> tuple[int, int]:
    """Return how many hops trees take up and down at least, and how many of them end a message.

    Those with one root take two radii. Those whose sums meet, on few ranks, take half a diameter to
    the gates, without stopping, and half of the way up and down: about a radius.
    """
    mesh, hops = figures.mesh, figures.radius + figures.diameter // 2
    is_tried = FEWEST_RANKS <= mesh.n_live <= _MOST_RANKS_WITH_ROOTED and any(mesh.rings)
    if is_tried and hops < 2 * figures.radius:
        return hops, figures.radius
    return 2 * figures.radius, 2 * figures.radius


def _may_root_anywhere(figures: MeshFigures) -> bool:
    """Whether trees from anywhere are hardly deeper than those from the middle, on few ranks."""
    is_even = figures.diameter <= _MOST_RADII_OF_DIAMETER * figures.radius
    return is_even and 1 < figures.mesh.n_live <= _MOST_RANKS_WITH_ROOTED


def _many_on_tori(figures: MeshFigures) -> Iterator[int]:
    """Yield numbers of trees that only uneven tori gain from; small flat ones do not."""
    mesh = figures.mesh
    n_rings = sum(mesh.rings)
    is_large = n_rings > 2 or mesh.n_live > _SMALL_RANKS
    if is_large and (mesh.has_failures or mesh.has_slow):
        for n_trees in _MOST_TREES_ON_TORI.get(min(n_rings, 3), ()):
            if n_trees * mesh.n_live <= _MOST_RANKS_TIMES_TREES_ON_TORI:
                yield n_trees


def disjoint_shapes(
    figures: MeshFigures, request: PipelineRequest
) -> Iterator[tuple[TreeShape, TreeFigures]]:
    """Yield channel-disjoint trees for a payload; none if the payload is too long for them.

    Besides the window of the formula it tries the next shorter ones: with fewer slices, trees may
    be less deep. Where trees may have their roots anywhere, those keep links as busy: on 74 random
    meshes `auto` was faster with disjoint ones on one, by 0.8 %, and they took two thirds of the
    time of the search.
    """
    n_trees, radius = figures.min_degree, figures.radius
    if n_trees < 2 or not request.payload_bytes or _may_root_anywhere(figures):
        return
    likely = TreeFigures(n_trees, radius, 1)
    formula = request.formula(likely)
    window = max(1, formula.window_hops(request.slices or formula.best_slices()))
    if window <= _LONGEST_WINDOW_RADII * radius:
        fitting = [hops for hops in _WINDOWS_HOPS if hops <= min(window, 2 * radius)]
        n_windows = 1 if figures.mesh.n_live > _HUGE_RANKS else _WINDOWS_PER_PAYLOAD
        for hops in fitting[-n_windows:]:
            yield TreeShape(n_trees, window=hops), likely


def gap_filling_shapes(
    figures: MeshFigures, request: PipelineRequest
) -> Iterator[tuple[TreeShape, TreeFigures]]:
    """Yield trees whose leaves fill gaps; none if the gaps are too short or the mesh is a torus.

    A torus has no corner, so that its even loads are the least anyway. There must be so many trees
    that one of them fits into a gap.
    """
    mesh, degree = figures.mesh, figures.min_degree
    if not _LEAST_RANKS_WITH_GAPS <= mesh.n_live <= _HUGE_RANKS or any(mesh.wrap) or degree < 2:
        return
    slack = 1 if figures.radius <= _SHORT_RADIUS_HOPS else 2
    depth = figures.radius + slack
    formula = request.formula(TreeFigures(degree * degree, depth, degree))
    slices = request.slices or formula.best_slices()
    gap = formula.gap(slices) if request.payload_bytes else math.inf
    if _SHORTEST_GAP <= gap <= _LONGEST_GAP:
        gap = math.floor(100 * gap) / 100  # payloads not far apart share their trees
        n_least = min(max(degree / gap * _TREES_PER_GAP, _FEWEST_WITH_GAPS), _MOST_WITH_GAPS)
        n_tried = 1 if n_least > _MANY_WITH_GAPS else 2 if gap < LONG_GAP else _MOST_TRIED
        counts = range(math.ceil(n_least), math.ceil(n_least) + degree * _MOST_TRIED)
        by_pace = sorted(counts, key=lambda n_trees: pace(figures, n_trees, gap) / n_trees)
        for n_trees in by_pace[:n_tried]:
            likely = TreeFigures(n_trees, depth, pace(figures, n_trees, gap))
            yield TreeShape(n_trees, slack, gap=gap), likely


def _balanced(shapes: Iterable[TreeShape]) -> list[TreeShape]:
    return [shape for shape in shapes if shape.kind is TreeKind.BALANCED]


def _packed_by_formula(figures: MeshFigures, request: PipelineRequest) -> dict[TreeShape, float]:
    """Pack shapes until no other of their kind can win; return the formula's time of each."""
    mesh = figures.mesh
    gap_filling = list(gap_filling_shapes(figures, request))
    shapes = [
        *balanced_shapes(figures),
        *rooted_shapes(figures, request),
        *meeting_shapes(figures),
        *disjoint_shapes(figures, request),
    ]
    untried = {shape: request.likely_s(likely) for shape, likely in shapes}
    packed = {shape: request.likely_s(trees_of(mesh, shape).figures) for shape, _ in gap_filling}
    if packed and min(packed.values()) < min(untried.values()) and mesh.n_live > _RANKS_OF_ONE_KIND:
        return packed
    while untried and len(_balanced(packed)) < _most_packings(mesh):
        shape = min(untried, key=lambda shape: (untried[shape], shape.n_trees))
        if not _is_far_behind(untried.pop(shape), shape, packed):
            packed[shape] = request.likely_s(trees_of(mesh, shape).figures)
    deep = [shape for shape in _balanced(untried) if shape.depth_slack is None]
    best_s = min(packed[shape] for shape in _balanced(packed))
    if deep and _CROWDED * min(untried[shape] for shape in deep) < best_s:
        shape = min(deep, key=lambda shape: untried[shape])
        packed[shape] = request.likely_s(trees_of(mesh, shape).figures)
    return packed


def optimistic_s(mesh: Mesh, request: PipelineRequest) -> float:
    """Return the least time that the formula hopes for, before anything is packed."""
    figures = mesh_figures(mesh)
    shapes = (
        *balanced_shapes(figures),
        *rooted_shapes(figures, request),
        *meeting_shapes(figures),
    )
    hopes = [likely for _, likely in shapes]
    for _, likely in disjoint_shapes(figures, request):
        # More than four disjoint trees were found nowhere: then two of six share a channel.
        is_usual = likely.n_trees <= _MOST_DISJOINT_FOUND
        hopes.append(likely if is_usual else replace(likely, load=2))
    return min(request.likely_s(likely) for likely in hopes)


def _is_far_behind(time_s: float, shape: TreeShape, packed: dict[TreeShape, float]) -> bool:
    """Whether a shape is too slow, compared with the best of its kind, to win.

    The formula's error is largest on small meshes and differs between kinds of trees, so shapes are
    compared with their own kind, and with a margin.
    """
    of_its_kind = (packed[other] for other in packed if other.kind is shape.kind)
    return time_s > _FAR_BEHIND * min(of_its_kind, default=math.inf)


def _most_packings(mesh: Mesh) -> int:
    """Return how many balanced packings to make at most."""
    if mesh.n_live > _HUGE_RANKS:
        return _PACKINGS_IF_HUGE
    return _PACKINGS_USUALLY if mesh.n_live > _SMALL_RANKS else _PACKINGS_IF_SMALL
