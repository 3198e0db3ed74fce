"""The physical limit: no schedule of a collective on this mesh and fabric is faster.

Four bounds; the limit is the largest of those that hold for the collective.
`docs/design/0010-limit.md` has the proofs for an allreduce, `0011-owners.md` for the others.

Bandwidth (allreduce, sharded update). Cut the mesh into parts, and follow one byte of the result.
Until a first part holds the sum of all, messages between parts must have joined them all: parts - 1
at least. Every other part must then still receive that sum or the rest of it: parts - 1 more. (It
is the one-way gossip problem, Harary and Schwenk 1974; bytes are added and moved, not coded.)
Between the parts there are 2 x cut channels of bandwidth B, so D (parts - 1) / (cut x B) seconds
pass, and the worst partition gives D / (packing number x B). Where the packing number is known only
as a bracket, its upper end is used, so the bound stays true. The last message pays one overhead and
takes one hop to arrive.

Exit. All D bytes of a chip leave it over its links, and what leaves last still has to reach the
chip farthest away: D / (links x B) + overhead + hops x hop latency. The same holds for a set of
chips and the links around it (`exits.py`). In a reduce-scatter a part leaves only if another
chip owns it, and goes no farther than to its owner; an all-gather is that backwards, and the bound
is named entry (`owner_exits.py`).

Chip (not for an all-gather). Each byte of the result takes n - 1 additions somewhere among n chips
that add at most C bytes a second each: D (n - 1) / (n x C), even if they share the work evenly,
after the first message has arrived.

Update (sharded update). An owner cannot begin before a message from the chip farthest away is
there. It updates its share, and the last of it goes back to that chip.

The two bounds that were the limit before, of bandwidth and of hops without overhead, are still
there: `bandwidth_s` and `latency_s`.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from meshmend.errors import InputError
from meshmend.schedule.table import Collective
from meshmend.simulator.exits import Exit, exits
from meshmend.simulator.owner_exits import Shares, owner_exits
from meshmend.simulator.packing_number import PackingNumber, packing_number
from meshmend.topology.fabric import Fabric
from meshmend.topology.figures import MeshFigures, mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.units import format_bytes, format_time

_HALVES = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)


@dataclass(frozen=True, eq=False)
class Limit:
    """The least time of a collective of `payload_bytes`: the largest of its bounds.

    `bandwidth_s` is the time of the busiest links alone, `latency_s` that of the longest way for
    an empty message without overhead. `chip_s` is the time of the additions alone, or None where
    the fabric does not limit the chips or nothing is added. `update_s` is the bound by the update,
    or None if nothing is updated.
    """

    fabric: Fabric
    payload_bytes: float
    packing: PackingNumber
    bandwidth_s: float
    latency_s: float
    chip_s: float | None
    update_s: float | None = None
    collective: Collective = Collective.ALLREDUCE
    exits: tuple[Exit, ...] = field(default=(), repr=False)

    @property
    def time_s(self) -> float:
        """No schedule of the collective is faster than this."""
        return max(self.bounds_s().values())

    @property
    def kind(self) -> str:
        """Which bound binds: `bandwidth`, `exit` or `entry`, `update` or `chip`."""
        bounds = self.bounds_s()
        return max(bounds, key=lambda kind: bounds[kind])

    @property
    def bandwidth_or_latency_s(self) -> float:
        """The larger of the two bounds that leave out overhead: bandwidth, and hops."""
        return max(self.bandwidth_s, self.latency_s)

    @property
    def exit(self) -> Exit | None:
        """The exit with the largest bound; None for one chip."""
        return max(self.exits, key=self._exit_s, default=None)

    def bounds_s(self) -> dict[str, float]:
        """Return the bounds by kind."""
        way, first_s = self.exit, self.fabric.message_overhead_s + self.fabric.hop_latency_s
        bounds = {} if self.update_s is None else {"update": self.update_s}
        if way is None:
            return {"bandwidth": 0.0} | bounds
        bounds = {self._exit_kind: self._exit_s(way)} | bounds
        if self.collective not in _HALVES:
            bounds = {"bandwidth": self.bandwidth_s + first_s} | bounds
        return bounds if self.chip_s is None else bounds | {"chip": self.chip_s + first_s}

    def describe(self) -> str:
        """Return the limit in one line: the time, on what fabric, and what binds."""
        packing = self.packing
        verb = "enters" if self._exit_kind == "entry" else "leaves"
        reasons = {
            "bandwidth": f"packing number {packing.upper:.4g}, bound by {packing.describe()}",
            self._exit_kind: self.exit.describe(packing.mesh, verb=verb) if self.exit else "",
            "chip": "the additions of all chips",
            "update": "an owner hears from all chips, updates its share, and all hear from it",
        }
        return (
            f"at least {format_time(self.time_s)} for {format_bytes(self.payload_bytes)} on "
            f"{self.fabric.name}, by {self.kind}: {reasons[self.kind]}"
        )

    @property
    def _exit_kind(self) -> str:
        return "entry" if self.collective is Collective.ALL_GATHER else "exit"

    def _exit_s(self, way: Exit) -> float:
        bandwidth = way.n_links * self.fabric.link_bandwidth_bytes_per_s
        bytes_s = way.share * self.payload_bytes / bandwidth
        return bytes_s + self.fabric.message_overhead_s + way.hops * self.fabric.hop_latency_s


def limit(
    mesh: Mesh,
    fabric: Fabric,
    payload_bytes: float,
    collective: Collective = Collective.ALLREDUCE,
    *,
    shares: Shares | None = None,
) -> Limit:
    """Return the least time that any schedule of a collective takes on a connected mesh.

    `shares` says what part of the payload each rank owns; without it all own an equal part. An
    allreduce needs no owners, so there they change nothing.

    Raises:
        TopologyError: the live chips are not connected.
        InputError: a payload that is negative or not finite.
    """
    if not (math.isfinite(payload_bytes) and payload_bytes >= 0):
        raise InputError(f"limit needs a payload of zero bytes or more, but got {payload_bytes}")
    packing, figures = packing_number(mesh), mesh_figures(mesh)
    owned = np.full(mesh.n_live, 1 / mesh.n_live) if shares is None else shares
    is_updated = collective is Collective.SHARDED_UPDATE
    ways: tuple[Exit, ...] = () if collective in _HALVES else exits(packing)
    if collective is not Collective.ALLREDUCE:
        ways += owner_exits(packing, shares, is_updated=is_updated)
    busiest = 1 / packing.upper
    if collective in _HALVES and mesh.n_live > 1:
        busiest = float(np.max((1 - owned) / figures.degrees))
    there_and_back = 2 if is_updated else 1
    return Limit(
        fabric=fabric,
        payload_bytes=payload_bytes,
        packing=packing,
        bandwidth_s=busiest * payload_bytes / fabric.link_bandwidth_bytes_per_s,
        latency_s=there_and_back * figures.diameter * fabric.hop_latency_s,
        chip_s=_chip_s(mesh, fabric, payload_bytes, collective),
        update_s=_update_s(figures, fabric, payload_bytes * owned) if is_updated else None,
        collective=collective,
        exits=ways,
    )


def _chip_s(
    mesh: Mesh, fabric: Fabric, payload_bytes: float, collective: Collective
) -> float | None:
    chip_bandwidth = fabric.chip_bandwidth_bytes_per_s
    if chip_bandwidth is None or collective is Collective.ALL_GATHER:
        return None
    return payload_bytes * (mesh.n_live - 1) / mesh.n_live / chip_bandwidth


def _update_s(figures: MeshFigures, fabric: Fabric, owned_bytes: Shares) -> float:
    """Return the bound by the owner that ends last: hops to it, its update, and hops from it."""
    update_s = owned_bytes / (fabric.update_bytes_per_s or math.inf)
    if len(owned_bytes) == 1:
        return float(update_s[0])
    way_s = fabric.message_overhead_s + figures.eccentricities * fabric.hop_latency_s
    return float(np.max(np.where(owned_bytes > 0, 2 * way_s + update_s, 0.0)))
