"""A plan as plain tables: its rows as CSV, its routes as next-hop tables of the chips."""

import csv
import io
from itertools import pairwise
from typing import Any

from meshmend.planning.plan import Plan
from meshmend.schedule.table import REDUCE
from meshmend.topology.failures import Chip, format_chip
from meshmend.topology.text import mesh_words

NEXT_HOP_FORMAT = "meshmend-next-hop"
NEXT_HOP_VERSION = 1

_HEADS = (
    *("row", "phase", "source_rank", "source_chip", "target_rank", "target_chip"),
    *("first_chunk", "last_chunk", "payload_from", "payload_to", "operation", "hops"),
    "virtual_channel",
)

_BUFFER_HEADS = ("source_buffer", "target_buffer")


def plan_csv(plan: Plan) -> str:
    """Return the rows of a plan as CSV with a heading; the payload runs from 0 to 1.

    A row between two buffers of one rank has no hops and no virtual channel. A plan with scratch
    has two more columns: the buffers that a row reads and writes.
    """
    schedule, mesh, routes = plan.schedule, plan.placement.mesh, plan.placement.routes
    hops = routes.hops.tolist()
    phase_of, phases = schedule.phase_of_rows(), [phase.name for phase in schedule.phases]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    buffers = schedule.buffer_columns
    writer.writerow((*_HEADS, *(_BUFFER_HEADS if buffers else ())))
    for row in range(schedule.n_rows):
        src, dst = int(schedule.src[row]), int(schedule.dst[row])
        lo, hi = int(schedule.lo[row]), int(schedule.hi[row])
        pair = routes.pair_of(src, dst) if src != dst else None
        writer.writerow(
            (
                row,
                phases[phase_of[row]] if phase_of[row] >= 0 else "",
                *(src, format_chip(mesh.live[src]), dst, format_chip(mesh.live[dst])),
                *(lo, hi - 1, float(schedule.cuts[lo]), float(schedule.cuts[hi])),
                "reduce" if schedule.op[row] == REDUCE else "copy",
                *((0, "") if pair is None else (hops[pair], int(routes.virtual_channel[pair]))),
                *(int(column[row]) for column in buffers.values()),
            )
        )
    return text.getvalue()


def next_hop_tables(plan: Plan) -> dict[str, Any]:
    """Return for each chip which neighbour a message goes to next, as a JSON value.

    A message has a target chip and a virtual channel; both stay the same on its way. `sends` of a
    chip says on which virtual channel it sends to each target: its table may have entries for that
    target on others too, for messages that pass. Only messages of this plan have entries. Together
    the tables are free of deadlock, as the plan is.
    """
    mesh, routes = plan.placement.mesh, plan.placement.routes
    sends: dict[Chip, list[dict[str, Any]]] = {chip: [] for chip in mesh.live}
    tables: dict[Chip, dict[tuple[int, Chip], Chip]] = {chip: {} for chip in mesh.live}
    for src in range(routes.n_ranks):
        for pair in range(int(routes.pair_ptr[src]), int(routes.pair_ptr[src + 1])):
            channel, target = int(routes.virtual_channel[pair]), mesh.live[int(routes.dst[pair])]
            sends[mesh.live[src]].append({"target": list(target), "virtual_channel": channel})
            path = routes.path(mesh, src, int(routes.dst[pair]))
            for here, there in pairwise(path):
                known = tables[here].setdefault((channel, target), there)
                assert known == there, "routes of one channel to one target never part"
    return {
        "format": NEXT_HOP_FORMAT,
        "version": NEXT_HOP_VERSION,
        "mesh": mesh_words(plan.mesh),
        "virtual_channels": routes.n_virtual_channels,
        "chips": [
            {
                "chip": list(chip),
                "rank": rank,
                "sends": sends[chip],
                "next_hops": [
                    {"virtual_channel": channel, "target": list(target), "next": list(there)}
                    for (channel, target), there in sorted(tables[chip].items())
                ],
            }
            for rank, chip in enumerate(mesh.live)
        ],
    }
