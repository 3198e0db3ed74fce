"""Pairs of ranks as few permutations: no rank sends or receives twice in one of them.

Sources and destinations are the two sides of a bipartite graph, and a permutation is a matching.
By Koenig's theorem as many matchings are enough as the busiest rank has pairs on one side.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Pairs = tuple[tuple[int, int], ...]


def permutations_of(
    src: Sequence[int] | NDArray[np.integer], dst: Sequence[int] | NDArray[np.integer]
) -> tuple[Pairs, ...]:
    """Return the distinct pairs, each in exactly one of the fewest possible permutations.

    Colours the pairs one after another. Where the first free colour at the source is taken at the
    destination, the two colours are swapped along the path that alternates between them.
    """
    colours: tuple[dict[int, dict[int, int]], dict[int, dict[int, int]]] = ({}, {})
    for source, destination in zip(map(int, src), map(int, dst), strict=True):
        at_source = colours[0].setdefault(source, {})
        at_destination = colours[1].setdefault(destination, {})
        first, second = _free(at_source), _free(at_destination)
        if first != second:
            _swap_from(colours, destination, first, second)
        at_source[first] = destination
        at_destination[first] = source
    found: dict[int, list[tuple[int, int]]] = {}
    for source, peers in colours[0].items():
        for colour, destination in peers.items():
            found.setdefault(colour, []).append((source, destination))
    return tuple(tuple(sorted(found[colour])) for colour in sorted(found))


def _free(taken: dict[int, int]) -> int:
    """Return the smallest colour that is not taken."""
    colour = 0
    while colour in taken:
        colour += 1
    return colour


def _swap_from(
    colours: tuple[dict[int, dict[int, int]], dict[int, dict[int, int]]],
    destination: int,
    first: int,
    second: int,
) -> None:
    """Swap two colours along the path that leaves a destination by the first of them.

    The path cannot end at the source to be joined, because that one has no pair of the first
    colour, and the path would enter it by the first.
    """
    side, rank, colour, other = 1, destination, first, second
    path = []
    while colour in colours[side][rank]:
        peer = colours[side][rank][colour]
        path.append((peer, rank, colour) if side else (rank, peer, colour))
        side, rank, colour, other = 1 - side, peer, other, colour
    for source, target, old in path:
        del colours[0][source][old], colours[1][target][old]
    for source, target, old in path:
        new = second if old == first else first
        colours[0][source][new] = target
        colours[1][target][new] = source
