"""The pool of a benchmark: one worker process per live chip, started once, timed many times.

Workers are forked from a process that has everything imported and compiled. The pool tells all of
them the time at which a repetition starts. Pool and workers send each other messages over pipes,
so that the measured network is idle at that time. A repetition lasts from the first
worker's start to the last worker's end, on the clock that all processes of a machine share.
"""

import gc
import os
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.errors import BenchmarkError
from meshmend.lab.bench.contenders import Contender, Network, Participant, Run, expected
from meshmend.planning.settings import SMALL_WINDOW_BYTES
from meshmend.processes import die_with_parent
from meshmend.scratch import scratch_folder
from meshmend.transport.event_loop import load_event_loop
from meshmend.transport.sockets import SocketTransport

ANSWER_S = 120.0
_HEAD_START_S = 0.01
_PER_WORKER_S = 0.0003  # the time to wake a worker


@dataclass(frozen=True)
class Repetition:
    """One repetition: its time, and whether every rank ended with the right numbers.

    `busy_s` is for how long processors worked for all workers together.
    """

    time_s: float
    correct: bool
    busy_s: float = 0.0


class WorkerPool:
    """The workers of a network, ready to run these contenders; use it in a `with` block."""

    def __init__(self, network: Network, contenders: Sequence[Contender]) -> None:
        load_event_loop()
        self._network = network
        self._contenders = contenders
        self._folder = scratch_folder()
        self._channels: list[Connection] = []
        self._pids: list[int] = []

    def __enter__(self) -> "WorkerPool":
        try:
            secret = secrets.token_bytes(32)
            for rank in range(self._network.mesh.n_live):
                self._start(rank, secret)
            addresses = [self._receive(rank, "address") for rank in range(len(self._channels))]
            self._send_all({"addresses": addresses})
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def measure(self, contender: Contender) -> Repetition:
        """Run a contender once and return how long it took.

        Raises:
            BenchmarkError: a worker failed, or did not finish in time.
        """
        self._send_all({"contender": self._contenders.index(contender)})
        ranks = range(len(self._channels))
        for rank in ranks:
            self._receive(rank, "ready", contender)
        self._send_all(
            {"at": time.monotonic() + _HEAD_START_S + _PER_WORKER_S * len(self._channels)}
        )
        answers = [self._receive(rank, None, contender) for rank in ranks]
        began, ended = (min(a["began"] for a in answers), max(a["ended"] for a in answers))
        busy_s = sum(answer["busy"] for answer in answers)
        return Repetition(ended - began, all(answer["correct"] for answer in answers), busy_s)

    def end(self) -> None:
        """End all workers and remove the folder that they share."""
        for channel in self._channels:
            channel.close()
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._channels, self._pids = [], []
        self._folder.cleanup()

    def _start(self, rank: int, secret: bytes) -> None:
        session = PoolSession(Path(self._folder.name), secret, os.getpid())
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            work(theirs, self._network, rank, self._contenders, session)
        theirs.close()
        self._pids.append(pid)
        self._channels.append(ours)

    def _send_all(self, message: dict[str, Any]) -> None:
        for channel in self._channels:
            channel.send(message)

    def _receive(self, rank: int, key: str | None, contender: Contender | None = None) -> Any:
        """Return the next message of a worker, or the value under `key` in it.

        Raises:
            BenchmarkError: the worker failed, died, or did not answer in time.
        """
        who = f"the worker of chip {self._network.mesh.live[rank]}"
        doing = f" in {contender.name}" if contender is not None else ""
        try:
            if not self._channels[rank].poll(ANSWER_S):
                raise BenchmarkError(f"{who} did not answer for {ANSWER_S:g} s{doing}")
            answer = self._channels[rank].recv()
        except (EOFError, OSError):
            raise BenchmarkError(f"{who} died{doing}") from None
        if "error" in answer:
            raise BenchmarkError(f"{who} failed{doing}: {answer['error']}")
        return answer if key is None else answer[key]


@dataclass(frozen=True)
class PoolSession:
    """What all workers of a pool share: a folder, a secret, and their parent process."""

    folder: Path
    secret: bytes
    parent: int


def work(
    channel: Connection,
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
        window = SMALL_WINDOW_BYTES if network.bed is not None else 0
        with SocketTransport(
            rank, labels, session.secret, bind=bind, window_bytes=window
        ) as transport:
            channel.send({"address": transport.address})
            addresses = tuple(channel.recv()["addresses"])
            participant = Participant(
                rank, len(chips), transport, addresses, network.interface, session.folder
            )
            _serve(channel, participant, contenders)
    except EOFError:  # the pool has closed it
        pass
    except BaseException as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def _tie_to_parent(parent: int) -> None:
    die_with_parent(parent)
    os.setpgid(0, 0)  # so that Ctrl-C signals only the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _serve(channel: Connection, participant: Participant, contenders: Sequence[Contender]) -> None:
    """Run contenders as the pool asks: prepare one, then start it when the pool says."""
    ready: dict[int, Run] = {}
    rank, n_ranks = participant.rank, participant.n_ranks
    kinds = dict.fromkeys((each.checked, each.n_elements) for each in contenders)
    payloads = {kind: expected(kind[0], rank, n_ranks, kind[1]) for kind in kinds}
    while True:
        number = channel.recv()["contender"]
        contender = contenders[number]
        payload = payloads[contender.checked, contender.n_elements]
        if number not in ready:
            ready[number] = contender.ready(participant)
        buffer = payload.given.copy()
        channel.send({"ready": number})
        time.sleep(max(0.0, channel.recv()["at"] - time.monotonic()))
        worked, began = time.process_time(), time.monotonic()
        result = ready[number](buffer)
        ended, busy_s = time.monotonic(), time.process_time() - worked
        correct = bool(np.array_equal(result, payload.result))
        channel.send({"began": began, "ended": ended, "correct": correct, "busy": busy_s})
