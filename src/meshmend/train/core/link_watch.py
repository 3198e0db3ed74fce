"""Before a step: chips look at their links if that is due, and take better plans if there are some.

It is the same for the chips of a `Job` and for those of an elastic process group. `LinkSpeeds` says
what the figures mean, `Exchange` gets them to all chips and has plans made. The first look of the
first generation measures the fabric too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from meshmend.membership.events import FabricMeasured, LinkRestored, LinkSlow
from meshmend.planning.link_probes import (
    PIECE_BYTES,
    TIMES_LONGER,
    fabric_from,
    fabric_probes,
    flood,
)
from meshmend.topology.fabric import Fabric
from meshmend.topology.failures import SlowLink
from meshmend.train.core.exchange import FIRST_GENERATION, Exchange
from meshmend.train.core.link_speeds import LinkSpeeds
from meshmend.train.core.worker_environment import coordinator_client
from meshmend.train.core.worker_loop import WorkerLoop

_SHORT_PROBE_S: Final = 0.005  # of those that measure the fabric; others take three times as long
_LEAST_PIECES, _MOST_PIECES = 16, 128  # of it
_N_REPETITIONS: Final = 5  # of which the fastest counts


class LinkWatch:
    """One chip's part in watching links, and in going on with better plans.

    All chips call its methods before the same steps. If not `is_on`, nobody looks at links.
    """

    def __init__(self, loop: WorkerLoop, exchange: Exchange, *, is_on: bool) -> None:
        self._loop, self._exchange, self._is_on = loop, exchange, is_on
        self._generation = 0  # of what follows
        self._speeds: LinkSpeeds | None = None  # None: nobody has begun to look
        self._has_measured = False  # this chip, in whatever generation

    def take_better_plans(self, known: str, step: int) -> bool:
        """Look at the links if that is due, and swap plans if better ones are sought.

        `known` are the speeds of links that were found, as of the last step. Return False if the
        mesh changed.
        """
        for is_wanted, act in (
            (self._is_due(), partial(self._look, known, step)),
            (self._exchange.is_provisional, self._exchange.swap_plans),
        ):
            if is_wanted and not self._loop.attempt(act, is_step=False):
                return False
        return True

    def found(self, known: str) -> str:
        """Return the speeds of links that this generation has found, for the training state.

        They are the same on all chips that have done the same steps. If nobody looks at links in
        this generation, they are those that were known.
        """
        if self._speeds is None or self._generation != self._exchange.generation_number:
            return known
        return " ".join(map(str, self._speeds.found))

    def _is_due(self) -> bool:
        """Count a step; return whether all chips look at their links before it."""
        if self._generation != self._exchange.generation_number:
            self._generation, self._speeds = self._exchange.generation_number, None
        if not self._is_on or self._exchange.mesh.n_live <= 2:
            return False
        return self._speeds is None or self._speeds.is_due()

    def _look(self, known: str, step: int) -> None:
        """Find links that have another speed than was known; all chips find the same ones.

        The first look of a generation begins with the speeds that earlier ones have found, and
        measures the fabric if no chip of it has done so before. The job goes on with the plans that
        it has until there are some for the speeds that are known now.
        """
        exchange, reports = self._exchange, list[FabricMeasured | LinkSlow | LinkRestored]()
        chip = exchange.chip
        if self._speeds is None:
            self._speeds = LinkSpeeds(exchange.mesh, known)
            if not any(has for (has,) in exchange.gather_numbers([self._has_measured])):
                found = self._measured_fabric()
                self._has_measured = True
                rates = found.link_bandwidth_bytes_per_s, found.hop_latency_s
                reports.append(FabricMeasured(*rates, found.message_overhead_s, step, chip))
            if self._speeds.mesh != exchange.mesh:
                exchange.seek_plans(self._speeds.mesh)
            # Those of a checkpoint are news to whoever watches the job.
            changed = self._speeds.found if self._generation == FIRST_GENERATION else ()
        else:
            changed = self._changed(self._speeds)
        for each in changed:
            event = LinkRestored if each.speed == 1 else LinkSlow
            reports.append(event(str(each.link), each.speed, step, chip))
        if exchange.rank == 0:
            for report in reports:
                coordinator_client().report(report)

    def _changed(self, speeds: LinkSpeeds) -> tuple[SlowLink, ...]:
        changed = self._conclude(speeds)
        while n_bytes := speeds.probe_bytes:
            self._work_since_look(speeds)  # what this short sum did is no part of the probe
            every_link = replace(self._exchange.mesh, slow=frozenset())
            self._exchange.ready(flood(every_link, "probe", 1, n_bytes))()
            changed = self._conclude(speeds)
        if changed:
            self._exchange.seek_plans(speeds.mesh)
        return changed

    def _conclude(self, speeds: LinkSpeeds) -> tuple[SlowLink, ...]:
        return speeds.conclude(self._exchange.gather_numbers(self._work_since_look(speeds)))

    def _work_since_look(self, speeds: LinkSpeeds) -> list[int]:
        return speeds.mine(self._exchange.work_done(), time.monotonic_ns() // 1000)

    def _measured_fabric(self) -> Fabric:
        """Return what the links do; a probe takes as long as on the slowest chip, on all chips."""
        mesh, ready, n_pieces = self._exchange.mesh, self._exchange.ready, _LEAST_PIECES
        long_s = self._probe_times([ready(fabric_probes(mesh, n_pieces)[2])])[0]
        rate = TIMES_LONGER * n_pieces * PIECE_BYTES / long_s
        n_pieces = min(max(n_pieces, round(_SHORT_PROBE_S * rate / PIECE_BYTES)), _MOST_PIECES)
        probes = [ready(probe) for probe in fabric_probes(mesh, n_pieces)]
        times = [self._probe_times(probes) for _ in range(_N_REPETITIONS)]
        return fabric_from(mesh, *map(min, zip(*times, strict=True)), n_pieces=n_pieces)

    def _probe_times(self, ready: Sequence[Callable[[], None]]) -> list[float]:
        """Run probes; telling each other how long one took, all begin the next one together."""
        times = []
        for run in ready:
            begin = time.monotonic_ns()
            run()
            told = self._exchange.gather_numbers([time.monotonic_ns() - begin])
            times.append(max(numbers[0] for numbers in told) / 1e9)
        return times
