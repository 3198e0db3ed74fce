"""Waiting for what must happen: tests wait for conditions, so they pass on a busy machine too."""

import time
from collections.abc import Callable

HANG_S = 300.0  # only a test that hangs takes so long


def until(
    is_so: Callable[[], object],
    *,
    timeout_s: float = HANG_S,
    why: Callable[[], str] = lambda: "it did not happen",
) -> None:
    """Wait until something is so; fail with the reason if it does not come about."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.01)
