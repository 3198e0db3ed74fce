"""SIGTERM ends what it should end, wherever Python happens to be."""

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from meshmend.errors import TerminatedError
from meshmend.launch.termination import terminable
from waiting import HANG_S


class Held:
    """Something that may be deleted."""


def terminate(*_: object) -> None:
    signal.raise_signal(signal.SIGTERM)


def in_a_weak_reference() -> None:
    held = Held()
    reference = weakref.ref(held, terminate)
    del held
    assert reference() is None


def in_the_garbage_collector() -> None:
    gc.callbacks.append(terminate)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(terminate)


@pytest.mark.parametrize("callback", [in_a_weak_reference, in_the_garbage_collector])
def test_a_signal_that_comes_in_a_callback_is_not_lost(callback: Callable[[], None]) -> None:
    """Python drops what is raised there."""

    def run() -> None:
        with terminable():
            callback()
            time.sleep(HANG_S)

    with pytest.raises(TerminatedError):
        run()


def test_a_signal_that_comes_while_a_lost_one_is_sent_again_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine the second one comes before the hook that sends it has ended."""
    start = threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        start(thread)
        time.sleep(0.1)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)

    def run() -> None:
        with terminable():
            in_a_weak_reference()
            time.sleep(HANG_S)

    with pytest.raises(TerminatedError):
        run()


def test_what_else_is_raised_in_a_callback_is_told_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: told.append(lost.exc_type))
    held = Held()

    def fail(_: object) -> None:
        raise ValueError("not ours")

    with terminable():
        reference = weakref.ref(held, fail)
        del held

    assert reference() is None
    assert told == [ValueError]
