"""Measures the fabric of a network with the probes of `planning.link_probes`.

On a testbed all chips are processes of this host, so the fabric has its processors. On loopback
processors are all there is: the figures of links are what they leave.
"""

import math
import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from meshmend.lab.bench.contenders import ITEM_BYTES, Network, Planned
from meshmend.lab.bench.worker_pool import WorkerPool
from meshmend.planning.link_probes import (
    PIECE_BYTES,
    LinkProbe,
    fabric_from,
    fabric_probes,
    on_processors,
    processor_probes,
)
from meshmend.planning.settings import SMALL_WINDOW_BYTES
from meshmend.schedule.hazards import hazards_of
from meshmend.topology.fabric import Fabric
from meshmend.transport.sockets import UNSENT_BYTES

_N_REPETITIONS = 4
_SHORT_S = 0.08
_LOOPBACK_BYTES = 1 << 19
# Half of a window waits for its link; the other half is carried, and not yet acknowledged.
_QUEUE_BYTES = SMALL_WINDOW_BYTES // 2 + UNSENT_BYTES
_LEAST_PIECES, _MOST_PIECES = 16, 512  # of the short probe


def measured_fabric(network: Network, progress: Callable[[str], None]) -> Fabric:
    """Return the figures of a network's links, and of the processors that its chips share.

    Raises:
        BenchmarkError: a probe did not finish.
    """
    rate = None if network.bed is None else network.bed.link_bandwidth
    wanted_bytes = _LOOPBACK_BYTES if rate is None else _SHORT_S * rate
    n_pieces = int(np.clip(wanted_bytes // PIECE_BYTES, _LEAST_PIECES, _MOST_PIECES))
    n_processors = None if network.bed is None else len(os.sched_getaffinity(0))
    of_links = fabric_probes(network.mesh, n_pieces, n_processors)
    probes = of_links if n_processors is None else (*of_links, *processor_probes(network.mesh))
    planned = [_planned(probe) for probe in probes]
    least_s, least_busy_s = [math.inf] * len(probes), [math.inf] * len(probes)
    with WorkerPool(network, planned) as pool:
        for repetition in range(_N_REPETITIONS + 1):
            for number, probe in enumerate(planned):
                progress(f"measuring links: {probe.name}")
                measured = pool.measure(probe)
                if repetition:  # the first one fills caches and opens TCP windows
                    least_s[number] = min(least_s[number], measured.time_s)
                    least_busy_s[number] = min(least_busy_s[number], measured.busy_s)
    fabric = fabric_from(network.mesh, *least_s[: len(of_links)], n_pieces=n_pieces)
    if n_processors is None:
        return fabric
    fabric = replace(fabric, queue_bytes=_QUEUE_BYTES)
    return on_processors(fabric, n_processors, probes, least_busy_s)


def _planned(probe: LinkProbe) -> Planned:
    n_elements, schedule = probe.n_bytes // ITEM_BYTES, probe.schedule
    return Planned(probe.name, n_elements, schedule, hazards_of(schedule), 1, checked=None)
