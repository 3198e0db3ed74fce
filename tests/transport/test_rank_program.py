"""What one rank does of a schedule, where its bytes lie, adding up, and the one-tree builders."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from local_ranks import programs_of
from meshmend.errors import InputError
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.contributions import check_contributions
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.spanning import broadcast, tree_sum
from meshmend.schedule.table import COPY, REDUCE, Collective, Rows, schedule_of
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.transport.combine import DTYPES, OPS, combine, combine_code, describe_code
from meshmend.transport.tasks import ADD, PUT, SEND, layout_of, rank_program

HOLE = parse_mesh("4x4", fail=["2x2@0,2"])


def test_the_smallest_star_by_hand() -> None:
    """Ranks 1 and 2 add to rank 0, which sends the sum back to both."""
    both, zero = np.array([1, 2]), np.array([0, 0])
    up = Rows(src=both, dst=zero, lo=zero, hi=zero + 1, op=REDUCE)
    down = Rows(src=zero, dst=both, lo=zero, hi=zero + 1, op=COPY)
    schedule = schedule_of(
        [("up", up), ("down", down)],
        algorithm="star",
        collective=Collective.ALLREDUCE,
        owners=np.array([0]),
        n_ranks=3,
    )

    hub, leaf = (rank_program(schedule, hazards_of(schedule), rank) for rank in (0, 1))

    assert hub.kind.tolist() == [ADD, ADD, SEND, SEND]
    assert hub.peer.tolist() == [1, 2, 1, 2]
    assert hub.needs.tolist() == [0, 1, 2, 2]  # the second addition waits for the first
    assert hub.following.tolist() == [1, 2, 3, 2, 3]
    assert (leaf.row.tolist(), leaf.kind.tolist()) == ([0, 2], [SEND, PUT])
    assert leaf.needs.tolist() == [0, 1]  # it must have sent before it is overwritten
    assert leaf.peers == (0,)


def test_a_rank_that_is_not_there_is_refused() -> None:
    schedule = tree_sum(HOLE)
    with pytest.raises(InputError, match="one-tree has ranks 0 to 11, but got rank 12"):
        rank_program(schedule, hazards_of(schedule), 12)


@given(
    name=st.sampled_from(["ring-1d", "ft-two-d", "rings-nd", "rank-ring"]),
    n_elements=st.integers(0, 5000),
    n_slices=st.integers(1, 7),
)
def test_both_ends_of_a_row_agree_on_where_its_bytes_lie(
    name: str, n_elements: int, n_slices: int
) -> None:
    schedule = algorithm(name).build(HOLE, Collective.ALLREDUCE)
    places: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for rank in range(3):
        program = rank_program(schedule, hazards_of(schedule), rank)
        layout = layout_of(program, n_elements, itemsize=4, n_slices=n_slices)
        for key, (start, size) in enumerate(zip(layout.start, layout.size, strict=True)):
            part, move = divmod(key, program.n_moves)
            places.setdefault((part, int(program.row[move])), set()).add((int(start), int(size)))

    assert all(len(spans) == 1 for spans in places.values())


@given(n_elements=st.integers(0, 5000), n_slices=st.integers(1, 7))
def test_the_slices_of_a_chunk_lie_end_to_end(n_elements: int, n_slices: int) -> None:
    (program, *_) = programs_of(tree_sum(HOLE))

    layout = layout_of(program, n_elements, itemsize=4, n_slices=n_slices)

    starts = layout.start.reshape(n_slices, -1)
    ends = starts + layout.size.reshape(n_slices, -1)
    assert (starts[0] == 0).all()
    assert (starts[1:] == ends[:-1]).all()
    assert (ends[-1] == 4 * n_elements).all()


@pytest.mark.parametrize("op", OPS)
def test_halves_are_combined_as_numpy_does_bit_for_bit(op: str) -> None:
    rng = np.random.default_rng(0)
    patterns = np.arange(1 << 16, dtype=np.uint16)
    kept, sent = patterns.view(np.float16), rng.permutation(patterns).view(np.float16)
    ufunc = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    with np.errstate(all="ignore"):
        expected = ufunc(kept, sent)

    result = kept.copy()
    combine(combine_code("float16", op), result.view(np.uint8), sent.copy().view(np.uint8))

    np.testing.assert_array_equal(result, expected)


def test_upper_halves_are_rounded_to_nearest_even() -> None:
    """1 + 2^-8 lies between two bfloat16 numbers, of which 1 is even; 1 + 3 x 2^-8 goes up."""
    kept = np.array([0x3F80, 0x3F81, 0x7F80, 0x7FC0], dtype=np.uint16)  # 1, 1 + 2^-7, inf, nan
    sent = np.array([0x3B80, 0x3B80, 0xFF80, 0x3F80], dtype=np.uint16)  # 2^-8, 2^-8, -inf, 1

    combine(combine_code("bfloat16"), kept.view(np.uint8), sent.view(np.uint8))

    assert kept[:2].tolist() == [0x3F80, 0x3F82]
    assert all(bits & 0x7FFF > 0x7F80 for bits in kept[2:].tolist())


def test_codes_say_what_they_are_and_unknown_types_are_refused() -> None:
    described = {describe_code(combine_code(dtype, op)) for dtype in DTYPES for op in OPS}
    assert len(described) == len(DTYPES) * len(OPS)
    with pytest.raises(InputError, match=r"one of the types float32, .* but got 'complex64'"):
        combine_code("complex64")


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    root=st.integers(0, 10_000),
)
def test_one_tree_broadcasts_and_sums_right_on_any_mesh(shape: list[int], root: int) -> None:
    mesh = Mesh(tuple(shape))

    for schedule in (broadcast(mesh, root % mesh.n_live), tree_sum(mesh)):
        check_contributions(schedule)
        for src, dst in zip(schedule.src.tolist(), schedule.dst.tolist(), strict=True):
            assert dst in mesh.neighbor_ranks[src]


def test_a_broadcast_from_nowhere_is_refused() -> None:
    with pytest.raises(InputError, match="needs a root below 12, but got 12"):
        broadcast(HOLE, 12)


def test_every_rank_knows_its_peers() -> None:
    programs = programs_of(tree_sum(HOLE))
    for program in programs:
        for peer in program.peers:
            assert program.rank in programs[peer].peers
