"""Chooses the trees that are fastest in lockstep, where every step waits for the slowest link.

Few trees leave links idle while the first cells travel to the farthest chip and back. More trees
mean more and smaller cells, which fill these steps, until the price of a step is all latency. A
plan that runs freely need not care: its rows wait for nobody. So the number of trees is chosen
here again, together with the slices.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from meshmend.planning.lowering import (
    Lowered,
    check_slices,
    lowered,
    lowered_price_s,
    slices_to_try,
)
from meshmend.planning.plan import AUTO, Plan, plan, planned
from meshmend.planning.progress import ProgressCallback, ProgressShares, no_progress
from meshmend.planning.target import Payload, Target
from meshmend.schedule.table import Collective
from meshmend.schedule.trees import tree_schedule, usual_tree_count
from meshmend.topology.fabric import Fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.trees.tree_counts import least_load
from meshmend.trees.tree_packing import tree_packing

MOST_TREES: Final = 64  # twice as many gain 1 % on 16x16, and tables grow with them
_N_TRIED: Final = 4  # packings that are built and priced; the formula ranks all others behind
_SHALLOW_SLACK: Final = 1  # of a packing that is tried beside those
_USUAL_SLACK: Final = 2  # hops by which the trees of an even packing are deeper than the radius


def lockstep_plan(
    mesh: Mesh,
    algorithm: str = AUTO,
    *,
    payload: Payload | None = None,
    fabric: Fabric | str | None = None,
    slices: int | None = None,
    cache_dir: Path | None = None,
    progress: ProgressCallback = no_progress,
) -> Lowered:
    """Return the plan that sums a payload fastest in lockstep, proved and lowered.

    The arguments are those of `plan`. `slices` fixes their number; the trees are then the fastest
    for it. With `auto` or `trees` it is never slower than what `plan` returns; any other algorithm
    has one schedule, which is lowered as it is. Deterministic.

        >>> low = lockstep_plan(Mesh((8, 8)).without("2x2@2,2"), slices=8)
        >>> low.program.n_steps <= 1.25 * low.program.busiest
        True

    Raises:
        InputError: slices that no program can have, a payload that cannot be read, or an unknown
            fabric.
        UnsupportedError: the algorithm does not support the mesh.
    """
    check_slices(slices)
    target = Target().with_(payload, fabric)
    shares = ProgressShares(progress, 2)
    usual = plan(
        mesh,
        algorithm,
        payload=target.payload_bytes,
        fabric=target.fabric,
        cache_dir=cache_dir,
        progress=shares.of(0),
    )
    if algorithm == AUTO and usual.schedule.has_scratch:  # permutes have no scratch
        usual = plan(mesh, "trees", payload=target.payload_bytes, fabric=target.fabric)
    tried = [usual]
    has_choice = algorithm in {AUTO, "trees"} and usual.schedule.n_rows > 0
    counts = _promising(largest_part(mesh), target, slices) if has_choice else []
    progress = shares.of(1)
    for place, n_trees in enumerate(counts):
        progress(f"{n_trees} trees in lockstep", place / len(counts))
        tried.append(_with_trees(usual, n_trees))
    if has_choice:
        # The usual plan may have trees whose leaves come last; in lockstep none can wait.
        few = usual_tree_count(usual.placement.mesh)
        tried.append(_with_trees(usual, few, depth_slack=_SHALLOW_SLACK))
    fastest = min(tried, key=lambda made: lowered_price_s(made, slices))
    # A price without packing is off by a few percent, so the usual plan is packed too.
    finalists = dict.fromkeys([usual, fastest])
    return min((lowered(made, slices=slices) for made in finalists), key=lambda low: low.time_s)


def _with_trees(usual: Plan, n_trees: int, *, depth_slack: int | None = None) -> Plan:
    """Return a proved plan of so many trees for the mesh and the target of another."""
    packing = tree_packing(usual.placement.mesh, n_trees=n_trees, depth_slack=depth_slack)
    schedule = tree_schedule(packing, Collective.ALLREDUCE)
    return planned(usual.mesh, schedule, usual.target)


def _promising(part: Mesh, target: Target, slices: int | None) -> list[int]:
    """Return the numbers of trees that a formula finds fastest, few before many."""
    figures, fabric = mesh_figures(part), target.fabric
    depth = 2 * (figures.radius + _USUAL_SLACK)
    priced = []
    for n_trees in range(1, MOST_TREES + 1):
        load, n_rows = least_load(figures, n_trees), 2 * n_trees * (part.n_live - 1)
        numbers: Iterable[int] = [slices] if slices else slices_to_try(n_rows)
        for number in numbers:
            cell_s = target.payload_bytes / (n_trees * number) / fabric.link_bandwidth_bytes_per_s
            step_s = fabric.hop_latency_s + fabric.message_overhead_s + cell_s
            priced.append(((depth + load * number) * step_s, n_trees))
    fastest = dict.fromkeys(n_trees for _, n_trees in sorted(priced))
    return sorted(list(fastest)[:_N_TRIED])
