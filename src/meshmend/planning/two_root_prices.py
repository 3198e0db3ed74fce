"""What `two-roots` costs: a time that it was not seen to beat, and its number of slices.

With h hops, of which messages end after s, and S slices of m seconds each, the last slice is out
after S (o + m), and takes h l + s (o + m) to go all the way. That is least for the S below.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.target import Question
from meshmend.simulator.network_program import Program
from meshmend.simulator.rules import Simulation, simulate
from meshmend.trees.two_root_trees import (
    N_CHUNKS,
    TwoRootFigures,
    two_root_figures,
    two_root_window,
)

# Found by trying on meshes from 8x8 to 32x32, with and without holes, from 1 KB to 10 MB.
_FEW_CHIPS: Final = 256
_FORMULA_ERROR: Final = 0.9  # the formula below is too high by so much at most,
_FORMULA_ERROR_OF_FEW: Final = 0.85  # and by so much on few chips
_LONG_WINDOWS: Final = 8  # a payload that takes so many windows is far too long
_OTHER_SLICES: Final = (1.15, 0.87, 0.75)  # times the formula's number
_MOST_SLICES: Final = 512
_MOST_MESSAGES: Final = 8_000_000  # of one simulation: 128x128 has 65,000 rows


def optimistic_two_roots_s(question: Question) -> float:
    """Return a time that `two-roots` was not seen to beat.

    Where a payload takes longer than the window of the trees, what goes up meets what comes down,
    and one has to wait for the other.

    Raises:
        UnsupportedError: the mesh has no slit.
    """
    mesh, fabric, payload_bytes = question.mesh, question.fabric, question.payload_bytes
    error = _FORMULA_ERROR if mesh.n_live > _FEW_CHIPS else _FORMULA_ERROR_OF_FEW
    bytes_s = payload_bytes / N_CHUNKS / fabric.link_bandwidth_bytes_per_s
    if bytes_s > _LONG_WINDOWS * two_root_window(mesh) * fabric.hop_latency_s:
        return error * 2 * (1 - 1 / _LONG_WINDOWS) * bytes_s  # no need to know more
    figures = two_root_figures(mesh)
    slices = _best_slices(figures, question)
    hold_s = fabric.message_overhead_s + bytes_s / slices
    way_s = figures.hops * fabric.hop_latency_s + figures.stops * hold_s
    window_s = figures.window * (fabric.hop_latency_s + hold_s)
    pass_s = slices * hold_s
    return error * (way_s + pass_s + max(0.0, pass_s - window_s))


def fastest_two_roots(
    program: Program, question: Question, delays: NDArray[np.float64] | None
) -> Simulation:
    """Return the fastest simulation: with the formula's number of slices, or one near it."""
    figures = two_root_figures(question.mesh)
    slices = _best_slices(figures, question)
    most = max(1, _MOST_MESSAGES // program.n_rows)
    tried = {max(1, min(most, round(slices * factor))) for factor in (1.0, *_OTHER_SLICES)}
    results = [
        simulate(
            program,
            question.fabric,
            payload_bytes=question.payload_bytes,
            slices=number,
            delay_slices=delays,
        )
        for number in sorted(tried)
    ]
    return min(results, key=lambda result: result.time_s)


def _best_slices(figures: TwoRootFigures, question: Question) -> int:
    """Return the number of slices that makes the formula least."""
    fabric = question.fabric
    bytes_s = question.payload_bytes / N_CHUNKS / fabric.link_bandwidth_bytes_per_s
    if not fabric.message_overhead_s:
        return _MOST_SLICES // 2 if bytes_s else 1
    best = math.sqrt(figures.stops * bytes_s / fabric.message_overhead_s)
    return max(1, min(_MOST_SLICES, round(best)))
