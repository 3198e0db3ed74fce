"""When each channel is busy: the simulated schedule cut into frames, for an animation.

Knows plans and their simulation, not the page that shows the frames.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.pages.explore.flows import whole_channels
from meshmend.planning.plan import Plan
from meshmend.planning.tree_formula import Pipeline
from meshmend.schedule.priority import remaining_hops
from meshmend.simulator.network_program import program_of
from meshmend.simulator.rules import Simulation, Trace, simulate

N_FRAMES: Final = 120
_MOST_MESSAGES: Final = 600_000  # simulated with a trace, which takes 28 bytes a message and hop
_USUAL_SLICES: Final = 8  # of a plan without a pipeline of its own


@dataclass(frozen=True, eq=False)
class Timeline:
    """Frames of equal length: `busy[frame, channel]` is the busy part of the frame, 0 to 255.

    Channels are numbered as in `flows`. `n_shown` slices are simulated; a plan with more of them
    is shown with these, each larger. `slice_number` None: all slices together.
    """

    time_s: float
    n_slices: int
    n_shown: int
    slice_number: int | None
    busy: NDArray[np.uint8]


def timeline_of(plan: Plan, *, slice_number: int | None = None) -> Timeline:
    """Return the frames of a plan in its pipeline, or of one of its slices alone.

    Raises:
        InputError: there is no such slice.
    """
    n_slices = plan.pipeline.slices if plan.pipeline else _USUAL_SLICES
    n_shown = max(1, min(n_slices, _MOST_MESSAGES // max(1, plan.schedule.n_rows)))
    if slice_number is not None and not 0 <= slice_number < n_shown:
        raise InputError(f"a slice needs a number from 0 to {n_shown - 1}, but got {slice_number}")
    simulation = _traced(plan, n_shown)
    trace = simulation.trace
    assert trace is not None, "simulated with a trace"
    busy = _frames(trace, simulation, slice_number)
    mesh = plan.placement.mesh
    whole = np.zeros((N_FRAMES, mesh.n_chips * 2 * len(mesh.shape)), dtype=np.uint8)
    whole[:, whole_channels(mesh)] = busy
    return Timeline(simulation.time_s, n_slices, n_shown, slice_number, whole)


def _traced(plan: Plan, n_slices: int) -> Simulation:
    routes, target = plan.placement.routes, plan.target
    pipeline = plan.pipeline or Pipeline(n_slices)
    remaining = remaining_hops(plan.schedule, plan.hazards, routes)
    return simulate(
        program_of(plan.schedule, plan.hazards, routes),
        target.fabric,
        payload_bytes=target.payload_bytes,
        slices=n_slices,
        delay_slices=pipeline.delays(plan.schedule, remaining),
        trace=True,
    )


def _frames(trace: Trace, simulation: Simulation, slice_number: int | None) -> NDArray[np.uint8]:
    """Return the busy part of each frame and channel.

    A channel that is busy from a to b is busy for what is left of the time after a, less what is
    left after b. Both are sums over frames, so each message costs four additions however long it
    is.
    """
    n_channels = simulation.channel_busy_s.size
    picked = slice(None) if slice_number is None else trace.slice == slice_number
    channel = trace.channel[picked].astype(np.int64)
    frames_per_s = N_FRAMES / simulation.time_s if simulation.time_s else 0.0
    change = np.zeros((N_FRAMES + 2) * n_channels)
    for times_s, sign in ((trace.start_s[picked], 1.0), (trace.end_s[picked], -1.0)):
        at = np.clip(times_s * frames_per_s, 0.0, float(N_FRAMES))
        frame = at.astype(np.int64)
        left = frame + 1.0 - at
        place = frame * n_channels + channel
        size = change.size
        change += sign * np.bincount(place, left, size)
        change += sign * np.bincount(place + n_channels, 1.0 - left, size)
    busy = np.cumsum(change.reshape(N_FRAMES + 2, n_channels), axis=0)[:N_FRAMES]
    frames: NDArray[np.uint8] = np.rint(np.clip(busy, 0.0, 1.0) * 255).astype(np.uint8)
    return frames
