"""Cables for plans on Wormhole chips that no machine has to have, and tables that are wrong."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.plan import Plan
from meshmend.wormhole.compiler import Wiring
from meshmend.wormhole.table import N_CHANNELS, Core, Program


def wired(
    plan: Plan, n_cables: int = 4, lost: frozenset[tuple[int, int, int]] = frozenset()
) -> Wiring:
    """Return so many cables for each link, or fewer if a chip has not so many channels.

    `lost` has cables that are dead: the ranks at their ends, the smaller one first, and the number.
    """
    neighbors = plan.placement.mesh.neighbor_ranks
    at_port = N_CHANNELS // neighbors.shape[1]
    return Wiring(
        {
            (rank, port): tuple(
                (at_port * port + number, at_port * (port ^ 1) + number)
                for number in range(min(n_cables, at_port))
                if (*sorted((rank, int(neighbors[rank, port]))), number) not in lost
            )
            for rank in range(len(neighbors))
            for port in range(neighbors.shape[1])
            if neighbors[rank, port] >= 0
        }
    )


def with_table(program: Program, core: Core, moves: NDArray[np.uint32]) -> Program:
    """Return a program in which one core has another table."""
    return replace(program, moves={**program.moves, core: moves})
