"""A static proof on a compiled program: its permutes follow the links of the mesh.

Reads the optimized HLO, the text of what XLA made of a program after all its passes; a permute in
the body of a loop counts as often as the loop runs, where XLA says so. Partition p of that text is
the p-th device of the JAX mesh, so with `device_mesh` it is rank p, or its cores one after another.
Knows nothing of plans: it proves what was compiled, not what was meant.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from meshmend.errors import InputError, VerificationError
from meshmend.topology.failures import Chip
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import routes_for
from meshmend.units import some

_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_PERMUTE: Final = re.compile(
    r"^\s*(?:ROOT )?%?(\S+) = (.*?) collective-permute(-start)?\("
    r".*source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}"
)
_WRITTEN: Final = re.compile(r" collective-permute(?:-start)?\(")
_CALL: Final = re.compile(
    r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES: Final = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIP_COUNT: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_PAIR: Final = re.compile(r"\{(\d+),(\d+)\}")
_ARRAY: Final = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_OTHER: Final = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-broadcast|ragged-all-to-all)"
    r"(?:-start)?\("
)
_BITS: Final = {"pred": 8, "c64": 64, "c128": 128}


@dataclass(frozen=True)
class Permute:
    """One permute of a program: its pairs, what each of them moves, and how often it runs."""

    name: str
    pairs: tuple[tuple[int, int], ...]
    n_bytes: int
    times: int
    is_count_known: bool


def partitions_of(text: str) -> int:
    """Return on how many devices a module runs.

    Raises:
        InputError: the text is not an optimized HLO module.
    """
    if not text.startswith("HloModule"):
        raise InputError(
            "check_neighbours needs a compiled program or the text of its optimized HLO, but got "
            f"{text[:40]!r}; pass jax.jit(f).lower(...).compile()"
        )
    header = text.partition("\n")[0]
    found = [re.search(rf"{name}=(\d+)", header) for name in ("num_partitions", "replica_count")]
    return math.prod(int(match[1]) for match in found if match)


def permutes_of(text: str) -> list[Permute]:
    """Return the permutes that a module runs, those of loops with the rounds of the loop.

    Raises:
        InputError: a permute is in the text that this reader does not understand.
    """
    bodies, entry = _computations(text)
    found: list[Permute] = []
    waiting = [(entry, 1, True)]
    while waiting:
        name, times, is_known = waiting.pop()
        for line in bodies.get(name, ()):
            if permute := _permute(line, times, is_known):
                found.append(permute)
                continue
            trips = _TRIP_COUNT.search(line)
            is_loop = " while(" in line
            inner = times * int(trips[1]) if is_loop and trips else times
            known = is_known and (trips is not None or not is_loop)
            waiting += [(callee, inner, known) for callee in _callees(line)]
    n_written, n_read = len(_WRITTEN.findall(text)), len({permute.name for permute in found})
    if n_written != n_read:
        raise InputError(
            f"check_neighbours needs HLO as jaxlib 0.10 writes it, but read {n_read} of "
            f"{n_written} permutes; report this text"
        )
    return found


def other_collectives(text: str) -> dict[str, int]:
    """Return how many collectives of each kind but permutes stand in a module."""
    return dict(Counter(match[1] for match in _OTHER.finditer(text)))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation, and the name of the one that runs first."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            bodies[name] = []
            entry = name if match[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _callees(line: str) -> list[str]:
    branches = _BRANCHES.search(line)
    listed = branches[1].replace("%", "").replace(" ", "").split(",") if branches else []
    return [*_CALL.findall(line), *listed]


def _permute(line: str, times: int, is_known: bool) -> Permute | None:
    match = _PERMUTE.match(line)
    if match is None:
        return None
    pairs = tuple((int(a), int(b)) for a, b in _PAIR.findall(match[4]))
    arrays = _ARRAY.findall(match[2])
    if match[3]:
        # A start returns what it sends, what it receives, and two numbers of its own.
        arrays = [array for array in arrays if array != ("u32", "")]
    n_bytes = sum(_bytes(*array) for array in arrays) // (2 if match[3] else 1)
    return Permute(match[1], pairs, n_bytes, times, is_known)


def _bytes(dtype: str, extents: str) -> int:
    bits = re.search(r"\d+", dtype)
    n_elements = 1
    for extent in filter(None, extents.split(",")):
        n_elements *= int(extent)
    return n_elements * (_BITS.get(dtype) or (int(bits[0]) if bits else 8)) // 8


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
        ways = [f"{src} to {dst} ({hops} hops)" for (src, dst), hops in routed.items()]
        raise VerificationError(
            f"check_neighbours needs permutes between neighbours on {mesh}, but the program sends "
            f"from {some(ways, 3)}; if the plan routes them, as 'ft-two-d' does, pass "
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
