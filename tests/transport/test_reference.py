"""The reference executor: sums are sums, for any dtype, size and shape, alike on all ranks."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.table import Collective, Schedule
from meshmend.topology.mesh import Mesh
from meshmend.transport.reference import chunk_at, element_bounds, run, run_chunk
from strategies import meshes_with_dead_blocks

HOLE = Mesh((4, 4)).without("2x2@0,2")
FULL = Mesh((3, 4))
CASES = [
    ("ring-1d", HOLE),
    ("ft-two-d", HOLE),
    ("rank-ring", Mesh((2, 3)).without("0,1")),
    ("two-d", FULL),
    ("row-pair", FULL),
    ("rings-nd", HOLE),
    ("rings-nd", Mesh((4, 3), (True, True)).without("1,1")),
    ("rings-nd", Mesh((2, 2, 4), (True,) * 3)),
]


def built(name: str, mesh: Mesh, collective: Collective = Collective.ALLREDUCE) -> Schedule:
    return ALGORITHMS[name].build(mesh, collective)


def some_arrays(n_ranks: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> list[Any]:
    """Small whole numbers: their sums are exact in every dtype that holds them."""
    random = np.random.default_rng(seed)
    low = 0 if np.dtype(dtype).kind in "bu" else -4
    values = random.integers(low, 5, size=(n_ranks, *shape))
    if np.dtype(dtype).kind == "c":
        return list(values + 1j * values[::-1])
    return list(values.astype(dtype))


DTYPES = ["f2", "f4", "f8", "g", "i1", "i2", "i4", "i8", "u1", "u4", "c8", "c16", "O"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_allreduce_is_the_sum_for_any_dtype(name: str, mesh: Mesh, dtype: str) -> None:
    arrays = [array.astype(dtype) for array in some_arrays(mesh.n_live, (100,), dtype)]
    results = run(built(name, mesh), arrays)

    for result in results:
        assert result.dtype == np.dtype(dtype)
        assert_array_equal(result, sum(arrays[1:], arrays[0]))


@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (), (3, 7), (2, 3, 5), (0, 4), (997,)])
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_allreduce_takes_any_shape_also_smaller_than_the_chunks(
    name: str, mesh: Mesh, shape: tuple[int, ...]
) -> None:
    arrays = some_arrays(mesh.n_live, shape, "i8")
    results = run(built(name, mesh), [np.asarray(array) for array in arrays])

    for result in results:
        assert result.shape == shape
        assert_array_equal(result, np.sum(arrays, axis=0))


@settings(max_examples=40)
@given(meshes_with_dead_blocks(max_side=6, wrap=False), st.integers(0, 300), st.integers(0, 99))
def test_real_numbers_sum_up_and_end_bitwise_equal_on_all_ranks(
    mesh: Mesh, size: int, seed: int
) -> None:
    arrays = list(np.random.default_rng(seed).normal(size=(mesh.n_live, size)).astype("f4"))
    results = run(built("ring-1d", mesh), arrays)

    assert_allclose(results[0], np.sum(arrays, axis=0), rtol=1e-4, atol=1e-4)
    assert {result.tobytes() for result in results} == {results[0].tobytes()}


@pytest.mark.parametrize(("name", "mesh"), CASES)
@pytest.mark.parametrize("combine", [np.maximum, np.minimum, np.logical_or, np.multiply])
def test_other_ways_to_combine(name: str, mesh: Mesh, combine: np.ufunc) -> None:
    dtype = "?" if combine is np.logical_or else "i8"
    arrays = some_arrays(mesh.n_live, (50,), dtype)
    expected = combine.reduce(arrays, axis=0)

    for result in run(built(name, mesh), arrays, combine=combine):
        assert_array_equal(result, expected)


@pytest.mark.parametrize(("name", "mesh"), CASES)
@pytest.mark.parametrize("size", [0, 1, 7, 240, 1001])
def test_reduce_scatter_then_all_gather_is_allreduce(name: str, mesh: Mesh, size: int) -> None:
    arrays = list(np.random.default_rng(1).normal(size=(mesh.n_live, size)))
    shards = run(built(name, mesh, Collective.REDUCE_SCATTER), arrays)
    gathered = run(built(name, mesh, Collective.ALL_GATHER), shards)
    whole = run(built(name, mesh), arrays)

    assert sum(shard.size for shard in shards) == size
    for one, other in zip(gathered, whole, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_reduce_scatter_leaves_each_owner_its_chunks(name: str, mesh: Mesh) -> None:
    schedule = built(name, mesh, Collective.REDUCE_SCATTER)
    arrays = some_arrays(mesh.n_live, (333,), "i8")
    total, bounds = np.sum(arrays, axis=0), element_bounds(schedule, 333)

    for rank, shard in enumerate(run(schedule, arrays)):
        chunks = np.nonzero(schedule.owners == rank)[0]
        parts = [total[bounds[chunk] : bounds[chunk + 1]] for chunk in chunks]
        assert_array_equal(shard, np.concatenate([[], *parts]))


def test_inputs_are_left_as_they_are() -> None:
    arrays = some_arrays(HOLE.n_live, (64,), "f8")
    before = [array.copy() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    run(built("ft-two-d", HOLE), arrays)

    for array, copy in zip(arrays, before, strict=True):
        assert_array_equal(array, copy)


def test_strided_inputs_are_read_right() -> None:
    arrays = [array.T for array in some_arrays(HOLE.n_live, (6, 5), "i4")]

    for result in run(built("ring-1d", HOLE), arrays):
        assert_array_equal(result, np.sum(arrays, axis=0))


@given(st.integers(0, 10**6))
def test_chunks_share_out_all_elements_in_order(n_elements: int) -> None:
    bounds = element_bounds(built("ft-two-d", HOLE), n_elements)

    assert (bounds[0], bounds[-1]) == (0, n_elements)
    assert np.all(np.diff(bounds) >= 0)
    assert np.ptp(np.diff(bounds)) <= 1  # equal chunks differ by one element at most


def zeros(*sizes: int, dtype: str = "f8") -> list[NDArray[Any]]:
    return [np.zeros(size, dtype=dtype) for size in sizes]


TWO = Mesh((1, 2))


@pytest.mark.parametrize(
    ("collective", "arrays", "message"),
    [
        (Collective.ALLREDUCE, [], "ring-1d needs one array per rank, 2, but got 0"),
        (Collective.ALLREDUCE, zeros(4), "needs one array per rank, 2, but got 1"),
        (Collective.ALLREDUCE, zeros(4, 4, 4), "needs one array per rank, 2, but got 3"),
        (
            Collective.ALLREDUCE,
            zeros(4, 5),
            r"of one dtype and shape, but rank 0 has float64 \(4,\) and rank 1 has float64 \(5,\)",
        ),
        (
            Collective.REDUCE_SCATTER,
            [*zeros(4), *zeros(4, dtype="f4")],
            r"rank 1 has float32 \(4,\)",
        ),
        (
            Collective.ALL_GATHER,
            zeros(1, 3),
            r"all-gather of 4 elements needs 2 of float64 from rank 0, but got float64 \(1,\)",
        ),
        (
            Collective.ALL_GATHER,
            [*zeros(2), *zeros(2, dtype="f4")],
            r"needs 2 of float64 from rank 1, but got float32 \(2,\)",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    collective: Collective, arrays: list[NDArray[Any]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(built("ring-1d", TWO, collective), arrays)


@pytest.mark.parametrize("n_slices", [1, 3])
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_few_elements_are_summed_again_to_the_same_bits(
    name: str, mesh: Mesh, n_slices: int
) -> None:
    schedule, n_elements = built(name, mesh), 101
    random = np.random.default_rng(1)
    arrays = [random.normal(size=n_elements).astype("f4") for _ in range(mesh.n_live)]
    edges = n_elements * np.arange(n_slices + 1) // n_slices
    if np.all(schedule.hi.astype(int) - schedule.lo == 1):
        edges = np.array([0, n_elements])  # such tables cut each chunk in slices
    whole = [
        np.concatenate(parts)
        for parts in zip(
            *(
                run(schedule, [array[low:high] for array in arrays])
                for low, high in pairwise(edges)
            ),
            strict=True,
        )
    ]

    for element in range(0, n_elements, 7):
        chunk, start, stop = chunk_at(schedule, n_elements, element, n_slices=n_slices)
        assert start <= element < stop
        again = run_chunk(schedule, chunk, [array[start:stop] for array in arrays])
        for rank, result in enumerate(again):
            assert result.tobytes() == whole[rank][start:stop].tobytes()
