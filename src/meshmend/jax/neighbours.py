"""A static proof on a compiled program: its permutes follow the links of the mesh.

Reads the optimized HLO, the text of what XLA made of a program after all its passes. Partition p of
that text is the p-th device of the JAX mesh, so with `device_mesh` it is rank p, or its cores one
after another. Knows nothing of plans: it proves what was compiled, not what was meant.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from meshmend.errors import InputError, VerificationError
from meshmend.jax.hlo_text import Permute, other_collectives, partitions_of, permutes_of
from meshmend.topology.failures import Chip
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import routes_for

DirectedLink = tuple[Chip, Chip]


@dataclass(frozen=True, eq=False)
class LinkUse:
    """What the permutes of a compiled program move over the links of a mesh.

    `n_permutes` counts each permute as often as its loop runs. `routed` are the pairs of chips that
    are not neighbours, with their hops; a program of neighbours has none. `bytes_per_link` holds
    every directed link that carries anything, over shortest routes. `other_collectives` counts
    collectives that are no permutes, such as an all-reduce, whose links only XLA knows.
    """

    n_permutes: int
    routed: Mapping[DirectedLink, int]
    bytes_per_link: Mapping[DirectedLink, float]
    other_collectives: Mapping[str, int]
    are_counts_known: bool  # False: a loop's count is not in the text, and it counted as one round

    def __repr__(self) -> str:
        most = max(self.bytes_per_link.values(), default=0.0)
        return (
            f"<LinkUse: {self.n_permutes} permutes over {len(self.bytes_per_link)} links, "
            f"{len(self.routed)} pairs routed, at most {most:,.0f} bytes a link>"
        )


def check_neighbours(compiled: Any, mesh: Mesh, *, allow_routed: bool = False) -> LinkUse:
    """Prove that every permute of a compiled program joins chips that a live link joins.

    `compiled` is what `jit(f).lower(...).compile()` returned, or its text. With `allow_routed`
    other pairs are listed in the result with their hops, instead of refused.

    Raises:
        VerificationError: a pair is not a link, or names a device that is on no live chip.
        InputError: the program runs on a number of devices that does not fit the mesh.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    part = largest_part(mesh)
    n_partitions = partitions_of(text)
    if n_partitions % part.n_live:
        raise InputError(
            f"check_neighbours on {mesh} needs a program for {part.n_live} devices, or as many "
            f"times the cores of a chip, but got one for {n_partitions}"
        )
    permutes = permutes_of(text)
    bytes_of_pairs = _bytes_of_pairs(permutes, n_partitions // part.n_live, part)
    routed, loads = _laid_over(part, bytes_of_pairs)
    if routed and not allow_routed:
        shown = ", ".join(
            f"{src} to {dst} ({hops} hops)" for (src, dst), hops in list(routed.items())[:3]
        )
        more = f" and {len(routed) - 3} more" if len(routed) > 3 else ""
        raise VerificationError(
            f"check_neighbours needs permutes between neighbours on {mesh}, but the program sends "
            f"from {shown}{more}; if the plan routes them, as 'ft-two-d' does, pass "
            "allow_routed=True"
        )
    return LinkUse(
        n_permutes=sum(permute.times for permute in permutes),
        routed=routed,
        bytes_per_link=loads,
        other_collectives=other_collectives(text),
        are_counts_known=all(permute.is_count_known for permute in permutes),
    )


def _bytes_of_pairs(
    permutes: list[Permute], cores_per_chip: int, part: Mesh
) -> Counter[tuple[int, int]]:
    """Return the bytes that each pair of ranks moves; cores of one chip need no link."""
    found: Counter[tuple[int, int]] = Counter()
    for permute in permutes:
        for source, target in permute.pairs:
            pair = source // cores_per_chip, target // cores_per_chip
            if max(pair) >= part.n_live:
                raise VerificationError(
                    f"check_neighbours needs pairs of the {part.n_live} live chips of {part}, but "
                    f"{permute.name} joins devices {source} and {target}"
                )
            if pair[0] != pair[1]:
                found[pair] += permute.n_bytes * permute.times
    return found


def _laid_over(
    part: Mesh, bytes_of_pairs: Counter[tuple[int, int]]
) -> tuple[dict[DirectedLink, int], dict[DirectedLink, float]]:
    """Return the pairs of several hops, and what each directed link carries."""
    if not bytes_of_pairs:
        return {}, {}
    src, dst = np.array(sorted(bytes_of_pairs), dtype=np.int64).T
    routes = routes_for(part, src, dst)
    routed, loads = {}, Counter[DirectedLink]()
    for source, target in sorted(bytes_of_pairs):
        path = routes.path(part, source, target)
        if len(path) > 2:
            routed[path[0], path[-1]] = len(path) - 1
        for hop in pairwise(path):
            loads[hop] += bytes_of_pairs[source, target]
    return routed, {link: float(count) for link, count in loads.items()}
