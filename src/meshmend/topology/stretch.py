"""How much longer routes are than the shortest live path."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import Routes
from meshmend.topology.tables import Demand, demand_of, shortest_ports, table_hops
from meshmend.topology.virtual_channels import RoutingTables


@dataclass(frozen=True)
class Stretch:
    """Hops divided by those of a shortest live path: the mean over all pairs, and the worst."""

    mean: float
    max: float


def stretch_of(mesh: Mesh, routes: Routes) -> Stretch:
    """Return the stretch of routes; without pairs it is 1."""
    by_goal = np.argsort(routes.dst, kind="stable")
    demand = demand_of(routes.src[by_goal], routes.dst[by_goal])
    return _stretch(routes.hops[by_goal], _shortest_hops(mesh, demand))


def table_stretch(mesh: Mesh, tables: RoutingTables) -> Stretch:
    """Return the stretch of the tables' routes from each source of their demand."""
    demand, shortest = tables.demand, _shortest_hops(mesh, tables.demand)
    hops = np.empty_like(shortest)
    for number, ports in enumerate(tables.ports):
        uses_it = tables.virtual_channel == number
        table = table_hops(mesh, demand.destinations, ports)
        hops[uses_it] = table[demand.rows[uses_it], demand.sources[uses_it]]
    return _stretch(hops[shortest > 0], shortest[shortest > 0])


def _shortest_hops(mesh: Mesh, demand: Demand) -> NDArray[np.int32]:
    hops = table_hops(mesh, demand.destinations, shortest_ports(mesh, demand))
    return hops[demand.rows, demand.sources]


def _stretch(hops: NDArray[np.integer], shortest: NDArray[np.integer]) -> Stretch:
    if not hops.size:
        return Stretch(1.0, 1.0)
    ratio = hops / shortest
    return Stretch(float(ratio.mean()), float(ratio.max()))
