"""Runs one worker process of the pool, from its fork to its end.

The pool and the worker send each other lines of JSON over a socket pair, never over the network
that is being measured.
"""

import gc
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.lab.bench.contenders import Buffer, Contender, Network, Participant, operand, total
from meshmend.processes import die_with_parent
from meshmend.transport.sockets import SocketTransport


@dataclass(frozen=True)
class PoolSession:
    """What all workers of a pool share: a folder, a secret, and their parent process."""

    folder: Path
    secret: bytes
    parent: int


class PoolChannel:
    """One end of the connection between the pool and a worker; a message is one line of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._stream = connection.makefile("r", encoding="utf-8")

    def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, or None if the other end has closed.

        Raises:
            TimeoutError: nothing came in the time set on the connection.
        """
        text = self._stream.readline()
        return json.loads(text) if text else None

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()
        self.connection.close()


def work(
    channel: PoolChannel,
    network: Network,
    rank: int,
    contenders: Sequence[Contender],
    session: PoolSession,
) -> None:
    """Serve the pool as one rank until it closes the channel, then end this process."""
    try:
        _tie_to_parent(session.parent)
        gc.disable()  # a collection would copy every page that is shared with the parent
        chips = network.mesh.live
        network.enter(chips[rank])
        labels = [f"chip {chip}" for chip in chips]
        bind = network.address(chips[rank])
        with SocketTransport(rank, labels, session.secret, bind=bind) as transport:
            channel.send({"address": transport.address})
            if (answer := channel.receive()) is None:
                os._exit(0)
            addresses = tuple((host, port) for host, port in answer["addresses"])
            participant = Participant(
                rank, len(chips), transport, addresses, network.interface, session.folder
            )
            _serve(channel, participant, contenders)
    except BaseException as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def _tie_to_parent(parent: int) -> None:
    die_with_parent(parent)
    os.setpgid(0, 0)  # so that Ctrl-C signals only the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _serve(channel: PoolChannel, participant: Participant, contenders: Sequence[Contender]) -> None:
    """Run contenders as the pool asks: prepare one, then start it when the pool says."""
    ready: dict[int, Callable[[Buffer], None]] = {}
    most = max((each.n_elements for each in contenders if each.is_sum), default=0)
    buffer = np.zeros(most, dtype=np.float32)
    mine, expected = operand(participant.rank, most), total(participant.n_ranks, most)
    while (order := channel.receive()) is not None:
        number = order["contender"]
        contender = contenders[number]
        n_elements = contender.n_elements if contender.is_sum else 0
        if number not in ready:
            ready[number] = contender.ready(participant)
        buffer[:n_elements] = mine[:n_elements]
        channel.send({"ready": number})
        if (start := channel.receive()) is None:
            return
        time.sleep(max(0.0, start["at"] - time.monotonic()))
        began = time.monotonic()
        ready[number](buffer[:n_elements])
        ended = time.monotonic()
        correct = bool(np.array_equal(buffer[:n_elements], expected[:n_elements]))
        channel.send({"began": began, "ended": ended, "correct": correct})
