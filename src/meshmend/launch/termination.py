"""Ends a process cleanly on SIGTERM, and within two seconds even if it is in compiled code.

An exception of a signal handler is lost if Python runs the handler inside the callback of a weak
reference, of the garbage collector or of an object that is deleted. Then the signal is sent again.

Python runs signal handlers only between two of its own instructions. A process that waits for
other chips in compiled code may never reach the next one. So a second thread gives it two seconds
to end, and then exits the process.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

from meshmend.errors import TerminatedError

TERMINATED: Final = 128 + signal.SIGTERM  # the exit code of a terminated process

_GRACE_S: Final = 2.0
_AGAIN_S: Final = 0.01  # by then the callback is over

_in_hook = False  # the main thread is about to send the signal again


@contextmanager
def terminable() -> Iterator[None]:
    """Raise TerminatedError in the `with` block when the process gets SIGTERM."""
    before, told_before = signal.signal(signal.SIGTERM, _raise_terminated), sys.unraisablehook

    def tell(lost: "sys.UnraisableHookArgs") -> None:
        global _in_hook
        if lost.exc_type is TerminatedError:
            _in_hook = True
            threading.Thread(target=_send_again, daemon=True).start()
            _in_hook = False
        else:
            told_before(lost)

    sys.unraisablehook = tell
    try:
        yield
    finally:
        sys.unraisablehook = told_before
        signal.signal(signal.SIGTERM, before)


@contextmanager
def unhurried() -> Iterator[None]:
    """Ignore SIGTERM and Ctrl-C in the `with` block: it ends soon, and others wait for its end.

    `timeout`, for one, sends a signal twice. Outside the main thread this does nothing.
    """
    before: dict[signal.Signals, Any] = {}
    with suppress(ValueError):  # Python sets signals only in the main thread
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send_again() -> None:
    time.sleep(_AGAIN_S)
    while _in_hook:  # what is raised in the hook is lost for good
        time.sleep(_AGAIN_S)
    if signal.getsignal(signal.SIGTERM) is _raise_terminated:  # the block still runs
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def exit_soon_after_signal() -> Iterator[None]:
    """Do as `terminable`, and exit the process if the block runs on two seconds after a signal.

    The signals are SIGTERM and SIGINT. One for which the block has installed its own handler is
    left to that handler. Processes that the block forks are not affected.
    """
    signal_reader, signal_writer = os.pipe()
    os.set_blocking(signal_writer, False)
    over = threading.Event()
    with terminable():
        before = signal.set_wakeup_fd(signal_writer, warn_on_full_buffer=False)
        watch = threading.Thread(target=_exit_after_signal, args=(signal_reader, over), daemon=True)
        watch.start()
        os.register_at_fork(after_in_child=lambda: None if over.is_set() else _reset_signals())
        try:
            yield
        finally:
            over.set()
            signal.set_wakeup_fd(before)
            os.close(signal_writer)
            watch.join()
            os.close(signal_reader)


def _exit_after_signal(signal_reader: int, over: threading.Event) -> None:
    """Exit the process `_GRACE_S` after a signal with our handler, unless the block is over."""
    our_handlers = {signal.SIGTERM: _raise_terminated, signal.SIGINT: signal.default_int_handler}
    while number := os.read(signal_reader, 1):
        received = signal.Signals(number[0])
        if (
            received in our_handlers
            and signal.getsignal(received) is our_handlers[received]
            and not over.wait(_GRACE_S)
        ):
            os._exit(128 + received)


def _reset_signals() -> None:
    with suppress(ValueError):  # Python sets signals only in the main thread
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    if not _in_hook:
        raise TerminatedError
