"""Event descriptors: how one thread wakes another that waits in a selector."""

import os


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
