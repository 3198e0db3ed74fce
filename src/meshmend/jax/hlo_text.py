"""Reads the text of an optimized HLO module: which permutes run, how often, and what they move.

Knows the few lines that it needs: permutes, loops, calls, and shapes. A permute in the body of a
loop counts as often as the loop runs, where XLA says so (`known_trip_count`).
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

from meshmend.errors import InputError

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
