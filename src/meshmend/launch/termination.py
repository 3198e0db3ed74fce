"""A process that is asked to end does so in order, and soon even where it is deaf.

Python hears of a signal between two of its own instructions; one that waits in compiled code for
other chips may not get there. So it is given a moment, and then ended from another thread.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

from meshmend.errors import TerminatedError

TERMINATED: Final = 128 + signal.SIGTERM  # the exit code of a terminated process

_GRACE_S: Final = 2.0


@contextmanager
def terminable() -> Iterator[None]:
    """Raise TerminatedError in the body when SIGTERM comes."""
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def soon_over() -> Iterator[None]:
    """As `terminable`, but end the process if SIGTERM or SIGINT is not heeded in two seconds.

    Where the body handles such a signal itself, that is its own business; so are the processes
    that it forks.
    """
    heard, tells = os.pipe()
    os.set_blocking(tells, False)
    over = threading.Event()
    with terminable():
        before = signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
        watch = threading.Thread(target=_watch, args=(heard, over), daemon=True)
        watch.start()
        os.register_at_fork(after_in_child=lambda: None if over.is_set() else _be_a_child())
        try:
            yield
        finally:
            over.set()
            signal.set_wakeup_fd(before)
            os.close(tells)
            watch.join()
            os.close(heard)


def _watch(heard: int, over: threading.Event) -> None:
    """End the process some time after a signal that nobody else handles, unless it is over."""
    ours = {signal.SIGTERM: _raise_terminated, signal.SIGINT: signal.default_int_handler}
    while number := os.read(heard, 1):
        asked = signal.Signals(number[0])
        if asked in ours and signal.getsignal(asked) is ours[asked] and not over.wait(_GRACE_S):
            os._exit(128 + asked)


def _be_a_child() -> None:
    with suppress(ValueError):  # forked by a thread that is not the main one
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise TerminatedError
