"""Several sums of one size, started together: what they cost when none waits for another.

On each link the older sum goes first. To the simulator they are one schedule: every sum has chunks
of its own, and the rows of a later sum have a delay that is longer than any earlier sum.
"""

import math

import numpy as np

from meshmend.errors import InputError
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.table import Schedule, index_dtype
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import Simulation, simulate
from meshmend.topology.routes import Routes


def repeated(schedule: Schedule, n_sums: int) -> Schedule:
    """Return the schedule of several sums, one after another in an n times larger payload.

    Raises:
        InputError: fewer than one sum.
    """
    if n_sums < 1:
        raise InputError(f"repeated needs one sum or more, but got {n_sums}")
    n_chunks = schedule.n_chunks
    dtype = index_dtype(schedule.n_places, n_sums * n_chunks)
    shift = np.repeat(np.arange(n_sums) * n_chunks, schedule.n_rows)
    starts = (np.arange(n_sums)[:, None] + schedule.cuts[:-1]) / n_sums
    return Schedule(
        algorithm=schedule.algorithm,
        collective=schedule.collective,
        n_ranks=schedule.n_ranks,
        cuts=np.append(starts, 1.0),
        owners=np.tile(schedule.owners, n_sums),
        src=np.tile(schedule.src, n_sums).astype(dtype),
        dst=np.tile(schedule.dst, n_sums).astype(dtype),
        lo=(np.tile(schedule.lo, n_sums) + shift).astype(dtype),
        hi=(np.tile(schedule.hi, n_sums) + shift).astype(dtype),
        op=np.tile(schedule.op, n_sums),
        src_buffer=None if schedule.src_buffer is None else np.tile(schedule.src_buffer, n_sums),
        dst_buffer=None if schedule.dst_buffer is None else np.tile(schedule.dst_buffer, n_sums),
    )


def in_flight(one: Simulation, routes: Routes, n_sums: int, *, slices: int) -> Simulation:
    """Simulate several sums like this one, started together, each cut in `slices`."""
    schedule = repeated(one.schedule, n_sums)
    delays = np.zeros(one.schedule.n_rows) if one.delay_slices is None else one.delay_slices
    a_sum = slices + math.ceil(delays.max(initial=0.0)) + 1
    return simulate(
        program_of(schedule, hazards_of(schedule), routes),
        one.fabric,
        payload_bytes=n_sums * one.payload_bytes,
        slices=slices,
        delay_slices=np.tile(delays, n_sums) + np.repeat(np.arange(n_sums) * a_sum, len(delays)),
    )


def fastest_in_flight(one: Simulation, routes: Routes, n_sums: int) -> Simulation:
    """Return the fastest of several sums in flight with the slices of one, half of them, and so on.

    What slices do for one sum, several sums do for each other, so fewer slices may be faster.
    """
    slices = one.slices
    best = in_flight(one, routes, n_sums, slices=slices)
    while slices > 1:
        slices //= 2
        found = in_flight(one, routes, n_sums, slices=slices)
        if found.time_s >= best.time_s:
            break
        best = found
    return best
