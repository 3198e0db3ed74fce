"""The next-hop table of one chip: by which port it sends messages for every other chip."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.topology.failures import Chip
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.tables import Demand, next_ports, shortest_ports, table_hops
from meshmend.topology.virtual_channels import all_pairs_tables

_MOST_ALL_PAIRS: Final = 1500  # chips whose deadlock-free tables are built at once


def next_hops(mesh: Mesh, chip: Chip) -> dict[str, Any]:
    """Return the table of a chip as a JSON value: one port and virtual channel a destination.

    `ports` has one entry for each chip of the shape, -1 for the chip itself and for those that it
    cannot reach. On more than 1500 chips the table is of shortest routes, without virtual channels.

    Raises:
        InputError: the chip is not alive, or is cut off.
    """
    part = largest_part(mesh)
    if chip not in part.rank_of:
        raise InputError(
            f"a next-hop table needs a live chip that is not cut off from {mesh}, but got {chip}"
        )
    rank = part.rank_of[chip]
    channels = None
    if part.n_live <= _MOST_ALL_PAIRS:
        ports, channels = _deadlock_free(part, rank)
    else:
        ports = _shortest(part, rank)
    hops = _hops(part, rank)
    return {
        "chip": list(chip),
        "ports": _spread(part, ports),
        "hops": _spread(part, hops),
        "virtual_channels": None if channels is None else _spread(part, channels),
    }


def _deadlock_free(part: Mesh, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    tables = all_pairs_tables(part)
    channel = tables.virtual_channel.reshape(part.n_live, part.n_live)[:, rank].astype(np.int64)
    ports = np.stack(tables.ports)[channel, np.arange(part.n_live), rank]
    return ports.astype(np.int64), channel


def _shortest(part: Mesh, rank: int) -> NDArray[np.int64]:
    everyone = np.arange(part.n_live, dtype=np.int32)
    sources = np.full(part.n_live, rank, dtype=np.int32)
    demand = Demand(everyone, np.arange(part.n_live + 1, dtype=np.int64), sources)
    ports: NDArray[np.int64] = shortest_ports(part, demand)[:, rank].astype(np.int64)
    return ports


def _hops(part: Mesh, rank: int) -> NDArray[np.int64]:
    """Return the hops to every rank: as many as from there, because links go both ways."""
    here = np.array([rank])
    hops: NDArray[np.int64] = table_hops(part, here, next_ports(part, here))[0].astype(np.int64)
    return hops


def _spread(part: Mesh, values: NDArray[np.int64]) -> list[int]:
    """Return the values of ranks as a list over all chips of the shape, -1 for the others."""
    whole = np.full(part.shape, -1, dtype=np.int64)
    whole[tuple(part.coordinates.T)] = values
    spread: list[int] = whole.reshape(-1).tolist()
    return spread
