"""Ports of this machine."""

import itertools
import os
import socket
from contextlib import suppress

# Below those that the kernel gives to callers: else one of them may have the port by the time that
# a test listens on it. Each process of tests begins elsewhere.
_LAST = 32_000
_PORTS = itertools.count(20_000 + os.getpid() * 37 % (_LAST - 20_000))


def free_port() -> int:
    """Return a port of loopback on which nobody listens and that was not returned before."""
    for number in itertools.islice(_PORTS, _LAST):
        port = 20_000 + (number - 20_000) % (_LAST - 20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("all ports below those of callers are taken")
