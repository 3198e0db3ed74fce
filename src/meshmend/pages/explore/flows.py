"""What a plan draws over its mesh: the trees, rings or routes of each phase, as channels.

Everything comes from the table and the routes, so each picture shows the plan that was proved.
Channels are numbered over all chips of the shape, dead ones included: `chip x ports + port`. So a
page that knows the shape alone can draw them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.plan import Plan
from meshmend.schedule.table import REDUCE, Phase, Schedule
from meshmend.topology.mesh import Mesh


@dataclass(frozen=True)
class Flow:
    """A phase of the sum and its parts: trees or rings, each a tuple of channels.

    `channels` of a part are in no order; arrows show where each leads.
    """

    name: str
    kind: str  # "tree" or "ring": what a part is
    parts: tuple[tuple[int, ...], ...]


def flows_of(plan: Plan) -> tuple[Flow, ...]:
    """Return the flows of the reducing phases; the phases after them go the same ways back."""
    schedule = plan.schedule
    reducing = [each for each in schedule.phases if _is_shown(schedule, each)]
    is_trees = schedule.algorithm == "trees"
    return tuple(
        Flow(
            phase.name,
            "tree" if is_trees else "ring",
            _parts(plan, _tree_pairs(plan, phase) if is_trees else _ring_pairs(plan, phase)),
        )
        for phase in reducing
    )


def _is_shown(schedule: Schedule, phase: Phase) -> bool:
    """Whether a phase sums between chips, or sends sums to the scratch of others."""
    if schedule.dst_buffer is None:
        return bool(schedule.op[phase.start] == REDUCE)
    rows = slice(phase.start, phase.stop)
    if schedule.is_local[rows].all():
        return False
    return bool(schedule.op[phase.start] == REDUCE or schedule.dst_buffer[rows].any())


def whole_channels(mesh: Mesh) -> NDArray[np.int64]:
    """Return the number over all chips of the shape of each channel of a mesh's live ranks."""
    chips = np.ravel_multi_index(tuple(mesh.coordinates.T), mesh.shape)
    n_ports = mesh.neighbor_ranks.shape[1]
    numbers: NDArray[np.int64] = (chips[:, None] * n_ports + np.arange(n_ports)).reshape(-1)
    return numbers


Pairs = NDArray[np.int64]  # (pairs, 2): source and destination ranks


def _parts(plan: Plan, groups: list[Pairs]) -> tuple[tuple[int, ...], ...]:
    routes, numbers = plan.placement.routes, whole_channels(plan.placement.mesh)
    known = routes.src.astype(np.int64) * routes.n_ranks + routes.dst  # rises: routes are sorted
    parts = []
    for pairs in groups:
        at = np.searchsorted(known, pairs[:, 0] * routes.n_ranks + pairs[:, 1])
        hops = routes.hops[at]
        first = np.repeat(routes.hop_ptr[at] - np.cumsum(hops) + hops, hops)
        channels = routes.channels[first + np.arange(len(first))]
        parts.append(tuple(np.unique(numbers[channels]).tolist()))
    return tuple(parts)


def _tree_pairs(plan: Plan, phase: Phase) -> list[Pairs]:
    """Return the links of each tree: a tree carries a chunk of its own."""
    table, rows = plan.schedule, slice(phase.start, phase.stop)
    chunk = table.lo[rows]
    pairs = np.stack([table.src[rows], table.dst[rows]], axis=1).astype(np.int64)
    return [pairs[chunk == number] for number in np.unique(chunk)]


def _ring_pairs(plan: Plan, phase: Phase) -> list[Pairs]:
    """Return the pairs of each ring: those of ranks that send to each other, directly or not."""
    table, rows = plan.schedule, slice(phase.start, phase.stop)
    keys = np.unique(table.src[rows].astype(np.int64) * table.n_ranks + table.dst[rows])
    pairs = np.stack(np.divmod(keys, table.n_ranks), axis=1)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]  # local rows take no link
    label = np.arange(table.n_ranks)
    while True:
        least = np.minimum(label[pairs[:, 0]], label[pairs[:, 1]])
        before = label.copy()
        np.minimum.at(label, pairs[:, 0], least)
        np.minimum.at(label, pairs[:, 1], least)
        label = label[label]
        if np.array_equal(before, label):
            break
    ring = label[pairs[:, 0]]
    return [pairs[ring == number] for number in np.unique(ring)]
