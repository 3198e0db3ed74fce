"""Ends a process cleanly on SIGTERM, and within two seconds even if it is in compiled code.

SIGHUP, which comes when a terminal is closed, is the same. Then nobody reads what the process
prints, and to write there would fail. One that ignores SIGHUP, as under `nohup`, goes on to do so.

An exception of a signal handler is lost if Python runs the handler inside the callback of a weak
reference, of the garbage collector or of an object that is deleted. Then the signal is sent again.

Python runs signal handlers only between two of its own instructions. A process that waits for
other chips in compiled code may never reach the next one. So a second thread gives it two seconds
to end, and then exits the process.
"""

import errno
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
_is_ending = False  # it has been raised: a second signal does not interrupt what follows


@contextmanager
def terminable() -> Iterator[None]:
    """Raise TerminatedError in the `with` block when the process gets SIGTERM or SIGHUP.

    That is raised once: `timeout`, for one, sends a signal twice, and the second one would
    interrupt what the first one has begun, such as a checkpoint.
    """
    global _is_ending
    was_ending, _is_ending = _is_ending, False
    before = {number: signal.signal(number, _raise_terminated) for number in ending_signals()}
    told_before = sys.unraisablehook

    def tell(lost: "sys.UnraisableHookArgs") -> None:
        global _in_hook, _is_ending
        if lost.exc_type is TerminatedError:
            _in_hook, _is_ending = True, False
            threading.Thread(target=_send_again, daemon=True).start()
            _in_hook = False
        else:
            told_before(lost)

    sys.unraisablehook = tell
    try:
        yield
    finally:
        sys.unraisablehook = told_before
        for number, handler in before.items():
            signal.signal(number, handler)
        _is_ending = was_ending


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end this process: SIGTERM, and SIGHUP unless it is ignored."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if is_ignored else (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def unhurried() -> Iterator[None]:
    """Ignore SIGTERM, SIGHUP and Ctrl-C in the `with` block: it ends soon, and others wait for it.

    `timeout`, for one, sends a signal twice. Outside the main thread this does nothing.
    """
    before: dict[signal.Signals, Any] = {}
    with suppress(ValueError):  # Python sets signals only in the main thread
        for number in (*ending_signals(), signal.SIGINT):
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

    The signals are SIGTERM, SIGHUP and SIGINT. One for which the block has installed its own
    handler is left to that handler. Processes that the block forks are not affected.
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
    our_handlers = {
        signal.SIGTERM: _raise_terminated,
        signal.SIGHUP: _raise_terminated,
        signal.SIGINT: signal.default_int_handler,
    }
    while number := os.read(signal_reader, 1):
        received = signal.Signals(number[0])
        if (
            received in our_handlers
            and signal.getsignal(received) is our_handlers[received]
            and not over.wait(_GRACE_S)
        ):
            os._exit(128 + received if received is signal.SIGINT else TERMINATED)


def _reset_signals() -> None:
    with suppress(ValueError):  # Python sets signals only in the main thread
        signal.set_wakeup_fd(-1)
        for number in ending_signals():
            signal.signal(number, signal.SIG_DFL)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    global _is_ending
    if number == signal.SIGHUP:
        _forget_terminal()
    if not _in_hook and not _is_ending:
        _is_ending = True
        raise TerminatedError


def _forget_terminal() -> None:
    """Let what is printed go nowhere, where it went to a terminal that is gone."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
