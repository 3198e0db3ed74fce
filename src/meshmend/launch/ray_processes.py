"""The processes beside a Ray job that must not import Ray, which takes seconds.

    python -m meshmend.launch.ray_processes FILE              call a pickled function
    python -m meshmend.launch.ray_processes HOST PORT PID     kill a coordinator that hangs

The workers of a job that was given a function, not a script, call it from a file, which the actor
of the same host wrote: it comes over no wire of ours.

Ray restarts an actor whose process has died. It does not notice one that lives but does nothing,
such as a process that was stopped. So a small process beside the coordinator asks it for an answer.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from meshmend.config import SECRET
from meshmend.launch.hosts import is_coordinator_answering
from meshmend.launch.supervisor import HangProbe, say
from meshmend.processes import die_with_parent
from meshmend.transport.listener import Address

_POLL_S: Final = 0.5


def start_watchdog(address: Address, secret: str) -> "subprocess.Popen[bytes]":
    """Start a process that kills this one when its coordinator hangs, and return it.

    Kill it before the coordinator stops to serve. It ends with the thread that started it.
    """
    host, port = address
    command = [sys.executable, "-P", "-m", __name__, host, str(port), str(os.getpid())]
    environment = {**os.environ, SECRET.name: secret}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)


def _watch(address: Address, secret: bytes, watched: int) -> None:
    die_with_parent(watched)
    probe = HangProbe(lambda: is_coordinator_answering(address, secret), time.monotonic())
    while not (words := probe(time.monotonic())):
        time.sleep(_POLL_S)
    say(f"the coordinator {words}; Ray starts it again")
    os.kill(watched, signal.SIGKILL)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [file]:
            pickle.loads(Path(file).read_bytes())()
        case [host, port, pid]:
            _watch((host, int(port)), SECRET.value_in(os.environ).encode(), int(pid))
