"""A simulation's trace as a file for a trace viewer (Perfetto, chrome://tracing).

One process a chip, one track for each of its outgoing links, one bar for each message on it. A
large trace is thinned out: no viewer opens a gigabyte. Knows the trace event format, not how the
times were found.
"""

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.schedule.table import REDUCE
from meshmend.simulator.rules import Simulation, Trace
from meshmend.topology.mesh import Mesh

# Perfetto takes process 0 for the kernel's idle one. It counts in whole nanoseconds, so ends are
# rounded as starts are: bars of a track must not overlap.
_FIRST = 1
_BYTES_PER_BAR = 190  # measured on trees of 8x8 and 32x32; compressed a fifteenth of it
_COMPRESSION = 15
USUAL_BYTES = 45_000_000  # of a trace, before it is compressed
_USUAL_BARS = USUAL_BYTES // _BYTES_PER_BAR


@dataclass(frozen=True, eq=False)
class ChosenBars:
    """Some bars of a trace, and of how many slices they are."""

    bars: NDArray[np.int64]
    n_slices: int

    def size_bytes(self, *, compressed: bool) -> int:
        """Return about how large the file will be."""
        return len(self.bars) * _BYTES_PER_BAR // (_COMPRESSION if compressed else 1)


def bars_that_fit(simulation: Simulation, mesh: Mesh) -> ChosenBars:
    """Return the bars of as many slices, evenly spaced, as a viewer opens easily, by their start.

    Raises:
        InputError: no trace, or another mesh.
    """
    trace, n_slices = _checked(simulation, mesh), simulation.slices
    per_slice = max(1, len(trace.row) // n_slices)
    n_fit = min(n_slices, max(1, _USUAL_BARS // per_slice))
    if n_fit == n_slices:
        return ChosenBars(np.arange(len(trace.row)), n_slices)
    slices = np.unique(np.linspace(0, n_slices - 1, n_fit).astype(np.int64))
    return ChosenBars(np.flatnonzero(np.isin(trace.slice, slices)), len(slices))


def trace_events(
    simulation: Simulation, mesh: Mesh, chosen: ChosenBars | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the names of chips and links that were used, then one bar for each message and hop.

    Raises:
        InputError: a simulation without a trace, or a mesh it was not made for.
    """
    trace = _checked(simulation, mesh)
    bars = np.arange(len(trace.row)) if chosen is None else chosen.bars
    used = np.unique(trace.channel[bars])
    return chain(_names(used, mesh), _bars(simulation, trace, mesh, bars.tolist()))


def save_trace(
    simulation: Simulation, mesh: Mesh, path: Path, chosen: ChosenBars | None = None
) -> None:
    """Write the trace as JSON that trace viewers open, compressed if the name ends in `.gz`.

    Raises:
        InputError: as `trace_events`.
    """
    events = trace_events(simulation, mesh, chosen)
    about = {
        "algorithm": simulation.schedule.algorithm,
        "mesh": str(mesh),
        "fabric": str(simulation.fabric),
        "payload_bytes": simulation.payload_bytes,
        "slices": simulation.slices,
        "slices_in_this_file": simulation.slices if chosen is None else chosen.n_slices,
    }
    with gzip.open(path, "wt", 6) if path.suffix == ".gz" else path.open("w") as file:
        file.write(f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(about)},\n')
        file.write('"traceEvents": [')
        for number, event in enumerate(events):
            line = json.dumps(event, separators=(",", ":"))
            file.write((",\n" if number else "\n") + line)
        file.write("\n]}\n")


def _checked(simulation: Simulation, mesh: Mesh) -> Trace:
    if simulation.trace is None:
        raise InputError("trace_events needs a simulation with a trace; simulate with trace=True")
    if simulation.channel_busy_s.size != mesh.neighbor_ranks.size:
        raise InputError(
            f"trace_events needs the mesh of the simulation, with {simulation.channel_busy_s.size} "
            f"channels, but {mesh} has {mesh.neighbor_ranks.size}"
        )
    return simulation.trace


def _names(channels: NDArray[np.int32], mesh: Mesh) -> Iterator[dict[str, Any]]:
    named = -1
    for channel in channels.tolist():
        rank, port = divmod(channel, mesh.neighbor_ranks.shape[1])
        if rank != named:
            named = rank
            yield _name("process_name", f"chip {mesh.live[rank]}", rank)
            order = {"sort_index": rank}
            yield {"ph": "M", "name": "process_sort_index", "pid": _FIRST + rank, "args": order}
        there = mesh.live[mesh.neighbor_ranks[rank, port]]
        yield _name("thread_name", f"to {there}", rank, tid=_FIRST + port)


def _name(kind: str, name: str, rank: int, **track: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _FIRST + rank, **track, "args": {"name": name}}


def _bars(
    simulation: Simulation, trace: Trace, mesh: Mesh, bars: Iterable[int]
) -> Iterator[dict[str, Any]]:
    table, n_ports = simulation.schedule, mesh.neighbor_ranks.shape[1]
    phase_of, phases = table.phase_of_rows(), [phase.name for phase in table.phases]
    for at in bars:
        row, part = int(trace.row[at]), int(trace.slice[at])
        op = "reduce" if table.op[row] == REDUCE else "copy"
        rank, port = divmod(int(trace.channel[at]), n_ports)
        start_ns, end_ns = round(trace.start_s[at] * 1e9), round(trace.end_s[at] * 1e9)
        yield {
            "ph": "X",
            "name": f"row {row} slice {part}",
            "cat": op,
            "pid": _FIRST + rank,
            "tid": _FIRST + port,
            "ts": start_ns / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "args": {
                "op": op,
                "chunks": f"{table.lo[row]}-{table.hi[row] - 1}",
                "from": str(mesh.live[table.src[row]]),
                "to": str(mesh.live[table.dst[row]]),
                "phase": phases[phase_of[row]] if phase_of[row] >= 0 else "",
            },
        }
