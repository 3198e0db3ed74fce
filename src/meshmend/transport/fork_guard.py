"""Keeps the connections of a process out of the processes that it forks.

A forked process inherits every connection. As long as it lives, the other end does not see that
this process closed one, or died. So every fork, such as a loader worker of PyTorch, closes its
copies at once. Listening sockets are inherited: a coordinator is forked with one.
"""

import os
import socket
from weakref import WeakSet

_connections: "WeakSet[socket.socket]" = WeakSet()


def close_in_forks(connection: socket.socket) -> None:
    """Close this connection in every process that this process forks from now on."""
    _connections.add(connection)


def _close_all() -> None:
    for connection in list(_connections):
        connection.close()
    _connections.clear()


os.register_at_fork(after_in_child=_close_all)
