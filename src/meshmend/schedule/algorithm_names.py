"""The names of the algorithms, without their builders: quick to import for the command line."""

from collections.abc import Iterable

from meshmend.errors import InputError

SUM_NAMES = (
    *("trees", "ring-1d", "two-d", "row-pair", "ft-two-d", "rings-nd"),
    *("exchange", "exchange-1", "exchange-2", "direct", "flood"),
    *("express", "two-roots", "rank-ring"),
)
ALGORITHM_NAMES = (*SUM_NAMES, "pairs", "relays")  # the last two are for an all-to-all
BASELINE_NAMES = ("sub-mesh", "drop-lines")  # run on an intact part of a broken mesh


def check_algorithm_name(name: str, known: Iterable[str] = ALGORITHM_NAMES) -> None:
    """Raise InputError unless the name is one of the known ones; the message lists them."""
    if name not in known:
        raise InputError(f"there is no algorithm {name!r}; choose one of {', '.join(known)}")
