"""The algorithms by name: what each needs, what it gives, and its builder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from meshmend.errors import UnsupportedError
from meshmend.schedule.algorithm_names import check_algorithm_name
from meshmend.schedule.all_to_all import check_relays, pairs, relays
from meshmend.schedule.regions import MOST_CHIPS, check_regions, regions
from meshmend.schedule.ring_builders import ft_two_d, rank_ring, ring_1d, row_pair, two_d
from meshmend.schedule.rings_nd import check_exchange, exchange_nd, rings_nd
from meshmend.schedule.table import SUMS, Collective, Schedule, renamed
from meshmend.schedule.trees import express, trees, two_roots
from meshmend.schedule.whole_sums import check_whole_sums, direct, flood
from meshmend.topology.mesh import Mesh
from meshmend.topology.symmetry import stand_in
from meshmend.trees.rings import (
    fault_tolerant_layout,
    hamiltonian_ring,
    line_rings,
    row_pair_layout,
)
from meshmend.trees.slit import likely_slits

Builder = Callable[[Mesh, Collective], Schedule]
_ALLREDUCE = (Collective.ALLREDUCE,)
_ALL_TO_ALL = (Collective.ALL_TO_ALL,)
Check = Callable[[Mesh], object]  # raises UnsupportedError, cheaply


@dataclass(frozen=True)
class Algorithm:
    """A named way to build a schedule; `needs` and `gives` are sentences for users.

    For a mesh that the algorithm does not support, `check` raises the same as `build`, but quickly.
    It is built `on_stand_in` of the mesh, so that images of a mesh take equally long; the paper's
    algorithms tell rows from columns, and are built on the mesh as it is.
    """

    name: str
    builder: Builder
    check: Check
    figures: str
    needs: str
    gives: str
    collectives: tuple[Collective, ...] = SUMS
    on_stand_in: bool = True

    def build(self, mesh: Mesh, collective: Collective) -> Schedule:
        """Return the schedule of a collective on a connected mesh.

        Raises:
            UnsupportedError: the algorithm does not support the mesh, or the collective.
        """
        self.check_collective(collective)
        if not self.on_stand_in:
            return self.builder(mesh, collective)
        self.check(mesh)
        like = stand_in(mesh)
        return renamed(self.builder(like.mesh, collective), like.ranks)

    def check_collective(self, collective: Collective) -> None:
        """Raise UnsupportedError if the algorithm does not have this collective."""
        if collective not in self.collectives:
            raise UnsupportedError(
                f"{self.name} is an {self.collectives[0]}, but got the collective {collective}"
            )


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        algorithm.name: algorithm
        for algorithm in (
            Algorithm(
                "trees",
                trees,
                lambda mesh: None,
                "",
                "any connected mesh or torus, any failures",
                "reduces up and broadcasts down many spanning trees at once: near the limit",
            ),
            Algorithm(
                "ring-1d",
                ring_1d,
                hamiltonian_ring,
                "3, 8",
                "2-D; one even side, or even sides and holes of whole aligned 2x2 blocks",
                "every hop a neighbour; bandwidth near D/B; latency grows with the chips",
                on_stand_in=False,
            ),
            Algorithm(
                "two-d",
                two_d,
                lambda mesh: line_rings(mesh, 0),
                "4, 5",
                "2-D; no failed chips, any sides",
                "latency grows with the sides; rows and columns share links",
                on_stand_in=False,
            ),
            Algorithm(
                "row-pair",
                row_pair,
                row_pair_layout,
                "6, 7",
                "2-D; no failed chips, one even side",
                "latency grows with the sides; no link shared in the large phase",
                on_stand_in=False,
            ),
            Algorithm(
                "ft-two-d",
                ft_two_d,
                fault_tolerant_layout,
                "9, 10",
                "2-D; even sides and holes of whole aligned 2x2 blocks that leave one pair of "
                "rows or columns whole",
                "row-pair around holes: the paper's fault-tolerant scheme",
                on_stand_in=False,
            ),
            Algorithm(
                "rings-nd",
                rings_nd,
                lambda mesh: None,
                "",
                "any connected mesh or torus of any number of axes, any failures",
                "sums along one axis after another, all axes at once: near the limit on tori for "
                "payloads of a few megabytes and more",
            ),
            Algorithm(
                "exchange",
                partial(exchange_nd, n_scattered=0),
                partial(check_exchange, n_scattered=0),
                "",
                "any connected mesh or torus, any failures; sides of at most 255 chips together",
                "all chips of a line send each other their sums, axis after axis: as few hops as "
                "there can be, for payloads of some kilobytes",
                _ALLREDUCE,
            ),
            Algorithm(
                "exchange-1",
                partial(exchange_nd, n_scattered=1),
                partial(check_exchange, n_scattered=1),
                "",
                "two axes or more, any failures; sides of at most 255 chips together",
                "rings-nd along one axis, exchange along the others: for payloads up to a few "
                "hundred kilobytes, on tori a few megabytes",
                _ALLREDUCE,
            ),
            Algorithm(
                "exchange-2",
                partial(exchange_nd, n_scattered=2),
                partial(check_exchange, n_scattered=2),
                "",
                "three axes or more, any failures; sides of at most 255 chips together",
                "rings-nd along two axes, exchange along the others: for payloads up to a few "
                "megabytes on 3-D tori",
                _ALLREDUCE,
            ),
            Algorithm(
                "direct",
                direct,
                partial(check_whole_sums, name="direct"),
                "",
                "any connected mesh or torus of at most 255 chips, any failures",
                "every chip sends its payload straight to every other: meets the limit for some "
                "bytes on few chips",
                _ALLREDUCE,
            ),
            Algorithm(
                "flood",
                flood,
                partial(check_whole_sums, name="flood"),
                "",
                "any connected mesh or torus of at most 255 chips, any failures",
                "every chip hands the payloads of all on to its neighbours: for some kilobytes on "
                "few chips around large holes",
                _ALLREDUCE,
            ),
            *(
                Algorithm(
                    f"regions-{n}",
                    partial(regions, n_regions=n),
                    partial(check_regions, n_regions=n),
                    "",
                    f"any connected mesh or torus of {2 * n} to {MOST_CHIPS} chips, any failures",
                    f"{number} regions sum, and every chip gets the sum of each: for payloads that "
                    f"take {as_long} as their hops on broken tori",
                    _ALLREDUCE,
                )
                for n, number, as_long in (
                    (2, "two", "as long"),
                    (4, "four", "about a third as long"),
                    (8, "eight", "about a sixth as long"),
                )
            ),
            Algorithm(
                "express",
                express,
                lambda mesh: None,
                "",
                "any connected mesh or torus, any failures",
                "a tree for each axis whose messages pass chips without stopping: for payloads up "
                "to some hundred kilobytes on meshes",
                _ALLREDUCE,
            ),
            Algorithm(
                "two-roots",
                two_roots,
                likely_slits,
                "",
                "2-D without wrap-around; a straight cut that leaves two connected sides",
                "each side of the cut sums on its own, and the sums meet at both ends of its slit: "
                "for payloads of about a megabyte",
                _ALLREDUCE,
            ),
            Algorithm(
                "rank-ring",
                rank_ring,
                lambda mesh: None,
                "",
                "any connected mesh or torus, any failures",
                "a ring in rank order, blind to the mesh: what a topology-blind library does",
                on_stand_in=False,
            ),
            Algorithm(
                "pairs",
                pairs,
                lambda mesh: None,
                "",
                "any connected mesh or torus, any failures; all-to-all only",
                "every chip sends each other its block straight: what most libraries do",
                _ALL_TO_ALL,
                on_stand_in=False,
            ),
            Algorithm(
                "relays",
                relays,
                check_relays,
                "",
                "any connected mesh or torus of at most 1024 chips, any failures; all-to-all only",
                "blocks whose straight way is busy stop at a chip beside it, so that all links "
                "carry alike around holes",
                _ALL_TO_ALL,
                on_stand_in=False,
            ),
        )
    }
)


def algorithm(name: str) -> Algorithm:
    """Return the algorithm of this name.

    Raises:
        InputError: there is no such algorithm; the message lists all.
    """
    check_algorithm_name(name)
    return ALGORITHMS[name]
