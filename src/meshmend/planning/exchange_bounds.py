"""A time that no exchange beats, known without building it: the bytes that every chip receives."""

from typing import Final

import numpy as np

from meshmend.schedule.rings_nd import axis_orders
from meshmend.topology.fabric import Fabric
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh

SCATTERED_AXES: Final = {"exchange": 0, "exchange-1": 1, "exchange-2": 2}


def least_exchange_s(mesh: Mesh, fabric: Fabric, payload_bytes: float, name: str) -> float:
    """Return a time that the exchange of this name cannot beat on a connected mesh."""
    n_scattered = SCATTERED_AXES[name]
    n_channels = 2 * max(1, len(mesh.links))
    received = mesh.n_live * _received_payloads(mesh, n_scattered)
    bytes_s = received / n_channels * payload_bytes / fabric.link_bandwidth_bytes_per_s
    return max(bytes_s, _hops(mesh, n_scattered) * fabric.hop_latency_s)


def _hops(mesh: Mesh, n_scattered: int) -> int:
    """Return how many hops follow one another at least: scattered axes are passed twice.

    With failed chips, ways around holes may be shorter than along the axes.
    """
    hops = mesh_figures(mesh).diameter
    if not (mesh.failed or mesh.failed_links):
        farthest = [
            size // 2 if wraps and size > 2 else size - 1
            for size, wraps in zip(mesh.shape, mesh.wrap, strict=True)
            if size > 1
        ]
        hops += sum(sorted(farthest)[:n_scattered])
    return hops


def _received_payloads(mesh: Mesh, n_scattered: int) -> float:
    """Return how many payloads a chip receives at least, on average.

    With failed chips lines are shorter. Then only the last axis is counted, along which a chip
    gets a sum from each position where some chip lives, unless chips own different shares.
    """
    if mesh.failed or mesh.failed_links:
        positions = [len(np.unique(at)) for at in mesh.coordinates.T if at.max() > at.min()]
        return 0.0 if n_scattered else min(positions, default=1) - 1
    return min(_received_in_order(mesh, order, n_scattered) for order in axis_orders(mesh))


def _received_in_order(mesh: Mesh, order: tuple[int, ...], n_scattered: int) -> float:
    received, left = 0.0, 1.0
    for number, axis in enumerate(order):
        size = mesh.shape[axis]
        if number < n_scattered:  # once on the way there, once on the way back
            received += 2 * left * (1 - 1 / size)
            left /= size
        else:
            received += left * (size - 1)
    return received
