"""The physical limit: no allreduce on this mesh and fabric is faster, whatever the algorithm.

Three bounds, each a proof; the limit is the largest.

Bandwidth. Cut the mesh into parts, and follow one byte of the result. Until a first part holds
the sum of all, messages between parts must have joined them all: parts - 1 at least. Every
other part must then still receive that sum or the rest of it: parts - 1 more. (It is the
one-way gossip problem, Harary and Schwenk 1974; bytes are added and moved, not coded.) Between
the parts there are 2 x cut channels of bandwidth B, so D (parts - 1) / (cut x B) seconds pass,
and the worst partition gives D / (packing number x B). Where the packing number is known only as
a bracket, its upper end is used, so the bound stays true.

Latency. The result at each chip depends on every other chip: diameter x hop latency.

Chip. Each byte of the result takes n - 1 additions somewhere among n chips that add at most C
bytes a second each: D (n - 1) / (n x C), even if they share the work evenly.
"""

import math
from dataclasses import dataclass

from meshmend.errors import InputError
from meshmend.limits.packing_number import PackingNumber, packing_number
from meshmend.topology.fabric import Fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.units import format_bytes, format_time


@dataclass(frozen=True, eq=False)
class Limit:
    """The least time of an allreduce of `payload_bytes`: the largest of three bounds.

    `chip_s` is None where the fabric does not limit the chips.
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
        return max(self._bounds().values())

    @property
    def kind(self) -> str:
        """Which bound binds: `bandwidth`, `latency` or `chip`; the first of these if they tie."""
        bounds = self._bounds()
        return max(bounds, key=lambda kind: bounds[kind])

    def describe(self) -> str:
        """Return the limit in one line: the time, on what fabric, and what binds."""
        packing = self.packing
        reason = {
            "bandwidth": f"packing number {packing.upper:.4g}, bound by {packing.describe()}",
            "latency": "the hops between the chips farthest apart",
            "chip": "the additions of all chips",
        }[self.kind]
        return (
            f"at least {format_time(self.time_s)} for {format_bytes(self.payload_bytes)} on "
            f"{self.fabric.name}, by {self.kind}: {reason}"
        )

    def _bounds(self) -> dict[str, float]:
        bounds = {"bandwidth": self.bandwidth_s, "latency": self.latency_s}
        return bounds if self.chip_s is None else bounds | {"chip": self.chip_s}


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
