"""A forked process holds no connection of its parent."""

import os
import socket

from meshmend.transport.handshake import close_in_forks


def test_the_other_end_sees_a_close_although_a_fork_lives() -> None:
    ours, theirs = socket.socketpair()
    close_in_forks(ours)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the test is over
        os._exit(0)

    ours.close()
    theirs.settimeout(60)
    try:
        assert theirs.recv(1) == b""
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)
        theirs.close()
