"""Schedules are bit for bit what they were: a change that moves code must not move a byte.

`python tests/schedule/test_golden_schedules.py` writes the hashes anew. Do that only in a change
that means to alter schedules, and say so in its commit.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from meshmend.errors import UnsupportedError
from meshmend.planning.choose import choose, chosen_schedule
from meshmend.planning.target import Question
from meshmend.schedule.algorithms import ALGORITHMS, algorithm
from meshmend.schedule.spanning import broadcast, spread, tree_sum
from meshmend.schedule.table import Collective, Schedule
from meshmend.topology.fabric import FABRICS
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh

GOLDEN = Path(__file__).with_name("golden_schedules.json")

MESHES = (
    ("2x2", "none", ""),
    ("4x4", "none", ""),
    ("4x4", "none", "2x2@0,2"),
    ("4x4", "all", ""),
    ("5x3", "none", "1,1"),
    ("8x8", "none", ""),
    ("8x8", "none", "4x2@2,2"),
    ("6x8", "none", "link:2,2-2,3 5,7"),
    ("3x3x3", "all", "1,1,1"),
    ("7", "none", ""),
)
CHOSEN = (
    ("4x4", "none", "2x2@0,2"),
    ("8x8", "none", "2x2@2,2"),
    ("4x4x4", "all", "2x2x1@0,0,0"),
)
PAYLOADS = (1e3, 1e6, 1e8)


def cases(mesh: tuple[str, str, str]) -> Iterator[str]:
    """Yield the names of the cases of a mesh: its text, the algorithm, collective or payload."""
    if mesh in MESHES:
        for name in ALGORITHMS:
            yield from (
                "|".join((*mesh, name, collective)) for collective in ALGORITHMS[name].collectives
            )
        yield from ("|".join((*mesh, "spanning", kind)) for kind in ("broadcast", "sum", "spread"))
    if mesh in CHOSEN:
        yield from ("|".join((*mesh, "auto", f"{payload:g}")) for payload in PAYLOADS)


def all_meshes() -> list[tuple[str, str, str]]:
    return list(dict.fromkeys((*MESHES, *CHOSEN)))


def built(case: str) -> Schedule | None:
    """Return the schedule of a case, or None if the algorithm does not support the mesh."""
    shape, wrap, fail, name, what = case.split("|")
    mesh = parse_mesh(shape, wrap=wrap, fail=fail.split())
    if name == "auto":
        choice = choose(Question(mesh, float(what), FABRICS["reference"]))
        return chosen_schedule(mesh, choice, Collective.ALLREDUCE)
    if name == "spanning":
        return spanning(mesh, what)
    try:
        return algorithm(name).build(mesh, Collective(what))
    except UnsupportedError:
        return None


def spanning(mesh: Mesh, what: str) -> Schedule:
    """Return a schedule over one spanning tree or forest."""
    if what == "broadcast":
        return broadcast(mesh, mesh.n_live - 1)
    return tree_sum(mesh) if what == "sum" else spread(mesh, [0, mesh.n_live - 1])


def digest(schedule: Schedule | None) -> str:
    """Return a hash of every column of a schedule, its types included."""
    if schedule is None:
        return "unsupported"
    found = hashlib.sha256(f"{schedule.algorithm} {schedule.collective}".encode())
    columns = (schedule.src, schedule.dst, schedule.lo, schedule.hi, schedule.op)
    hashed: list[NDArray[Any]] = [schedule.cuts, schedule.owners, *columns]
    for column in (*hashed, *schedule.buffer_columns.values()):
        found.update(f"{column.dtype} {column.shape}".encode())
        found.update(column.tobytes())
    return found.hexdigest()[:32]


@pytest.fixture(scope="module")
def golden() -> dict[str, str]:
    """Return the hashes that were taken before."""
    hashes: dict[str, str] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return hashes


def test_the_set_has_at_least_forty_schedules(golden: dict[str, str]) -> None:
    assert set(golden) == {case for mesh in all_meshes() for case in cases(mesh)}
    assert sum(value != "unsupported" for value in golden.values()) >= 40


@pytest.mark.parametrize("mesh", all_meshes(), ids="|".join)
def test_the_schedules_of_a_mesh_are_bit_for_bit_what_they_were(
    mesh: tuple[str, str, str], golden: dict[str, str]
) -> None:
    changed = [case for case in cases(mesh) if digest(built(case)) != golden[case]]

    assert changed == []


if __name__ == "__main__":
    every = [case for mesh in all_meshes() for case in cases(mesh)]
    GOLDEN.write_text(
        json.dumps({case: digest(built(case)) for case in every}, indent=0) + "\n",
        encoding="utf-8",
    )
