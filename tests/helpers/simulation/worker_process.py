"""A worker in a simulated process: its main thread is a greenlet that gives way where it waits.

Knows time and its own death; what it trains and whom it talks to are given by `simulated_worker`.
"""

from collections.abc import Callable
from pathlib import Path
from traceback import extract_stack

from greenlet import GreenletExit, getcurrent, greenlet

from meshmend.topology.failures import Chip
from simulation.event_loop import EventLoop, Process


class WorkerProcess(Process):
    """One worker, from its start to its death; `on_switch` is called wherever it waits."""

    def __init__(
        self,
        events: EventLoop,
        host: int,
        chip: Chip,
        port: int,
        *,
        on_switch: Callable[["WorkerProcess"], None],
    ) -> None:
        super().__init__(events, host, f"{chip[0]},{chip[1]}#{port}")
        self.chip = chip
        self.port = port
        self.stuck_until = 0.0  # only its main thread stands still
        self._on_switch = on_switch
        self._hub = getcurrent()
        self._greenlet: greenlet | None = None
        self._is_blocked = False
        self._is_due = False

    def start(self, main: Callable[[], None]) -> None:
        """Begin the main thread."""
        self._greenlet = greenlet(main, parent=self._hub)
        self._is_blocked = True
        self.wake()

    def wake(self) -> None:
        """Have the main thread look whether it may go on."""
        if self._is_blocked and not self._is_due:
            self._is_due = True
            self.soon(self._resume)

    def block(self, until: float | None = None) -> None:
        """Wait in the main thread until woken, or until a time."""
        self._on_switch(self)
        if until is not None:
            self.events.at(until, self.wake)
        self._is_blocked = True
        self._hub.switch()

    def sleep(self, seconds: float) -> None:
        """Be busy in the main thread for a while."""
        until = self.events.now + seconds
        while self.events.now < until:
            self.block(until)

    def reap(self) -> None:
        """End the main thread of a process that was killed."""
        if self._greenlet is not None and not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)

    def stack(self) -> list[str]:
        """Return where the main thread waits, the innermost call last; nothing if it has ended."""
        frame = self._greenlet.gr_frame if self._greenlet is not None else None
        found = [] if frame is None else extract_stack(frame)
        return [f"{Path(each.filename).stem}:{each.lineno} {each.name}" for each in found]

    def _resume(self) -> None:
        if self.stuck_until > self.events.now:
            self.soon(self._resume, self.stuck_until - self.events.now)
            return
        self._is_due = self._is_blocked = False
        assert self._greenlet is not None
        self._greenlet.switch()
