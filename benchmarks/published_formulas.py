"""What the authors of other allreduce algorithms say that these take, with the figures of a fabric.

Each formula counts bytes, hops and messages as its paper does, and nothing that gets in the way: no
phase waits longer than its own links need. So these are the times of perfect implementations. A
formula returns None for a mesh that its paper has no algorithm for; none of them has failed chips.
"""

import math
from collections.abc import Callable

from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh


def bucket_s(mesh: Mesh, fabric: Fabric, payload_bytes: float) -> float | None:
    """Return the time of the n-D bucket algorithm on a full torus, on all ports at once.

    Each of 2 D parts of the payload starts with another axis and way (Jain and Sabharwal 2010, Sack
    and Gropp 2015). In a phase every part waits for the longest axis.
    """
    sides = [size for size in mesh.shape if size > 1]
    if not _is_full_torus(mesh):
        return None
    step_s = fabric.hop_latency_s + fabric.message_overhead_s
    part_s = payload_bytes / (2 * len(sides)) / fabric.link_bandwidth_bytes_per_s
    half_s = 0.0
    for phase in range(len(sides)):
        times = []
        for first in range(len(sides)):
            before = [sides[(first + at) % len(sides)] for at in range(phase)]
            side = sides[(first + phase) % len(sides)]
            times.append((side - 1) * (step_s + part_s / math.prod(before) / side))
        half_s += max(times)
    return 2 * half_s


def swing_s(mesh: Mesh, fabric: Fabric, payload_bytes: float) -> float | None:
    """Return the time of Swing on a square torus of a power of two (De Sensi et al., NSDI 2024).

    In step s a chip exchanges with one that is |1 - (-2)^(k + 1)| / 3 chips away, k = s / D, and as
    many messages share a link. The faster of its two kinds: halving what is sent in each step,
    there and back, or sending everything in every step, once.
    """
    sides = [size for size in mesh.shape if size > 1]
    is_square = len(set(sides)) == 1 and math.log2(sides[0]).is_integer() if sides else False
    if not (_is_full_torus(mesh) and is_square):
        return None
    part_s = payload_bytes / (2 * len(sides)) / fabric.link_bandwidth_bytes_per_s
    halving_s = whole_s = 0.0
    for step in range(len(sides) * int(math.log2(sides[0]))):
        away = abs(1 - (-2) ** (step // len(sides) + 1)) // 3
        message_s = fabric.message_overhead_s + away * fabric.hop_latency_s
        halving_s += 2 * (message_s + away * part_s / 2 ** (step + 1))
        whole_s += message_s + away * part_s
    return min(halving_s, whole_s)


def tto_s(mesh: Mesh, fabric: Fabric, payload_bytes: float) -> float | None:
    """Return the time of Three Tree Overlap on a full 2-D mesh (Laskar et al., HPCA 2024).

    A third of the payload goes up and down each of three disjoint trees, overlapped: two thirds of
    it cross a link. The abstract says nothing of hops; a tree from a corner has these.
    """
    sides = [size for size in mesh.shape if size > 1]
    if len(sides) != 2 or any(mesh.wrap) or mesh.failed or mesh.failed_links:
        return None
    step_s = fabric.hop_latency_s + fabric.message_overhead_s
    bytes_s = payload_bytes * 2 / 3 / fabric.link_bandwidth_bytes_per_s
    return bytes_s + 2 * (sum(sides) - 2) * step_s


def _is_full_torus(mesh: Mesh) -> bool:
    wraps = all(wrap and size > 2 for size, wrap in zip(mesh.shape, mesh.wrap, strict=True))
    return wraps and not mesh.failed and not mesh.failed_links


Formula = Callable[[Mesh, Fabric, float], float | None]
FORMULAS: dict[str, Formula] = {"bucket": bucket_s, "swing": swing_s, "tto": tto_s}
