"""Calls of the C library for the event loop, callable from compiled code.

They are bound by name, so that compiled code that uses them can be cached on disk. The constants
and signatures are those of 64-bit Linux. Addresses are passed as integers.
"""

from typing import Any, Final

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]  # as its stubs have it

from meshmend.kernels import kernel

EAGAIN: Final = 11
EINTR: Final = 4
POLLIN: Final = 1
POLLOUT: Final = 4
_DONTWAIT: Final = 0x40
_DONTWAIT_NOSIGNAL: Final = 0x4040

_recv: Any = types.ExternalFunction(
    "recv", types.intp(types.int32, types.intp, types.uintp, types.int32)
)
_sendmsg: Any = types.ExternalFunction("sendmsg", types.intp(types.int32, types.intp, types.int32))
_poll: Any = types.ExternalFunction("poll", types.int32(types.intp, types.uintp, types.int32))
_read: Any = types.ExternalFunction("read", types.intp(types.int32, types.intp, types.uintp))
_write: Any = types.ExternalFunction("write", types.intp(types.int32, types.intp, types.uintp))
_memcpy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.uintp))
_pointer: Any = types.CPointer
_errno_location: Any = types.ExternalFunction("__errno_location", _pointer(types.int32)())


@kernel
def receive(fd, address, n_bytes):  # type: ignore[no-untyped-def]
    """Read without waiting; return the number of bytes, 0 at the end of the stream, or -errno."""
    result = _recv(np.int32(fd), address, np.uintp(n_bytes), np.int32(_DONTWAIT))
    return result if result >= 0 else -np.int64(carray(_errno_location(), 1)[0])


@kernel
def send_two(fd, message, parts):  # type: ignore[no-untyped-def]
    """Send two parts without waiting; return the number of bytes sent, or -errno.

    `parts` is (address, length) twice; `message` is scratch of seven words (a struct msghdr).
    """
    message[:] = 0
    message[2] = parts.ctypes.data
    message[3] = 2
    result = _sendmsg(np.int32(fd), message.ctypes.data, np.int32(_DONTWAIT_NOSIGNAL))
    return result if result >= 0 else -np.int64(carray(_errno_location(), 1)[0])


@kernel
def wait(waits, timeout_ms):  # type: ignore[no-untyped-def]
    """Wait until a file descriptor is ready; each line of `waits` is (descriptor, events).

    Returns what poll returns. The events that happened are in the upper half of the second word.
    """
    return _poll(waits.ctypes.data, np.uintp(len(waits)), np.int32(timeout_ms))


@kernel
def copy_memory(target, source, n_bytes):  # type: ignore[no-untyped-def]
    """Copy bytes from one address to another; the two do not overlap."""
    _memcpy(target, source, np.uintp(n_bytes))


@kernel
def read_event(fd, word):  # type: ignore[no-untyped-def]
    """Clear an event descriptor; `word` is the address of eight bytes of scratch."""
    _read(np.int32(fd), word, np.uintp(8))


@kernel
def write_event(fd, word):  # type: ignore[no-untyped-def]
    """Add to an event descriptor the number at the address `word`."""
    _write(np.int32(fd), word, np.uintp(8))
