"""How many chips can go on around holes, against a search through the mesh itself."""

import math
from dataclasses import replace

import numpy as np
import pytest

from forecasts import DAY_S, FREE_JOB, prices_of, scenario
from meshmend.forecast.forecasting import year_runner
from meshmend.forecast.intact_box import forget_box
from meshmend.forecast.machine import machine_of
from meshmend.forecast.records import Ints
from meshmend.forecast.scenario import RepairModel, Scenario
from meshmend.forecast.walk import add_hole, remove_hole, usable_chips
from meshmend.forecast.walk_arrays import GO_ON, Walk
from meshmend.kernels import kernel
from meshmend.topology.failures import parse_shape
from meshmend.topology.graph import largest_part
from meshmend.topology.tiles import box_tiling
from slow_forecast import tiles_in_bands

RATES = {"chip": 1.0, "link": 1.0, "host": 1.0}


def machine(mesh: str, wrap: str = "none") -> Scenario:
    one = (1,) * (mesh.count("x") + 1)
    host = (*one[:-2], 2, 2)
    return scenario(
        mesh, per_1000_days=RATES, repair=RepairModel(DAY_S), host=host, unit=one, wrap=wrap
    )


MACHINES = {
    "mesh": machine("6x8"),
    "torus": machine("6x6", "all"),
    "cylinder": machine("4x8", "1"),
    "three axes": machine("3x4x4"),
    "three axes that wrap": machine("4x4x4", "all"),
    "a line": scenario(
        "1x9", per_1000_days={"chip": 1.0, "link": 1.0}, repair=RepairModel(DAY_S), unit=(1, 1)
    ),
}


@kernel
def usable_after(walk: Walk, cells: Ints, changes: Ints, found: Ints) -> None:
    """Write down the usable chips after each change: hole h fails, or for -1 - h is repaired."""
    forget_box(walk, cells)
    for at in range(len(changes)):
        if changes[at] >= 0:
            add_hole(walk, cells, changes[at])
        else:
            remove_hole(walk, cells, -1 - changes[at])
        found[at] = usable_chips(walk, cells)


@pytest.mark.parametrize(("mesh", "tile"), [("8x8", "2x2"), ("6x8", "3x2"), ("4x4x4", "2x2x1")])
def test_the_tiles_that_go_on_are_nearly_the_most_that_fit(mesh: str, tile: str) -> None:
    shape = parse_shape(tile)
    one = (1,) * len(shape)
    job = replace(FREE_JOB, tile=shape)
    asked = scenario(
        mesh, per_1000_days={"chip": 1.0}, repair=RepairModel(DAY_S), unit=one, host=one, job=job
    )
    machine = machine_of(asked)
    rng, n_fewer, n_cases = np.random.default_rng(5), 0, 0
    for n_holes in (1, 2, 3, 5, 8):
        for _ in range(6):
            holes = rng.choice(len(machine.domains), n_holes, replace=False)
            runner = year_runner(machine, prices_of(asked))
            arrays, found = runner.arrays, np.zeros(n_holes, dtype=np.int64)
            arrays.walk.on_holes = GO_ON

            usable_after(arrays.walk, arrays.cells, holes.astype(np.int64), found)

            broken = largest_part(
                asked.mesh.without(*(machine.domains[hole].failure for hole in holes))
            )
            in_bands = tiles_in_bands(asked.mesh.shape, shape, broken.failed)
            most = box_tiling(broken, shape).n_tiles
            assert found[-1] == math.prod(shape) * min(in_bands, broken.n_live // math.prod(shape))
            assert 0 <= most - in_bands <= 1 or n_holes > 5
            assert n_holes > 1 or in_bands == most
            n_fewer, n_cases = n_fewer + (in_bands < most), n_cases + 1
    assert n_fewer <= n_cases / 4


@pytest.mark.parametrize("name", MACHINES)
def test_the_chips_that_go_on_are_the_largest_part_of_the_mesh(name: str) -> None:
    """Chips, links and hosts fail in chains and clumps, so that often something is cut off."""
    asked = MACHINES[name]
    rng = np.random.default_rng(7)
    n_cut = 0
    for _ in range(12):
        runner = year_runner(machine_of(asked), prices_of(asked))
        arrays = runner.arrays
        arrays.walk.on_holes = GO_ON
        holes = [domain.failure for domain in runner.machine.domains]
        down: list[int] = []
        changes, expected = [], []
        for _ in range(len(holes) // 2):
            if down and rng.random() < 0.3:
                mended = down.pop(int(rng.integers(0, len(down))))
                changes.append(-1 - mended)
            else:
                left = [hole for hole in range(len(holes)) if hole not in down]
                changes.append(int(rng.choice(left)))
                down.append(changes[-1])
            broken = asked.mesh.without(*(holes[hole] for hole in down))
            expected.append(largest_part(broken).n_live)
            n_cut += expected[-1] < broken.n_live
        found = np.zeros(len(changes), dtype=np.int64)

        usable_after(arrays.walk, arrays.cells, np.array(changes), found)

        assert found.tolist() == expected
    assert n_cut > 20
