"""Faults that a worker injects into itself, to hit one part of a step exactly."""

import os
import signal
import threading
from collections.abc import Iterable
from typing import Final

from meshmend.membership.faults.fault import Fault, Moment
from meshmend.topology.failures import Chip

_INTO_THE_SUM_S: Final = 0.002  # a fault in `reduce` or `gather` kills this long after it begins
_TAKES_TIME: Final = (Moment.REDUCE, Moment.GATHER)


class SelfInjection:
    """Injects into the worker of one chip the faults that have a moment of a step, each once."""

    def __init__(self, chip: Chip, faults: Iterable[Fault]) -> None:
        self._pending = [fault for fault in faults if fault.moment and chip in fault.chips()]

    def at(self, moment: Moment, step: int, *, bucket: int | None = None) -> None:
        """Kill this process if a fault has this moment and step; 2 ms later in what takes time."""
        for fault in self._pending:
            if (fault.moment, fault.at_step, fault.bucket) == (moment, step, bucket):
                self._pending.remove(fault)
                kill = (os.getpid(), signal.SIGKILL)
                if moment in _TAKES_TIME:
                    threading.Timer(_INTO_THE_SUM_S, os.kill, kill).start()
                else:
                    os.kill(*kill)
                return
