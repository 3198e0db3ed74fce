"""A sharded update: no weight is used before its owner has updated it, and mutants are caught."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import UnsupportedError, VerificationError
from meshmend.planning.proof import prove
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.proofs import check_updates
from meshmend.schedule.table import COPY, REDUCE, Collective, Schedule
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.transport import reference
from strategies import Row, connected_meshes, schedule_from

UPDATE = Collective.SHARDED_UPDATE
# Three ranks in a line; rank 0 owns the chunk.
UP: list[Row] = [(2, 1, 0, 1, REDUCE), (1, 0, 0, 1, REDUCE)]
DOWN: list[Row] = [(0, 1, 0, 1, COPY), (1, 2, 0, 1, COPY)]


def line(rows: list[Row], owner: int = 0) -> Schedule:
    return schedule_from(rows, n_ranks=3, n_chunks=1, collective=UPDATE, owners=[owner])


def built(mesh: Mesh, name: str) -> Schedule:
    try:
        return ALGORITHMS[name].build(mesh, UPDATE)
    except UnsupportedError:
        return ALGORITHMS["trees"].build(mesh, UPDATE)


@settings(max_examples=60, deadline=None)
@given(connected_meshes(), st.sampled_from(sorted(ALGORITHMS)))
def test_every_algorithm_gives_all_ranks_the_updated_weights(mesh: Mesh, name: str) -> None:
    schedule = built(mesh, name)
    n_elements = 3 * schedule.n_chunks
    rng = np.random.default_rng(0)
    gradients = [rng.integers(-9, 9, n_elements) for _ in range(mesh.n_live)]

    prove(mesh, schedule)
    weights = reference.run(schedule, gradients, update=lambda total: 1000 - 3 * total)

    for mine in weights:
        assert np.array_equal(mine, 1000 - 3 * np.sum(gradients, axis=0))


@pytest.mark.parametrize("name", ["trees", "rings-nd"])
def test_every_rank_owns_an_equal_share(name: str) -> None:
    mesh = parse_mesh("8x8", fail=["4x2@2,2"])

    assert np.allclose(ALGORITHMS[name].build(mesh, UPDATE).shares, 1 / 56)


def test_the_smallest_update_is_right() -> None:
    check_updates(line(UP + DOWN))


def test_a_sum_that_another_rank_than_the_owner_sends_out_is_no_weight() -> None:
    """As a sum it is right: rank 0 has the data of all. But rank 1 owns the chunk."""
    schedule = line(UP + DOWN, owner=1)
    check_contributions(schedule)

    with pytest.raises(VerificationError, match=r"row 2, .* moves chunk 0, which is no updated"):
        check_updates(schedule)


def test_a_sum_that_goes_on_before_its_update_is_caught() -> None:
    """Rank 1 forwards its own full sum while the owner has not updated: exactly the fault."""
    rows: list[Row] = [
        (0, 1, 0, 1, REDUCE),
        (2, 1, 0, 1, REDUCE),
        (1, 2, 0, 1, COPY),  # every contribution once, but no weight
        (1, 0, 0, 1, COPY),
    ]
    schedule = line(rows, owner=0)
    check_contributions(schedule)

    with pytest.raises(VerificationError, match="rank 0 owns it"):
        prove(parse_mesh("3"), schedule)


def test_a_gradient_that_is_added_to_a_weight_is_caught() -> None:
    rows: list[Row] = [(1, 0, 0, 1, REDUCE), (0, 1, 0, 1, COPY), (2, 0, 0, 1, REDUCE)]

    with pytest.raises(VerificationError, match="rank 0 holds as an updated weight already"):
        check_updates(line(rows))


def test_a_weight_that_is_added_to_a_sum_is_caught() -> None:
    rows: list[Row] = [(1, 0, 0, 1, REDUCE), (0, 1, 0, 1, COPY), (1, 2, 0, 1, REDUCE)]

    with pytest.raises(VerificationError, match="it is a weight, no sum"):
        check_updates(line(rows))


@settings(max_examples=60, deadline=None)
@given(connected_meshes(), st.sampled_from(sorted(ALGORITHMS)), st.randoms(use_true_random=False))
def test_a_copy_that_is_moved_before_its_weight_is_there_is_caught(
    mesh: Mesh, name: str, random: object
) -> None:
    """The mutant: some copy is sent before the row that brought the weight, or its last sum."""
    schedule = built(mesh, name)
    check_updates(schedule)
    copies = np.flatnonzero(schedule.op == COPY)
    if not len(copies):
        return
    row = int(copies[random.randrange(len(copies))])  # type: ignore[attr-defined]
    chunk = int(schedule.lo[row])
    first_sum = int(
        np.flatnonzero((schedule.lo <= chunk) & (chunk < schedule.hi) & (schedule.op == REDUCE))[0]
    )
    order = np.insert(np.delete(np.arange(schedule.n_rows), row), first_sum, row)
    columns = {name: getattr(schedule, name)[order] for name in ("src", "dst", "lo", "hi", "op")}
    mutant = replace(schedule, **columns)

    with pytest.raises(VerificationError):
        prove(mesh, mutant)


def test_other_collectives_have_nothing_to_update() -> None:
    check_updates(ALGORITHMS["ring-1d"].build(parse_mesh("4x4"), Collective.ALLREDUCE))
