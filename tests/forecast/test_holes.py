"""How many chips can go on around holes, against a search through the mesh itself."""

import numpy as np
import pytest

from forecasts import DAY_S, prices_of, scenario
from meshmend.forecast.forecasting import year_runner
from meshmend.forecast.intact_box import forget_box
from meshmend.forecast.machine import Ints, machine_of
from meshmend.forecast.scenario import RepairModel, Scenario
from meshmend.forecast.walk import add_hole, remove_hole, usable_chips
from meshmend.forecast.walk_arrays import (
    GO_ON,
    ON_HOLES,
)
from meshmend.kernels import kernel
from meshmend.topology.graph import largest_part

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
def usable_after(own: Ints, changes: Ints, found: Ints) -> None:
    """Write down the usable chips after each change: hole h fails, or for -1 - h is repaired."""
    forget_box(own)
    for at in range(len(changes)):
        if changes[at] >= 0:
            add_hole(own, changes[at])
        else:
            remove_hole(own, -1 - changes[at])
        found[at] = usable_chips(own)


@pytest.mark.parametrize("name", MACHINES)
def test_the_chips_that_go_on_are_the_largest_part_of_the_mesh(name: str) -> None:
    """Chips, links and hosts fail in chains and clumps, so that often something is cut off."""
    asked = MACHINES[name]
    rng = np.random.default_rng(7)
    n_cut = 0
    for _ in range(12):
        runner = year_runner(machine_of(asked), prices_of(asked))
        runner.own[ON_HOLES] = GO_ON
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

        usable_after(runner.own, np.array(changes), found)

        assert found.tolist() == expected
    assert n_cut > 20
