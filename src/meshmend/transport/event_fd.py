"""Event descriptors: how one thread wakes another that waits in a selector."""

import os
import weakref


def event_of(owner: object) -> int:
    """Return a new event descriptor, which is closed when its owner is gone.

    Not when it is closed: any thread may set the event of an owner that another one closes.
    """
    event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    weakref.finalize(owner, os.close, event_fd).atexit = False
    return event_fd


def is_set(event_fd: int) -> bool:
    """Whether an event descriptor is set; it stays set."""
    try:
        value = os.eventfd_read(event_fd)
    except BlockingIOError:
        return False
    os.eventfd_write(event_fd, value)
    return True


def clear(event_fd: int) -> None:
    """Clear an event descriptor, whether it is set or not."""
    try:
        os.eventfd_read(event_fd)
    except BlockingIOError:
        return
