"""SIGTERM ends what it should end, wherever Python happens to be."""

import gc
import os
import pty
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

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


def test_a_second_signal_does_not_interrupt_what_the_first_one_has_begun() -> None:
    """As between the first one and a checkpoint."""
    steps = []
    try:
        with terminable():
            try:
                terminate()
            except TerminatedError:
                terminate()
                signal.raise_signal(signal.SIGHUP)
                steps.append("saved")
                raise
    except TerminatedError:
        steps.append("ended")

    assert steps == ["saved", "ended"]


_IN_A_TERMINAL = """
import fcntl, sys, termios, time
from meshmend.errors import TerminatedError
from meshmend.launch.termination import terminable

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
try:
    with terminable():
        print("ready", flush=True)
        time.sleep(600)
except TerminatedError:
    print("saving", flush=True)
    print("saving", file=sys.stderr, flush=True)
    open(sys.argv[1], "w").write("saved")
"""


def test_a_process_whose_terminal_is_closed_ends_cleanly_and_may_still_print(
    tmp_path: Path,
) -> None:
    ours, its = pty.openpty()
    command = [sys.executable, "-c", _IN_A_TERMINAL, str(tmp_path / "saved")]
    with subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, start_new_session=True
    ) as process:
        os.close(its)
        assert b"ready" in os.read(ours, 100)
        os.close(ours)

        assert process.wait(HANG_S) == 0
    assert (tmp_path / "saved").read_text() == "saved"


def test_a_process_that_ignores_a_closed_terminal_goes_on_to_do_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminable():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


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
