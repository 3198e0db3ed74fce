"""How a rank that gives up tells its peers why, over the connections that carry the data."""

import select
import socket
import time
from collections.abc import Mapping
from typing import Final

import numpy as np

from meshmend.transport import frames
from meshmend.transport.checksum import header_checksum
from meshmend.transport.rank_program import Numbers

_REPORT_S: Final = 0.25  # for sending or reading the reason


def report_failure(
    text: str, call: int, connections: Mapping[int, socket.socket], links: Numbers
) -> None:
    """Send every peer why this rank gives up; wait at most `_REPORT_S` for peers to read it."""
    words = text.encode()[: frames.LONGEST_TEXT]
    header = np.array([call, frames.GAVE_UP, len(words), 0, 0, 0])
    header[frames.CHECK_WORD] = header_checksum(header)
    unsent = {
        connection.fileno(): (connection, _tail_of(links[peer]) + header.tobytes() + words)
        for peer, connection in connections.items()
        if not links[peer, frames.CLOSED]
    }
    poll = select.poll()
    for fd in unsent:
        poll.register(fd, select.POLLOUT)
    deadline = time.monotonic() + _REPORT_S
    while unsent and (left_s := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left_s * 1e3):
            connection, rest = unsent.pop(fd)
            try:
                rest = rest[connection.send(rest) :]
                if rest:
                    unsent[fd] = (connection, rest)
                    continue
                connection.shutdown(socket.SHUT_WR)
            except BlockingIOError:
                unsent[fd] = (connection, rest)
                continue
            except OSError:  # the peer has closed
                pass
            poll.unregister(fd)


def _tail_of(link: Numbers) -> bytes:
    """Return bytes that complete the frame in progress to a peer; their content is void."""
    if link[frames.OUT_KEY] == frames.NONE:
        return b""
    done = int(link[frames.OUT_DONE])
    words = link[frames.OUT_WORDS : frames.OUT_WORDS + frames.HEADER_WORDS]
    frame = frames.HEADER_BYTES + int(words[frames.LENGTH_WORD])
    header: bytes = words.tobytes()[done:]
    link[frames.OUT_KEY] = frames.NONE
    return header + bytes(frame - done - len(header))


def reported_reason(connection: socket.socket, link: Numbers) -> str:
    """Read and return the reason that a peer sent when it gave up; empty if it sent none."""
    length = int(link[frames.IN_WORDS + frames.LENGTH_WORD])
    words = b""
    deadline = time.monotonic() + _REPORT_S
    try:
        while len(words) < length and (left_s := deadline - time.monotonic()) > 0:
            connection.settimeout(left_s)
            if not (part := connection.recv(length - len(words))):
                break
            words += part
    except OSError:
        pass
    return words.decode(errors="replace")
