"""Kills the process of a Ray job's coordinator when it hangs; Ray then starts it again.

Ray restarts an actor whose process has died. It does not notice one that lives but does nothing,
such as a process that was stopped. So a small process beside it asks it for an answer.
"""

import os
import signal
import subprocess
import sys
import time
from typing import Final

from meshmend.config import SECRET
from meshmend.launch.hang_check import HangCheck, is_coordinator_answering
from meshmend.launch.output_lines import say
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
    check = HangCheck(lambda: is_coordinator_answering(address, secret), time.monotonic())
    while not check.is_hanging(time.monotonic()):
        time.sleep(_POLL_S)
    say("the coordinator does not answer, and is killed; Ray starts it again")
    os.kill(watched, signal.SIGKILL)


if __name__ == "__main__":
    watched = int(sys.argv[3])
    die_with_parent(watched)
    _watch((sys.argv[1], int(sys.argv[2])), SECRET.value_in(os.environ).encode(), watched)
