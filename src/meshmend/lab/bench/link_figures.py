"""Measures the fabric of a network with the probes of `planning.link_probes`."""

import math
from collections.abc import Callable

import numpy as np

from meshmend.lab.bench.contenders import ITEM_BYTES, Network, Planned
from meshmend.lab.bench.worker_pool import WorkerPool
from meshmend.planning.link_probes import PIECE_BYTES, LinkProbe, fabric_from, fabric_probes
from meshmend.schedule.hazards import hazards_of
from meshmend.topology.fabric import Fabric

_N_REPETITIONS = 4
_SHORT_S = 0.08
_LOOPBACK_BYTES = 1 << 19
_LEAST_PIECES, _MOST_PIECES = 16, 512  # of the short probe


def measured_fabric(network: Network, progress: Callable[[str], None]) -> Fabric:
    """Return the link figures of a network.

    Raises:
        BenchmarkError: a probe did not finish.
    """
    rate = None if network.bed is None else network.bed.link_bandwidth
    wanted_bytes = _LOOPBACK_BYTES if rate is None else _SHORT_S * rate
    n_pieces = int(np.clip(wanted_bytes // PIECE_BYTES, _LEAST_PIECES, _MOST_PIECES))
    probes = [_planned(probe) for probe in fabric_probes(network.mesh, n_pieces)]
    fastest = dict.fromkeys((probe.name for probe in probes), math.inf)
    with WorkerPool(network, probes) as pool:
        for repetition in range(_N_REPETITIONS + 1):
            for probe in probes:
                progress(f"measuring links: {probe.name}")
                time_s = pool.measure(probe).time_s
                if repetition:  # the first one fills caches and opens TCP windows
                    fastest[probe.name] = min(fastest[probe.name], time_s)
    return fabric_from(network.mesh, *fastest.values(), n_pieces=n_pieces)


def _planned(probe: LinkProbe) -> Planned:
    n_elements, schedule = probe.n_bytes // ITEM_BYTES, probe.schedule
    return Planned(probe.name, n_elements, schedule, hazards_of(schedule), 1, checked=None)
