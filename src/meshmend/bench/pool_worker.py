"""One worker of the pool: what it does between being forked and its end.

It hears from the pool over a socket, in lines of JSON, and answers in such lines: never over the
network that is being measured.
"""

import gc
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.bench.contenders import Buffer, Contender, Network, Participant, operand, total
from meshmend.execute.sockets import SocketTransport
from meshmend.processes import die_with_parent


class Line:
    """One end of the line between the pool and a worker."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._stream = connection.makefile("r", encoding="utf-8")

    def say(self, words: dict[str, Any]) -> None:
        """Send one line."""
        self.connection.sendall(json.dumps(words).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """Return the next line, or None if the other end has closed.

        Raises:
            TimeoutError: nothing came in the time set on the connection.
        """
        text = self._stream.readline()
        return json.loads(text) if text else None

    def close(self) -> None:
        """Give up the line."""
        self._stream.close()
        self.connection.close()


def work(
    line: Line,
    network: Network,
    rank: int,
    contenders: Sequence[Contender],
    meeting: tuple[Path, bytes, int],
) -> None:
    """Serve the pool as one rank until it hangs up, and end the process; never returns.

    `meeting` is a folder and a secret that all workers share, and their parent.
    """
    folder, secret, parent = meeting
    try:
        _belong_to(parent)
        gc.disable()  # what the parent has made is not to be visited, page by page
        chips = network.mesh.live
        network.enter(chips[rank])
        labels = [f"chip {chip}" for chip in chips]
        bind = network.address(chips[rank])
        with SocketTransport(rank, labels, secret, bind=bind) as transport:
            line.say({"address": transport.address})
            if (answer := line.hear()) is None:
                os._exit(0)
            addresses = tuple((host, port) for host, port in answer["addresses"])
            participant = Participant(
                rank, len(chips), transport, addresses, network.interface, folder
            )
            _serve(line, participant, contenders)
    except BaseException as error:
        line.say({"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def _belong_to(parent: int) -> None:
    die_with_parent(parent)
    os.setpgid(0, 0)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _serve(line: Line, participant: Participant, contenders: Sequence[Contender]) -> None:
    """Run contenders as the pool asks: get ready, then start at the time it names."""
    ready: dict[int, Callable[[Buffer], None]] = {}
    most = max((each.n_elements for each in contenders if each.is_sum), default=0)
    buffer = np.zeros(most, dtype=np.float32)
    mine, expected = operand(participant.rank, most), total(participant.n_ranks, most)
    while (order := line.hear()) is not None:
        number = order["contender"]
        contender = contenders[number]
        n_elements = contender.n_elements if contender.is_sum else 0
        if number not in ready:
            ready[number] = contender.ready(participant)
        buffer[:n_elements] = mine[:n_elements]
        line.say({"ready": number})
        if (start := line.hear()) is None:
            return
        time.sleep(max(0.0, start["at"] - time.monotonic()))
        began = time.monotonic()
        ready[number](buffer[:n_elements])
        ended = time.monotonic()
        right = bool(np.array_equal(buffer[:n_elements], expected[:n_elements]))
        line.say({"began": began, "ended": ended, "right": right})
