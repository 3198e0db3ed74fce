"""Waiting for several sums in flight: for all of them, also if one fails."""

from collections.abc import Iterable

from meshmend.errors import TransportError
from meshmend.train.core.pending_sum import PendingSum


def first_error(pending: Iterable[PendingSum]) -> TransportError | None:
    """Wait for all sums; return the first error, which caused the others, or None.

    Afterwards no payload is touched any more.
    """
    errors = [error for each in pending if (error := _error_of(each)) is not None]
    return errors[0] if errors else None


def _error_of(pending: PendingSum) -> TransportError | None:
    try:
        pending.wait()
    except TransportError as error:
        return error
    return None
