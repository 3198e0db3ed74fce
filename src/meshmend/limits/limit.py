"""The physical limit: no allreduce on this mesh and fabric is faster, whatever the algorithm.

Three bounds; the limit is the largest. `docs/design/0010-limit.md` has the proofs.

Bandwidth. Cut the mesh into parts, and follow one byte of the result. Until a first part holds
the sum of all, messages between parts must have joined them all: parts - 1 at least. Every
other part must then still receive that sum or the rest of it: parts - 1 more. (It is the
one-way gossip problem, Harary and Schwenk 1974; bytes are added and moved, not coded.) Between
the parts there are 2 x cut channels of bandwidth B, so D (parts - 1) / (cut x B) seconds pass,
and the worst partition gives D / (packing number x B). Where the packing number is known only as
a bracket, its upper end is used, so the bound stays true. The last message pays one overhead and
takes one hop to arrive.

Exit. All D bytes of a chip leave it over its links, and what leaves last still has to reach the
chip farthest away: D / (links x B) + overhead + hops x hop latency. The same holds for a set of
chips and the links around it (`exits.py`).

Chip. Each byte of the result takes n - 1 additions somewhere among n chips that add at most C
bytes a second each: D (n - 1) / (n x C), even if they share the work evenly, after the first
message has arrived.

The two bounds that were the limit before, of bandwidth and of hops without overhead, are still
there: `bandwidth_s` and `latency_s`.
"""

import math
from dataclasses import dataclass

from meshmend.errors import InputError
from meshmend.limits.exits import Exit, exits
from meshmend.limits.packing_number import PackingNumber, packing_number
from meshmend.topology.fabric import Fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.units import format_bytes, format_time


@dataclass(frozen=True, eq=False)
class Limit:
    """The least time of an allreduce of `payload_bytes`: the largest of three bounds.

    `bandwidth_s` is the time of the busiest links alone, `latency_s` that of the longest way for
    an empty message without overhead. `chip_s` is the time of the additions alone, or None where
    the fabric does not limit the chips.
    """

    fabric: Fabric
    payload_bytes: float
    packing: PackingNumber
    bandwidth_s: float
    latency_s: float
    chip_s: float | None

    @property
    def time_s(self) -> float:
        """No allreduce is faster than this."""
        return max(self.bounds_s().values())

    @property
    def kind(self) -> str:
        """Which bound binds: `bandwidth`, `exit` or `chip`; the first of these if they tie."""
        bounds = self.bounds_s()
        return max(bounds, key=lambda kind: bounds[kind])

    @property
    def bandwidth_or_latency_s(self) -> float:
        """The larger of the two bounds that leave out overhead: bandwidth, and hops."""
        return max(self.bandwidth_s, self.latency_s)

    @property
    def exit(self) -> Exit | None:
        """The exit with the largest bound; None for one chip."""
        return max(exits(self.packing), key=self._exit_s, default=None)

    def bounds_s(self) -> dict[str, float]:
        """Return the bounds by kind."""
        if self.exit is None:
            return {"bandwidth": 0.0}
        first_s = self.fabric.message_overhead_s + self.fabric.hop_latency_s
        bounds = {"bandwidth": self.bandwidth_s + first_s, "exit": self._exit_s(self.exit)}
        return bounds if self.chip_s is None else bounds | {"chip": self.chip_s + first_s}

    def describe(self) -> str:
        """Return the limit in one line: the time, on what fabric, and what binds."""
        packing = self.packing
        reasons = {
            "bandwidth": f"packing number {packing.upper:.4g}, bound by {packing.describe()}",
            "exit": self.exit.describe(packing.mesh) if self.exit else "",
            "chip": "the additions of all chips",
        }
        return (
            f"at least {format_time(self.time_s)} for {format_bytes(self.payload_bytes)} on "
            f"{self.fabric.name}, by {self.kind}: {reasons[self.kind]}"
        )

    def _exit_s(self, way: Exit) -> float:
        bytes_s = self.payload_bytes / (way.n_links * self.fabric.link_bandwidth_bytes_per_s)
        return bytes_s + self.fabric.message_overhead_s + way.hops * self.fabric.hop_latency_s


def limit(mesh: Mesh, fabric: Fabric, payload_bytes: float) -> Limit:
    """Return the least time that any allreduce takes on a connected mesh.

    Raises:
        TopologyError: the live chips are not connected.
        InputError: a payload that is negative or not finite.
    """
    if not (math.isfinite(payload_bytes) and payload_bytes >= 0):
        raise InputError(f"limit needs a payload of zero bytes or more, but got {payload_bytes}")
    packing = packing_number(mesh)
    chip_bandwidth = fabric.chip_bandwidth_bytes_per_s
    additions_per_chip = payload_bytes * (mesh.n_live - 1) / mesh.n_live
    return Limit(
        fabric=fabric,
        payload_bytes=payload_bytes,
        packing=packing,
        bandwidth_s=payload_bytes / (packing.upper * fabric.link_bandwidth_bytes_per_s),
        latency_s=mesh_figures(mesh).diameter * fabric.hop_latency_s,
        chip_s=None if chip_bandwidth is None else additions_per_chip / chip_bandwidth,
    )
