"""The pool: one worker process per live chip, started once, timed many times.

Workers are forked from a process that has everything imported and compiled. They start each
repetition at a time that the pool names over its own lines to them, so the network is idle then.
The time of a repetition is from the first worker's start to the last one's end, on the clock that
all processes of a machine share.
"""

import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmend.bench.contenders import Contender, Network
from meshmend.bench.pool_worker import Line, work
from meshmend.errors import BenchmarkError
from meshmend.execute.event_loop import load_event_loop
from meshmend.scratch import scratch_folder

ANSWER_S = 120.0
_HEAD_START_S = 0.01
_PER_WORKER_S = 0.0003  # to wake it


@dataclass(frozen=True)
class Lap:
    """One repetition: its time, and whether every rank ended with the right sum."""

    time_s: float
    right: bool


class WorkerPool:
    """The workers of a network, ready to run these contenders; a context manager."""

    def __init__(self, network: Network, contenders: Sequence[Contender]) -> None:
        load_event_loop()
        self._ground = network
        self._contenders = contenders
        self._folder = scratch_folder()
        self._lines: list[Line] = []
        self._pids: list[int] = []

    def __enter__(self) -> "WorkerPool":
        try:
            secret = secrets.token_bytes(32)
            for rank in range(self._ground.mesh.n_live):
                self._start(rank, secret)
            addresses = [self._hear(rank, "address") for rank in range(len(self._lines))]
            self._say({"addresses": addresses})
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def lap(self, contender: Contender) -> Lap:
        """Return one repetition of a contender, timed.

        Raises:
            BenchmarkError: a worker failed, or did not finish in time.
        """
        self._say({"contender": self._contenders.index(contender)})
        ranks = range(len(self._lines))
        for rank in ranks:
            self._hear(rank, "ready", contender)
        self._say({"at": time.monotonic() + _HEAD_START_S + _PER_WORKER_S * len(self._lines)})
        answers = [self._hear(rank, None, contender) for rank in ranks]
        began, ended = (min(a["began"] for a in answers), max(a["ended"] for a in answers))
        return Lap(ended - began, all(answer["right"] for answer in answers))

    def end(self) -> None:
        """End all workers and remove what they met by."""
        for line in self._lines:
            line.close()
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._lines, self._pids = [], []
        self._folder.cleanup()

    def _start(self, rank: int, secret: bytes) -> None:
        meeting = Path(self._folder.name), secret, os.getpid()
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            work(Line(theirs), self._ground, rank, self._contenders, meeting)
        theirs.close()
        self._pids.append(pid)
        ours.settimeout(ANSWER_S)
        self._lines.append(Line(ours))

    def _say(self, words: dict[str, Any]) -> None:
        for line in self._lines:
            line.say(words)

    def _hear(self, rank: int, key: str | None, contender: Contender | None = None) -> Any:
        """Return what a worker says, or what it says under a key."""
        who = f"the worker of chip {self._ground.mesh.live[rank]}"
        doing = f" in {contender.name}" if contender is not None else ""
        try:
            answer = self._lines[rank].hear()
        except TimeoutError:
            raise BenchmarkError(f"{who} said nothing for {ANSWER_S:g} s{doing}") from None
        if answer is None:
            raise BenchmarkError(f"{who} died{doing}")
        if "error" in answer:
            raise BenchmarkError(f"{who} failed{doing}: {answer['error']}")
        return answer if key is None else answer[key]
