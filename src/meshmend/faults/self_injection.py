"""Faults that a worker inflicts on itself, to hit one moment of a step exactly."""

import os
import signal
import threading
from collections.abc import Iterable

from meshmend.faults.fault import Fault, Moment
from meshmend.topology.failures import Chip

_IN_THE_MIDDLE_S = 0.002  # after a sum has begun, so that it is hit half-way


class SelfInjection:
    """What is to happen to one chip's worker; each fault happens once."""

    def __init__(self, chip: Chip, faults: Iterable[Fault]) -> None:
        self._left = [fault for fault in faults if fault.moment and chip in fault.chips()]

    def at(self, moment: Moment, step: int) -> None:
        """Kill this process if this is the moment: at once, or while a sum is under way."""
        for fault in self._left:
            if fault.moment is moment and fault.at_step == step:
                self._left.remove(fault)
                end = (os.getpid(), signal.SIGKILL)
                if moment is not Moment.REDUCE:
                    os.kill(*end)
                threading.Timer(_IN_THE_MIDDLE_S, os.kill, end).start()
                return
