"""Where the time of a job goes: whole nanoseconds, each under exactly one cause.

A running job trains for an interval, then writes a checkpoint, and so on. Of the time that it
trains, missing chips and a slower sum take their shares. What was trained after the last finished
checkpoint is unsaved; a job that falls back to that checkpoint loses it.
"""

import numpy as np

from meshmend.forecast.walk_arrays import (
    CHECKPOINTS,
    CHIP_RATE,
    CYCLE_NS,
    DETECT,
    DETECTION,
    INTERVAL_NS,
    LOG,
    LOST_WORK,
    MISSING_CHIPS,
    MOST_LOG,
    N_LOG,
    NOW,
    PHASE,
    RATE,
    RESTART,
    RUN,
    SLOW_DOWN,
    STOPPED,
    UNSAVED_NS,
    UNTIL,
    USEFUL,
    WAITING,
    WRITE_NS,
    Floats,
    Ints,
)
from meshmend.kernels import inner_kernel


@inner_kernel
def advance(own: Ints, fig: Floats, to_ns: int) -> None:
    """Let time pass in which nothing changes, and write it down."""
    passed = to_ns - own[NOW]
    own[NOW] = to_ns
    phase = own[PHASE]
    if phase == RUN:
        _train(own, fig, passed)
    elif phase == DETECT:
        own[DETECTION] += passed
    elif phase == STOPPED:
        own[WAITING] += passed
    else:
        own[RESTART] += passed


@inner_kernel
def _train(own: Ints, fig: Floats, passed: int) -> None:
    interval, before = own[INTERVAL_NS], own[CYCLE_NS]
    whole, since = interval + own[WRITE_NS], before + passed  # since a checkpoint finished
    n_saved = 0
    if since >= whole:
        n_saved = since // whole
        since -= n_saved * whole
    training = n_saved * interval + min(since, interval) - min(before, interval)
    # A rate may be above 1 by the last bit of its division.
    with_chips = min(training, np.int64(np.rint(training * fig[CHIP_RATE])))
    useful = min(with_chips, np.int64(np.rint(training * fig[RATE])))
    own[CHECKPOINTS] += passed - training
    own[MISSING_CHIPS] += training - with_chips
    own[SLOW_DOWN] += with_chips - useful
    own[USEFUL] += useful
    own[CYCLE_NS] = since
    if n_saved:
        own[UNSAVED_NS] = min(useful, np.int64(np.rint(min(since, interval) * fig[RATE])))
    else:
        own[UNSAVED_NS] += useful


@inner_kernel
def fall_back(own: Ints) -> None:
    """Lose what was trained since the last finished checkpoint."""
    own[LOST_WORK] += own[UNSAVED_NS]
    own[USEFUL] -= own[UNSAVED_NS]
    own[UNSAVED_NS] = 0
    own[CYCLE_NS] = 0


@inner_kernel
def save(own: Ints) -> None:
    """Keep what was trained: a checkpoint is written before a planned restart."""
    own[UNSAVED_NS] = 0
    own[CYCLE_NS] = 0


@inner_kernel
def begin(own: Ints, fig: Floats, phase: int, for_ns: int) -> None:
    """Begin a phase that lasts so long, or, if that is negative, until something happens."""
    own[PHASE] = phase
    own[UNTIL] = own[NOW] + for_ns if for_ns >= 0 else 2**62
    at = own[N_LOG]
    if at < own[MOST_LOG]:
        fig[LOG + 3 * at] = own[NOW]
        fig[LOG + 3 * at + 1] = phase
        fig[LOG + 3 * at + 2] = fig[RATE] if phase == RUN else 0.0
        own[N_LOG] += 1
