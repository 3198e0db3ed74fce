"""Nothing beats the limit: not our schedules, not those that a search finds; and it is tight."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import UnsupportedError
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.spanning import tree_sum
from meshmend.schedule.table import COPY, REDUCE, Collective, Schedule
from meshmend.simulator.limit import Limit, limit
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from simulated_time import program_s, programmed, time_s
from strategies import Row, connected_meshes, schedule_from, with_slow_links

ROUNDING = 1 - 1e-9
FABRICS = [
    Fabric("reference", 70e9, 0.5e-6, 50e-9),
    Fabric("slow chips", 70e9, 0.5e-6, 50e-9, 20e9),
    Fabric("no overhead", 1e9, 1e-6, 0.0),
    Fabric("no latency", 1e9, 0.0, 1e-7),
    Fabric("long hops", 1e9, 1e-3, 1e-4),
]


@settings(max_examples=120, deadline=None)
@given(
    connected_meshes(),
    st.sampled_from(sorted(ALGORITHMS)),
    st.sampled_from(FABRICS),
    st.floats(0, 1e8),
    st.integers(1, 5),
    st.integers(0, 2**32 - 1),
)
def test_no_algorithm_beats_it_on_any_mesh(
    mesh: Mesh, name: str, machine: Fabric, size: float, slices: int, seed: int
) -> None:
    mesh = with_slow_links(mesh, seed, of=len(mesh.links) // 3)
    try:
        schedule = ALGORITHMS[name].build(mesh, Collective.ALLREDUCE)
    except UnsupportedError:
        schedule = tree_sum(mesh)

    taken_s = time_s(mesh, schedule, machine, size, slices)
    assert taken_s >= ROUNDING * limit(mesh, machine, size).time_s


Cells = tuple[int, ...]  # which ranks' data each rank holds, as bits


def all_sums(n_ranks: int, n_rows: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield every list of rows (src, dst, op) of one chunk that ends with all sums everywhere.

    Rows that add data twice, or overwrite data with less, are left out: they help no schedule.
    """
    pairs = [(src, dst) for src in range(n_ranks) for dst in range(n_ranks) if src != dst]
    whole = (1 << n_ranks) - 1

    def grown(
        cells: Cells, rows: list[tuple[int, int, int]]
    ) -> Iterator[list[tuple[int, int, int]]]:
        missing = sum(cell != whole for cell in cells)
        if not missing:
            yield rows
        if len(rows) + missing > n_rows or not missing:
            return
        for src, dst in pairs:
            here, there = cells[src], cells[dst]
            if not here & there:
                after = (*cells[:dst], here | there, *cells[dst + 1 :])
                yield from grown(after, [*rows, (src, dst, REDUCE)])
            elif here != there and here & there == there:
                after = (*cells[:dst], here, *cells[dst + 1 :])
                yield from grown(after, [*rows, (src, dst, COPY)])

    yield from grown(tuple(1 << rank for rank in range(n_ranks)), [])


TINY = [("2", 3), ("3", 5), ("2x2", 6), ("1x4", 6)]
MACHINES = [
    Fabric("unit", 1.0, 1.0, 0.25),
    Fabric("bytes", 1.0, 0.01, 0.001),
    Fabric("no latency", 1.0, 0.0, 1.0),
]


def searched(shape: str, n_rows: int) -> Iterator[tuple[Mesh, Schedule]]:
    """Yield up to 400 of the schedules of one chunk, and of two chunks that go such ways."""
    mesh = parse_mesh(shape)
    found = list(all_sums(mesh.n_live, n_rows))
    few = found[:: max(1, len(found) // 20)]
    lists = [[rows] for rows in found[:: max(1, len(found) // 200)]]
    lists += [[one, other] for one in few for other in few[:: max(1, len(few) // 8)]]
    for chunks in lists:
        rows: list[Row] = [
            (src, dst, chunk, chunk + 1, op)
            for chunk, each in enumerate(chunks)
            for src, dst, op in each
        ]
        yield mesh, schedule_from(rows, n_ranks=mesh.n_live, n_chunks=len(chunks))


@pytest.mark.parametrize(("shape", "n_rows"), TINY)
def test_no_schedule_of_a_search_beats_it(shape: str, n_rows: int) -> None:
    n_found = 0
    bounds = [limit(parse_mesh(shape), *case) for case in product(MACHINES, (0.01, 8.0))]
    for mesh, schedule in searched(shape, n_rows):
        program = programmed(mesh, schedule)
        for bound in bounds:
            assert program_s(program, bound.fabric, bound.payload_bytes, 2) >= (
                ROUNDING * bound.time_s
            )
        n_found += 1
    assert n_found > 1


def hops_on_top(bound: Limit) -> float:
    """A mutant: bandwidth and the longest way added up."""
    return bound.bandwidth_s + bound.fabric.message_overhead_s + bound.latency_s


def there_and_back(bound: Limit) -> float:
    """A mutant: as if everything had to come back from the farthest chip."""
    return bound.time_s + bound.latency_s


def overhead_at_every_hop(bound: Limit) -> float:
    """A mutant: as if no message could pass a chip."""
    assert bound.exit is not None
    return bound.time_s + (bound.exit.hops - 1) * bound.fabric.message_overhead_s


def one_link_less(bound: Limit) -> float:
    """A mutant: the payload leaves over one link less."""
    assert bound.exit is not None
    n_links = max(1, bound.exit.n_links - 1)
    return bound.payload_bytes / (n_links * bound.fabric.link_bandwidth_bytes_per_s)


def to_each_alone(bound: Limit) -> float:
    """A mutant: as if no far chip could hear from another."""
    way = bound.exit
    assert way is not None
    bandwidth = way.capacity * bound.fabric.link_bandwidth_bytes_per_s
    sent_s = bound.fabric.message_overhead_s + way.n_far * bound.payload_bytes / bandwidth
    return way.hops * bound.fabric.hop_latency_s + sent_s


def halving(n_ranks: int) -> Schedule:
    """Return a sum on a line in messages of 1, 2, 4, ... hops that pass the chips between."""
    rows: list[Row] = []
    for hops in (2**step for step in range(n_ranks.bit_length() - 1)):
        rows += [(rank, rank - hops, 0, 1, REDUCE) for rank in range(hops, n_ranks, 2 * hops)]
    back = [(dst, src, 0, 1, COPY) for src, dst, *_ in reversed(rows)]
    return schedule_from([*rows, *back], n_ranks=n_ranks, n_chunks=1)


def built(mesh: Mesh, name: str) -> Schedule:
    return ALGORITHMS[name].build(mesh, Collective.ALLREDUCE)


TORUS, LINE, SQUARE = parse_mesh("8x8x8", wrap="all"), parse_mesh("32"), parse_mesh("4x4")
ODD = parse_mesh("5x5", wrap="all")
CATCHES = [
    (hops_on_top, TORUS, built(TORUS, "rings-nd"), FABRICS[2], 1e7, 2),
    (there_and_back, SQUARE, built(SQUARE, "trees"), FABRICS[0], 10.0, 1),
    (overhead_at_every_hop, LINE, halving(32), FABRICS[3], 1.0, 1),
    (to_each_alone, ODD, built(ODD, "trees"), FABRICS[0], 1e6, 8),
    (one_link_less, SQUARE, built(SQUARE, "trees"), FABRICS[2], 1e9, 32),
]


@pytest.mark.parametrize(("mutant", "mesh", "schedule", "machine", "size", "slices"), CATCHES)
def test_a_bound_that_says_more_is_caught(
    mutant: Callable[[Limit], float],
    mesh: Mesh,
    schedule: Schedule,
    machine: Fabric,
    size: float,
    slices: int,
) -> None:
    bound = limit(mesh, machine, size)
    taken_s = time_s(mesh, schedule, machine, size, slices)

    assert bound.time_s <= taken_s < ROUNDING * mutant(bound)
