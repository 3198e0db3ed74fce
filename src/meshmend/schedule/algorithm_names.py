"""The names of the algorithms, without their builders: quick to import for the command line."""

from collections.abc import Iterable

from meshmend.errors import InputError
from meshmend.topology.fabric import fabric as fabric_named

SUM_NAMES = (
    *("trees", "ring-1d", "two-d", "row-pair", "ft-two-d", "rings-nd"),
    *("exchange", "exchange-1", "exchange-2", "direct", "flood"),
    *("regions-2", "regions-4", "regions-8"),
    *("express", "two-roots", "rank-ring"),
)
ALGORITHM_NAMES = (*SUM_NAMES, "pairs", "relays")  # the last two are for an all-to-all
BASELINE_NAMES = ("sub-mesh", "drop-lines")  # run on an intact part of a broken mesh


def check_algorithm_name(name: str, known: Iterable[str] = ALGORITHM_NAMES) -> None:
    """Raise InputError unless the name is one of the known ones; the message lists them."""
    if name not in known:
        raise InputError(f"there is no algorithm {name!r}; choose one of {', '.join(known)}")


def check_fabric(fabric: str, algorithm: str) -> None:
    """Raise InputError unless a job may be given this fabric, if any: `auto` alone plans for it."""
    if not fabric:
        return
    fabric_named(fabric)
    if algorithm != "auto":
        raise InputError(
            f"a fabric is what 'auto' plans for, but got {algorithm!r}; leave out --fabric or "
            "--algorithm"
        )
