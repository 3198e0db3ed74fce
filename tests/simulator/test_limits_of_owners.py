"""The limits of collectives in which ranks own parts: by hand, and nothing beats them."""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.errors import UnsupportedError
from meshmend.schedule.algorithms import ALGORITHMS
from meshmend.schedule.table import COPY, REDUCE, Collective, Schedule
from meshmend.simulator.limit import Limit, limit
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from simulated_time import program_s, programmed, time_s
from strategies import Row, connected_meshes, schedule_from

ROUNDING = 1 - 1e-9
SCATTER, GATHER, UPDATE = (
    Collective.REDUCE_SCATTER,
    Collective.ALL_GATHER,
    Collective.SHARDED_UPDATE,
)
UNIT = Fabric("unit", link_bandwidth_bytes_per_s=1.0, hop_latency_s=1.0, message_overhead_s=0.0)
FABRICS = [
    Fabric("reference", 70e9, 0.5e-6, 50e-9),
    Fabric("slow chips", 70e9, 0.5e-6, 50e-9, 20e9),
    Fabric("slow updates", 70e9, 0.5e-6, 50e-9, update_bytes_per_s=1e9),
    Fabric("no overhead", 1e9, 1e-6, 0.0),
    Fabric("no latency", 1e9, 0.0, 1e-7),
    Fabric("long hops", 1e9, 1e-3, 1e-4),
]
MACHINES = (Fabric("unit", 1.0, 1.0, 0.25), Fabric("bytes", 1.0, 0.01, 0.001))


def test_a_corner_sends_all_but_its_own_share_over_its_two_links() -> None:
    bound = limit(parse_mesh("4x4"), UNIT, 1600, SCATTER)

    assert bound.bandwidth_s == 750  # 15 of 16 shares of 100 bytes, over 2 links
    assert bound.time_s == 750 + 1
    assert bound.kind == "exit"
    assert "0.938 of the payload leaves chip (0, 0) over 2 links" in bound.describe()


def test_a_gather_is_a_scatter_backwards() -> None:
    scatter, gather = (limit(parse_mesh("4x4"), UNIT, 1600, half) for half in (SCATTER, GATHER))

    assert gather.time_s == scatter.time_s
    assert gather.kind == "entry"
    assert "0.938 of the payload enters chip (0, 0)" in gather.describe()


def test_a_short_payload_has_to_reach_the_owner_farthest_away() -> None:
    bound = limit(parse_mesh("4x4"), UNIT, 1.6, SCATTER)

    # The opposite corner owns 0.1 bytes, 6 hops away; 5 hops have owners of 0.3 bytes.
    assert bound.time_s == pytest.approx(6 + 0.05)
    assert bound.latency_s == 6


def test_a_narrow_way_between_two_halves_binds_a_reduce_scatter() -> None:
    mesh = parse_mesh("2x4", fail=["link:0,1-0,2"])
    bound = limit(mesh, UNIT, 800, SCATTER)

    assert bound.time_s == 400 + 2 + 1  # half of the payload crosses, after two hops inside
    assert "leaves the 4 chips around" in bound.describe()
    slow = mesh.slowed("link:1,1-1,2=0.5")
    assert limit(slow, UNIT, 800, SCATTER).time_s == 2 * 400 + 2 + 1


def test_a_sharded_update_of_nothing_goes_to_the_corner_and_back() -> None:
    bound = limit(parse_mesh("4x4"), UNIT, 1e-6, UPDATE)

    assert bound.kind == "exit"  # what leaves a corner for the opposite one comes back
    assert bound.time_s == pytest.approx(12)


def test_slow_updates_bind_by_the_share_of_one_chip() -> None:
    slow = UNIT.with_(update_bytes_per_s=0.01)
    bound = limit(parse_mesh("2x2"), slow, 100, UPDATE)

    assert bound.kind == "update"
    assert bound.time_s == 2 + 25 / 0.01 + 2  # two hops to a corner, and two hops back
    assert "an owner hears from all chips" in bound.describe()


def test_one_chip_only_updates() -> None:
    assert limit(parse_mesh("1"), UNIT, 100, UPDATE).time_s == 0
    assert limit(parse_mesh("1"), UNIT, 100, SCATTER).time_s == 0
    slow = UNIT.with_(update_bytes_per_s=2.0)
    assert limit(parse_mesh("1"), slow, 100, UPDATE).time_s == 50


def test_a_gather_and_an_all_to_all_add_nothing() -> None:
    slow = UNIT.with_(chip_bandwidth_bytes_per_s=0.01)

    for collective in (GATHER, Collective.ALL_TO_ALL):
        assert limit(parse_mesh("2x2"), slow, 100, collective).chip_s is None
    assert limit(parse_mesh("2x2"), slow, 100, SCATTER).kind == "chip"


def test_in_a_gather_chips_hear_from_the_owners_alone() -> None:
    """On 4x4 a chip hears from 2, then 14, then all; a sum needs all of them whoever owns it."""
    mesh = parse_mesh("4x4")

    def rounds(n_owners: int, collective: Collective) -> tuple[int, ...]:
        shares = np.where(np.arange(16) < n_owners, 1 / n_owners, 0.0)
        return limit(mesh, UNIT, 0, collective, shares=shares).rounds

    assert [rounds(n, GATHER) for n in (1, 2, 4, 16)] == [(0,), (1,), (2,), (3,)]
    assert [rounds(n, SCATTER) for n in (1, 2, 4, 16)] == 4 * [(3,)]
    assert rounds(2, UPDATE) == (3, 1)


def test_a_chip_that_owns_more_sends_less() -> None:
    shares = np.array([0.5, 0.5, 0.0, 0.0])
    bound = limit(parse_mesh("2x2"), UNIT, 100, SCATTER, shares=shares)

    assert bound.bandwidth_s == 50  # ranks 2 and 3 send all of it over two links each


@settings(max_examples=150, deadline=None)
@given(
    connected_meshes(),
    st.sampled_from(sorted(ALGORITHMS)),
    st.sampled_from([SCATTER, GATHER, UPDATE]),
    st.sampled_from(FABRICS),
    st.floats(0, 1e8),
    st.integers(1, 5),
)
def test_no_algorithm_beats_it_on_any_mesh(
    mesh: Mesh, name: str, collective: Collective, machine: Fabric, size: float, slices: int
) -> None:
    try:
        schedule = ALGORITHMS[name].build(mesh, collective)
    except UnsupportedError:
        schedule = ALGORITHMS["trees"].build(mesh, collective)

    bound = limit(mesh, machine, size, collective, shares=schedule.shares)
    assert time_s(mesh, schedule, machine, size, slices) >= ROUNDING * bound.time_s


Ways = list[tuple[int, int]]  # who sends to whom, in order


def ways_to(owner: int, n_ranks: int) -> Iterator[Ways]:
    """Yield every list of sends after which a rank has the data of all, each rank sending once.

    A rank sends after all that was sent to it. What sends twice adds twice, so this is all.
    """
    others = [rank for rank in range(n_ranks) if rank != owner]
    for targets in product(range(n_ranks), repeat=len(others)):
        to = dict(zip(others, targets, strict=True))
        depth = {rank: _depth(rank, to, owner) for rank in others}
        if None not in depth.values():
            yield sorted(to.items(), key=lambda way: -(depth[way[0]] or 0))


def _depth(rank: int, to: dict[int, int], owner: int) -> int | None:
    steps = 0
    while rank != owner:
        rank, steps = to[rank], steps + 1
        if steps > len(to):
            return None
    return steps


def rows_of(collective: Collective, chunk: int, there: Ways, back: Ways) -> list[Row]:
    up: list[Row] = [(src, dst, chunk, chunk + 1, REDUCE) for src, dst in there]
    down: list[Row] = [(dst, src, chunk, chunk + 1, COPY) for src, dst in reversed(back)]
    return {SCATTER: up, GATHER: down}.get(collective, up + down)


def searched(mesh: Mesh, collective: Collective) -> Iterator[Schedule]:
    """Yield every choice of ways there and back for each owner, or 300 of them if they are more."""
    n_ranks, rng = mesh.n_live, np.random.default_rng(0)
    ways = [list(product(ways_to(owner, n_ranks), repeat=2)) for owner in range(n_ranks)]
    choices = list(product(*ways)) if n_ranks <= 3 else []
    for at in range(len(choices) or 300):
        picked = choices[at] if choices else [each[rng.integers(len(each))] for each in ways]
        rows: list[Row] = []
        for chunk in rng.permutation(n_ranks).tolist():
            rows += rows_of(collective, chunk, *picked[chunk])
        owners = list(range(n_ranks))
        yield schedule_from(
            rows, n_ranks=n_ranks, n_chunks=n_ranks, collective=collective, owners=owners
        )


@pytest.mark.parametrize("shape", ["2", "3", "2x2", "1x4"])
@pytest.mark.parametrize("collective", [SCATTER, GATHER, UPDATE])
def test_no_schedule_of_a_search_beats_it(shape: str, collective: Collective) -> None:
    """Every chunk goes to its owner by some tree of sends, over any pairs, and comes back so."""
    mesh = parse_mesh(shape)
    bounds = [limit(mesh, *case, collective) for case in product(MACHINES, (0.01, 8.0))]
    for schedule in searched(mesh, collective):
        program = programmed(mesh, schedule)
        for bound in bounds:
            assert program_s(program, bound.fabric, bound.payload_bytes, 2) >= (
                ROUNDING * bound.time_s
            )


def all_leaves(bound: Limit) -> float:
    """A mutant: as if a chip's own share left it too, in a reduce-scatter."""
    assert bound.exit is not None
    return bound.time_s + bound.payload_bytes / bound.packing.mesh.n_live / (
        bound.exit.n_links * bound.fabric.link_bandwidth_bytes_per_s
    )


def to_the_farthest(bound: Limit) -> float:
    """A mutant: as if all that leaves went to the chip farthest away."""
    return bound.bandwidth_s + bound.latency_s


def one_after_the_other(bound: Limit) -> float:
    """A mutant: as if no part could come back before all had arrived."""
    halves = (SCATTER, GATHER)
    return sum(
        limit(bound.packing.mesh, bound.fabric, bound.payload_bytes, half).time_s for half in halves
    )


CATCHES = [
    (all_leaves, parse_mesh("4", wrap="all"), "rings-nd", SCATTER, FABRICS[3], 1e9, 64),
    (to_the_farthest, parse_mesh("8x8x8", wrap="all"), "rings-nd", GATHER, FABRICS[3], 1e7, 4),
    (one_after_the_other, parse_mesh("4x4"), "trees", UPDATE, FABRICS[3], 1e9, 64),
]


@pytest.mark.parametrize(
    ("mutant", "mesh", "name", "collective", "machine", "size", "slices"), CATCHES
)
def test_a_bound_that_says_more_is_caught(
    mutant: Callable[[Limit], float],
    mesh: Mesh,
    name: str,
    collective: Collective,
    machine: Fabric,
    size: float,
    slices: int,
) -> None:
    bound = limit(mesh, machine, size, collective)
    taken_s = time_s(mesh, ALGORITHMS[name].build(mesh, collective), machine, size, slices)

    assert bound.time_s <= taken_s / ROUNDING < mutant(bound)
