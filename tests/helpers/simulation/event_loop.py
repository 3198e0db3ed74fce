"""Virtual time: actions in the order of their times, and the randomness of a run.

Knows nothing of networks or workers. All that happens in a simulation happens inside `run`.
"""

import heapq
from collections.abc import Callable
from functools import partial
from random import Random

Action = Callable[[], None]


class EventLoop:
    """A clock that jumps from one action to the next; same seed, same run."""

    def __init__(self, seed: int, *, traces: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 0.0
        self.n_actions = 0
        self.traces = traces
        self.trace: list[str] = []
        self._heap: list[tuple[float, int, Action]] = []

    def at(self, time: float, action: Action) -> None:
        """Do something at a time, or now if that is past."""
        self.n_actions += 1
        heapq.heappush(self._heap, (max(time, self.now), self.n_actions, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Do something after a delay."""
        self.at(self.now + delay_s, action)

    def run(self, until: float, is_over: Callable[[], bool]) -> None:
        """Do what is due, in order, until a time or until all is over."""
        heap = self._heap
        while heap and heap[0][0] <= until and not is_over():
            self.now, _, action = heapq.heappop(heap)
            action()

    def tell(self, who: object, what: str, *values: object) -> None:
        """Write a line of the history of this run, if anybody wants one."""
        if self.traces:
            self.trace.append(f"{self.now:9.4f}  {who!s:<12} {what % values if values else what}")


class Process:
    """Something that can be killed, or frozen as by SIGSTOP: then all it would do comes later."""

    def __init__(self, events: EventLoop, host: int, name: str) -> None:
        self.events = events
        self.host = host
        self.name = name
        self.is_alive = True
        self._frozen_until = 0.0
        self._held: list[Action] = []  # what it does when it wakes

    def freeze(self, seconds: float) -> None:
        """Stop for a while, or for longer if it is stopped already."""
        self._frozen_until = max(self._frozen_until, self.events.now + seconds)
        self.events.at(self._frozen_until, self._wake_up)

    def thaw(self) -> None:
        """Wake now, and do what was held back."""
        self._frozen_until = self.events.now
        self._wake_up()

    def soon(self, action: Action, delay_s: float | None = None) -> None:
        """Do something a little later if this process lives, or when it wakes if it is frozen."""
        if delay_s is None:
            delay_s = self.events.random.random() * 0.001
        self.events.after(delay_s, partial(self._do, action))

    def _do(self, action: Action) -> None:
        if not self.is_alive:
            return
        if self._frozen_until > self.events.now:
            self._held.append(action)
        else:
            action()

    def _wake_up(self) -> None:
        held, self._held = self._held, []
        for action in held:
            self._do(action)  # the first of them may stop it again
