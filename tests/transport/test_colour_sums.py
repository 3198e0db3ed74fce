"""The event loop runs a table of colours: every rank ends with the sum of its colour."""

import numpy as np
import pytest

from local_ranks import connected, programs_of, run_all
from meshmend.planning.plan import plan
from meshmend.topology.mesh import Mesh


@pytest.mark.parametrize("n_slices", [1, 3])
def test_colours_are_summed_over_sockets_whatever_the_other_parts_hold(n_slices: int) -> None:
    """A rank's own part is one piece of the payload; the rest is garbage before and after."""
    made = plan(Mesh((2, 5)), tile="2x2", payload="1KB")  # two tiles, and two spares
    assert made.tiling is not None
    colours, size = made.tiling.colour_of, 24
    arrays = [
        np.random.default_rng(rank).integers(100, size=4 * size).astype(np.float32)
        for rank in range(len(colours))
    ]
    programs = programs_of(made.schedule)

    with connected(programs) as transports:
        results = run_all(transports, programs, arrays, n_slices=n_slices)

    for rank, colour in enumerate(colours):
        own = slice(colour * size, (colour + 1) * size)
        twins = np.flatnonzero(colours == colour)
        if colour >= 0:
            assert np.array_equal(results[rank][own], sum(arrays[twin][own] for twin in twins))
