"""The algorithms by name: what each needs, what it gives, and who builds it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshmend.errors import InputError
from meshmend.schedule.ft_two_d import ft_two_d
from meshmend.schedule.ring_builders import rank_ring, ring_1d, row_pair, two_d
from meshmend.schedule.table import Collective, Schedule
from meshmend.topology.mesh import Mesh

Builder = Callable[[Mesh, Collective], Schedule]


@dataclass(frozen=True)
class Algorithm:
    """A named way to build a schedule; `needs` and `gives` are sentences for users."""

    name: str
    build: Builder
    figures: str
    needs: str
    gives: str


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        algorithm.name: algorithm
        for algorithm in (
            Algorithm(
                "ring-1d",
                ring_1d,
                "3, 8",
                "2-D; one even side, or even sides and holes of whole aligned 2x2 blocks",
                "every hop a neighbour; bandwidth near D/B; latency grows with the chips",
            ),
            Algorithm(
                "two-d",
                two_d,
                "4, 5",
                "2-D; no failed chips, any sides",
                "latency grows with the sides; rows and columns share links",
            ),
            Algorithm(
                "row-pair",
                row_pair,
                "6, 7",
                "2-D; no failed chips, one even side",
                "latency grows with the sides; no link shared in the large phase",
            ),
            Algorithm(
                "ft-two-d",
                ft_two_d,
                "9, 10",
                "2-D; even sides and holes of whole aligned 2x2 blocks that leave one pair of "
                "rows or columns whole",
                "row-pair around holes: the paper's fault-tolerant scheme",
            ),
            Algorithm(
                "rank-ring",
                rank_ring,
                "",
                "any connected mesh or torus, any failures",
                "a ring in rank order, blind to the mesh: what a topology-blind library does",
            ),
        )
    }
)


def algorithm(name: str) -> Algorithm:
    """Return the algorithm of this name.

    Raises:
        InputError: there is none; the message lists those there are.
    """
    if name not in ALGORITHMS:
        raise InputError(f"there is no algorithm {name!r}; choose one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]
