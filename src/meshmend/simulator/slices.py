"""How many slices: the number that makes a schedule fastest on a fabric, found by trying.

With more slices more of a schedule overlaps, but more messages pay overhead. So time first falls
and then rises with their number, apart from small bumps.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.simulator.network_program import Program
from meshmend.simulator.rules import Progress, Simulation, simulate
from meshmend.topology.fabric import Fabric

MAX_SLICES = 512
MAX_MESSAGES = 16_000_000

# Both found by trying; `benchmarks/tune_trees.py` varies them, for one ring through all ranks.
#
# Up to this number of slices time goes up and down with their number, so one attempt without a
# gain says little: the search ends after two.
_UNSTEADY_SLICES = 8
# An attempt counts as a gain if its time is below this part of the best so far: a smaller gain is
# not worth simulating twice the messages.
_WORTH_DOUBLING = 0.99


@dataclass
class _Search:
    """One search: its question, the best so far, and how many messages it has simulated."""

    program: Program
    fabric: Fabric
    payload_bytes: float
    max_messages: int
    delay_slices: NDArray[np.float64] | None
    progress: Progress | None
    n_messages: int = 0  # simulated so far
    tried: dict[int, float] = field(default_factory=dict)
    best: Simulation | None = None

    def may_try(self, slices: int) -> bool:
        """Whether this number is new, affordable, and could beat the best."""
        if slices < 1 or slices > MAX_SLICES or slices in self.tried:
            return False
        if self.best is None:
            return True
        if self.n_messages + self.program.n_rows * slices > self.max_messages:
            return False
        return self.least_time(slices) < self.best.time_s

    def least_time(self, slices: int) -> float:
        """Return a time that this number of slices cannot beat: its busiest channel's work."""
        n_rows, payloads = self.program.channel_loads
        work_s = (
            n_rows * (slices * self.fabric.message_overhead_s)
            + payloads * (self.payload_bytes / self.fabric.link_bandwidth_bytes_per_s)
        ) * (1 - 1e-9)  # ticks round
        return float(np.max(work_s, initial=0.0)) + self.fabric.hop_latency_s

    def nearby(self, best: Simulation) -> list[int]:
        """Return the number half way to the faster neighbour: 3/2 of the best number, or 3/4.

        Both, if twice the number was not tried because its busiest channel rules it out.
        """
        below, above = self.tried.get(best.slices // 2), self.tried.get(2 * best.slices)
        higher, lower = best.slices * 3 // 2, best.slices * 3 // 4
        if below is None or (above is not None and above < below):
            return [higher]
        if above is not None:
            return [lower]
        is_ruled_out = self.least_time(2 * best.slices) >= best.time_s
        return [higher, lower] if is_ruled_out else [higher]

    def attempt(self, slices: int) -> bool:
        """Simulate; keep the result if it is the best; return whether it counts as a gain."""
        result = simulate(
            self.program,
            self.fabric,
            payload_bytes=self.payload_bytes,
            slices=slices,
            delay_slices=self.delay_slices,
            progress=None if self.progress is None else partial(self._report, slices),
        )
        self.tried[slices] = result.time_s
        self.n_messages += result.n_messages
        before = self.best
        if before is None or result.time_s < before.time_s:
            self.best = result
        return before is None or result.time_s < _WORTH_DOUBLING * before.time_s

    def _report(self, slices: int, part: float) -> None:
        assert self.progress is not None, "nothing else asks for a report"
        n_messages = self.n_messages + part * slices * self.program.n_rows
        self.progress(min(1.0, n_messages / self.max_messages))


def best_slices(
    program: Program,
    fabric: Fabric,
    *,
    payload_bytes: float,
    max_messages: int = MAX_MESSAGES,
    delay_slices: NDArray[np.float64] | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Return the fastest simulation among those of 1, 2, 4, ... slices and between.

    Doubles the number until there is no gain (up to 8 slices: twice in a row), until the busiest
    channel alone would take longer than the best so far, or until `max_messages` are simulated.
    Then tries the number half way to the faster neighbour of the best. One slice is always tried.
    `progress` is called with the part of `max_messages` that is simulated; the search often ends
    before it reaches 1.

    Raises:
        InputError: a payload that is negative or not finite, or no messages allowed.
    """
    if max_messages < 1:
        raise InputError(f"best_slices needs max_messages of 1 or more, but got {max_messages}")
    search = _Search(program, fabric, payload_bytes, max_messages, delay_slices, progress)
    slices, misses = 1, 0
    while misses < (2 if slices <= _UNSTEADY_SLICES else 1) and search.may_try(slices):
        misses = 0 if search.attempt(slices) else misses + 1
        slices *= 2
    assert search.best is not None, "one slice is always tried"
    for nearby in search.nearby(search.best):
        if search.may_try(nearby):
            search.attempt(nearby)
    return search.best
