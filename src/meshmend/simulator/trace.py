"""A simulation's trace as a file for a browser's trace viewer (chrome://tracing, Perfetto).

One process a chip, one track for each of its outgoing links, one bar for each message on it.
Knows the trace event format, not how the times were found.
"""

import gzip
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from meshmend.errors import InputError
from meshmend.schedule.table import REDUCE
from meshmend.simulator.rules import Simulation, Trace
from meshmend.topology.mesh import Mesh


def trace_events(simulation: Simulation, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Yield the names of chips and links that were used, then one bar for each message and hop.

    Raises:
        InputError: a simulation without a trace, or a mesh it was not made for.
    """
    if simulation.trace is None:
        raise InputError("trace_events needs a simulation with a trace; simulate with trace=True")
    if simulation.channel_busy_s.size != mesh.neighbor_ranks.size:
        raise InputError(
            f"trace_events needs the mesh of the simulation, with {simulation.channel_busy_s.size} "
            f"channels, but {mesh} has {mesh.neighbor_ranks.size}"
        )
    return chain(_names(simulation, mesh), _bars(simulation, simulation.trace, mesh))


def save_trace(simulation: Simulation, mesh: Mesh, path: Path) -> None:
    """Write the trace as JSON that trace viewers open, compressed if the name ends in `.gz`.

    Raises:
        InputError: as `trace_events`.
    """
    events = trace_events(simulation, mesh)
    about = {
        "algorithm": simulation.schedule.algorithm,
        "mesh": str(mesh),
        "fabric": str(simulation.fabric),
        "payload_bytes": simulation.payload_bytes,
        "slices": simulation.slices,
    }
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write(f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(about)},\n')
        file.write('"traceEvents": [')
        for number, event in enumerate(events):
            file.write((",\n" if number else "\n") + json.dumps(event))
        file.write("\n]}\n")


def _names(simulation: Simulation, mesh: Mesh) -> Iterator[dict[str, Any]]:
    for rank, busy_s in enumerate(simulation.channel_busy_s.reshape(mesh.n_live, -1)):
        if not busy_s.any():
            continue
        yield _name("process_name", f"chip {mesh.live[rank]}", rank)
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for port in busy_s.nonzero()[0].tolist():
            there = mesh.live[mesh.neighbor_ranks[rank, port]]
            yield _name("thread_name", f"to {there}", rank, tid=port)


def _name(kind: str, name: str, rank: int, **track: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, **track, "args": {"name": name}}


def _bars(simulation: Simulation, trace: Trace, mesh: Mesh) -> Iterator[dict[str, Any]]:
    table, n_ports = simulation.schedule, mesh.neighbor_ranks.shape[1]
    phase_of, phases = table.phase_of_rows(), [phase.name for phase in table.phases]
    for at, row in enumerate(trace.row.tolist()):
        op = "reduce" if table.op[row] == REDUCE else "copy"
        rank, port = divmod(int(trace.channel[at]), n_ports)
        part = int(trace.slice[at])
        yield {
            "ph": "X",
            "name": f"row {row} slice {part} {op} chunks {table.lo[row]}-{table.hi[row] - 1}",
            "cat": op,
            "pid": rank,
            "tid": port,
            "ts": trace.start_s[at] * 1e6,
            "dur": (trace.end_s[at] - trace.start_s[at]) * 1e6,
            "args": {
                "row": row,
                "slice": part,
                "op": op,
                "chunks": [int(table.lo[row]), int(table.hi[row])],
                "from": list(mesh.live[table.src[row]]),
                "to": list(mesh.live[table.dst[row]]),
                "phase": phases[phase_of[row]] if phase_of[row] >= 0 else "",
            },
        }
