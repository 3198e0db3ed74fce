"""The packing number of a mesh: how many spanning trees its links carry at the same time.

A fractional packing gives each spanning tree a weight so that the trees on any one link weigh one
or less together. The packing number is the largest possible weight of all trees. It is also the
least (cut links) / (parts - 1) over all partitions of the chips, so a packing bounds it from below
and a partition from above. Knows no bytes and no seconds: `limit` turns it into time.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import TopologyError
from meshmend.simulator.packing_exact import binding_partition
from meshmend.simulator.packing_trees import bracketing_partition, quotient
from meshmend.topology.failures import Chip
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh

EXACT_CHIPS = 1 << 14  # 128x128 takes seconds; time grows with the square of the chips
_SMALL_CHIPS = 1 << 10  # up to here a poor first guess costs less than many trees
_SEED = 0


@dataclass(frozen=True, eq=False)
class PackingNumber:
    """A bracket of a mesh's packing number and the partition that proves its upper end.

    `part_of[rank]` numbers the parts from 0 on. One chip needs no link: then there is one part,
    and both ends are infinite.
    """

    mesh: Mesh
    lower: float
    part_of: NDArray[np.int32]

    def __post_init__(self) -> None:
        if len(self.part_of) != self.mesh.n_live:
            raise TopologyError(
                f"PackingNumber needs a part for each of {self.mesh.n_live} live chips, but got "
                f"{len(self.part_of)}"
            )
        assert self.lower <= self.upper, "a packing beats a cut"
        self.part_of.flags.writeable = False

    @cached_property
    def upper(self) -> float:
        """The quotient (cut links) / (parts - 1) of the partition."""
        return float(quotient(self.part_of, self.mesh.links)) if self.n_parts > 1 else np.inf

    @property
    def exact(self) -> bool:
        """Whether both ends of the bracket are one number."""
        return self.lower == self.upper

    @cached_property
    def n_parts(self) -> int:
        """How many parts the partition has."""
        return int(self.part_of.max()) + 1

    @cached_property
    def cut_links(self) -> NDArray[np.int32]:
        """The links between parts, as pairs of ranks: the bottleneck."""
        ends = self.part_of[self.mesh.links]
        cut: NDArray[np.int32] = self.mesh.links[ends[:, 0] != ends[:, 1]]
        return cut

    def describe(self) -> str:
        """Return in words which links bind: `the 2 links of corner (0, 0)`."""
        n_cut, n_live = len(self.cut_links), self.mesh.n_live
        if self.n_parts == 1:
            return "no link: there is one chip"
        if self.n_parts == n_live:
            return f"all {n_cut} links over {n_live} chips" if n_live > 2 else "the only link"
        sizes = np.bincount(self.part_of)
        apart = self.mesh.coordinates[self.part_of != sizes.argmax()]
        links = f"the {n_cut} links" if n_cut > 1 else "the only link"
        if len(apart) == 1:
            return f"{links} of {self._chip_in_words(tuple(apart[0].tolist()))}"
        if n_cut == self.n_parts - 1 > 1:
            return f"{n_cut} links that have no way around, between {self.n_parts} parts"
        box = f"{_chip(apart.min(axis=0))} to {_chip(apart.max(axis=0))}"
        if self.n_parts == 2:
            return f"{links} around {len(apart)} chips from {box}"
        if len(apart) == self.n_parts - 1:
            return f"{links} that touch {len(apart)} chips from {box}"
        return f"{links} between {self.n_parts} parts, the largest of {sizes.max()} chips"

    def _chip_in_words(self, chip: Chip) -> str:
        axes = zip(chip, self.mesh.shape, self.mesh.wrap, strict=True)
        is_corner = len(chip) > 1 and all(
            at in {0, size - 1} and not wraps for at, size, wraps in axes
        )
        return f"{'corner' if is_corner else 'chip'} {chip}"


def packing_number(mesh: Mesh) -> PackingNumber:
    """Return the packing number of a connected mesh, exact up to `EXACT_CHIPS` live chips.

    For more chips it is the bracket of `packing_bracket`.

    Raises:
        TopologyError: the live chips are not connected.
    """
    return exact_packing_number(mesh) if mesh.n_live <= EXACT_CHIPS else packing_bracket(mesh)


@lru_cache(maxsize=64)
def exact_packing_number(mesh: Mesh) -> PackingNumber:
    """Return the packing number of a connected mesh, of any size, with both ends equal.

    The time grows with the square of the chips: 32x32 in milliseconds, 128x128 in seconds.

    Raises:
        TopologyError: the live chips are not connected.
    """
    is_small = mesh.n_live <= _SMALL_CHIPS
    start = packing_bracket(mesh, n_trees=32) if is_small else packing_bracket(mesh)
    if start.n_parts == 1:
        return start
    part_of, _ = binding_partition(mesh, start.part_of)
    return PackingNumber(mesh, float(quotient(part_of, mesh.links)), part_of)


@lru_cache(maxsize=64)
def packing_bracket(mesh: Mesh, *, n_trees: int = 256) -> PackingNumber:
    """Return a bracket whose lower end `n_trees` trees reach, in time linear in links x trees.

    Twice the trees about halve the gap.

    Raises:
        TopologyError: the live chips are not connected, or `n_trees` is below one.
    """
    if n_trees < 1:
        raise TopologyError(f"packing_bracket needs at least one tree, but got {n_trees}")
    if not mesh_figures(mesh).is_connected:
        raise TopologyError(
            f"the packing number needs connected chips, but {mesh} has chips cut off; "
            "take largest_part(mesh) first"
        )
    if mesh.n_live == 1:
        return PackingNumber(mesh, np.inf, np.zeros(1, dtype=np.int32))
    lower, part_of = bracketing_partition(mesh.links, mesh.n_live, n_trees=n_trees, seed=_SEED)
    return PackingNumber(mesh, lower, part_of)


def _chip(coordinates: NDArray[np.int64]) -> Chip:
    return tuple(coordinates.tolist())
