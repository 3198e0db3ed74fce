"""Tables of moves give the bits of `plan.run`, whatever core is fast, and wrong tables do not."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from numpy.typing import NDArray

from meshmend import Mesh
from meshmend.errors import InputError, TransportError
from meshmend.planning.plan import Plan, plan
from meshmend.topology.text import parse_mesh
from meshmend.wormhole.compiler import Wiring, compiled
from meshmend.wormhole.experiment import Question, arrays_for, compared, dtype_of
from meshmend.wormhole.table import ADD, COPY, LOAD, PASS, SEND, WAIT, Core, Program
from wormhole_cables import wired, with_table
from wormhole_interpreter import Interpreter

Moves = NDArray[np.uint32]


@cache
def planned(shape: str, wrap: str, fail: str, algorithm: str, collective: str) -> Plan:
    failures = fail.split() if fail else ()
    return plan(parse_mesh(shape, wrap=wrap, fail=failures), algorithm, collective=collective)


def wrong_bits(made: Plan, program: Program, *, seed: int = 0) -> int:
    """Return how many elements differ after the interpreter walked the tables."""
    question = Question(made.mesh, program.n_elements * 4, program.type_name)
    arrays = [each[: program.n_elements] for each in arrays_for(question, program.n_ranks)]
    got = Interpreter(program, dtype_of(program.type_name)).run(arrays, seed=seed)
    return compared(made, program, arrays, got)[0]


@pytest.mark.parametrize(
    ("where", "algorithm", "collective"),
    [
        (("2x2", "none", ""), "trees", "allreduce"),
        (("1x2", "none", ""), "ring-1d", "allreduce"),
        (("4x4", "all", "2x2@1,1"), "trees", "allreduce"),
        (("3x3", "none", "1,1 link:0,0-0,1"), "trees", "allreduce"),
        (("2x4", "none", ""), "exchange", "allreduce"),  # with scratch buffers
        (("4x4", "none", "2x2@1,1"), "rings-nd", "reduce-scatter"),  # over several hops
        (("4x4", "none", "1,1"), "trees", "all-gather"),
        (("2x2x2", "none", ""), "trees", "allreduce"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, tuple) else it,
)
@pytest.mark.parametrize(
    ("type_name", "n_elements", "slices"),
    [("int32", 700, None), ("float32", 1201, 2), ("bfloat16", 97, 1)],
)
def test_tables_give_the_bits_of_the_plan(
    where: tuple[str, str, str],
    algorithm: str,
    collective: str,
    type_name: str,
    n_elements: int,
    slices: int | None,
) -> None:
    if type_name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    made = planned(*where, algorithm, collective)

    program = compiled(made, wired(made), n_elements=n_elements, type_name=type_name, slices=slices)

    assert wrong_bits(made, program) == 0


@pytest.mark.parametrize("seed", range(6))
def test_the_order_in_which_cores_run_changes_nothing(seed: int) -> None:
    made = planned("3x3", "none", "0,0", "trees", "allreduce")

    program = compiled(made, wired(made), n_elements=900, type_name="float32", slices=3)

    assert wrong_bits(made, program, seed=seed) == 0


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["all", "none"])
@pytest.mark.parametrize(
    "fail",
    [f"{row},{column}" for row, column in product(range(8), range(4))]
    + [f"2x2@{row},{column}" for row, column in product(range(7), range(3))],
)
def test_a_galaxy_less_any_chip_or_board(wrap: str, fail: str) -> None:
    made = planned("8x4", wrap, fail, "trees", "allreduce")

    program = compiled(made, wired(made), n_elements=1024, type_name="float32")

    assert wrong_bits(made, program) == 0


def sent_by(made: Plan, program: Program) -> dict[Core, int]:
    interpreter = Interpreter(program, np.dtype(np.int32))
    interpreter.run([np.ones(program.n_elements, np.int32)] * program.n_ranks)
    return interpreter.sent_bytes


def test_all_cables_of_a_link_carry_their_share() -> None:
    made = planned("2x2", "none", "", "trees", "allreduce")

    sent = sent_by(made, compiled(made, wired(made), n_elements=4096))

    assert len(sent) == 4 * 2 * 4
    for core, n_bytes in sent.items():
        first = Core(core.rank, core.channel // 4 * 4)
        assert n_bytes == sent[first] > 0


def test_lanes_of_a_lost_cable_go_over_those_that_are_left() -> None:
    made = planned("2x2", "none", "", "trees", "allreduce")
    lost = wired(made, lost=frozenset({(0, 1, 3), (0, 1, 1)}))

    program = compiled(made, lost, n_elements=1000, type_name="float32")

    assert wrong_bits(made, program) == 0
    assert Core(0, 4 * 3 + 3) not in program.moves  # port 3 of rank 0 leads to rank 1
    sent = sent_by(made, compiled(made, lost, n_elements=1000))
    assert sent[Core(0, 4 * 3 + 2)] == 2 * sent[Core(0, 4 * 1 + 2)] > 0


def test_a_payload_longer_than_memory_goes_through_in_slices() -> None:
    made = planned("1x2", "none", "", "trees", "allreduce")

    program = compiled(made, wired(made, 1), n_elements=100_000)

    assert program.n_slices == 25
    assert wrong_bits(made, program) == 0


def first_of(moves: Moves, op: int, at_least: int = 0) -> int:
    """Return the number of a table's first move of a kind that has bytes enough."""
    return int(np.flatnonzero((moves[:, 0] == op) & (moves[:, 3] >= at_least))[0])


def without_a_wait(moves: Moves) -> Moves:
    return np.delete(moves, np.flatnonzero((moves[:, 0] == WAIT) & (moves[:, 6] > 0)), axis=0)


def with_a_lower_counter(moves: Moves) -> Moves:
    changed = moves.copy()
    changed[changed[:, 0] == WAIT, 6] -= 1
    return changed


def with_a_higher_counter(moves: Moves) -> Moves:
    changed = moves.copy()
    changed[first_of(changed, WAIT), 6] += 1_000_000
    return changed


def with_another_slice(moves: Moves) -> Moves:
    changed = moves.copy()
    changed[first_of(changed, LOAD), 7] = 0
    return changed


def with_two_sources_swapped(moves: Moves) -> Moves:
    changed = moves.copy()
    sends = np.flatnonzero(np.isin(changed[:, 0], (SEND, PASS)) & (changed[:, 3] > 0))
    one, other = sends[0], next(at for at in sends if changed[at, 2] != changed[sends[0], 2])
    changed[[one, other], 2] = changed[[other, one], 2]
    return changed


def with_a_copy_for_an_add(moves: Moves) -> Moves:
    changed = moves.copy()
    changed[first_of(changed, ADD), 0] = COPY
    return changed


@pytest.mark.parametrize(
    "mutate",
    [
        without_a_wait,
        with_a_lower_counter,
        with_a_higher_counter,
        with_another_slice,
        with_two_sources_swapped,
        with_a_copy_for_an_add,
    ],
)
def test_a_wrong_table_is_caught(mutate: Callable[[Moves], Moves]) -> None:
    made = planned("3x3", "none", "", "trees", "allreduce")
    program = compiled(made, wired(made), n_elements=3000, type_name="float32", slices=2)
    core = next(
        core
        for core, moves in program.moves.items()
        if np.count_nonzero(moves[:, 0] == ADD) > 2 and np.count_nonzero(moves[:, 0] == SEND) > 2
    )
    assert wrong_bits(made, program) == 0

    mutant = with_table(program, core, mutate(program.moves[core]))

    assert any(is_caught(made, mutant, seed) for seed in range(8))


def is_caught(made: Plan, program: Program, seed: int) -> bool:
    try:
        return wrong_bits(made, program, seed=seed) > 0
    except (TransportError, ValueError):  # ValueError: it reads beyond what was written
        return True


def test_an_add_in_another_order_is_caught_in_float32() -> None:
    """Two blocks that are added to one place, in the order of their rows: both orders are sums."""
    made = planned("3x3", "none", "", "trees", "allreduce")
    program = compiled(made, wired(made, 1), n_elements=800, type_name="float32")
    caught = 0
    for core, moves in program.moves.items():
        adds = np.flatnonzero(moves[:, 0] == ADD)
        pairs = [(one, other) for one, other in pairwise(adds) if moves[one, 1] == moves[other, 1]]
        if pairs:
            one, other = pairs[0]
            # Each add has its wait before it and its signal after it.
            groups = moves[one - 1 : one + 2], moves[other - 1 : other + 2]
            between = moves[one + 2 : other - 1]
            order = (moves[: one - 1], groups[1], between, groups[0], moves[other + 2 :])
            caught += is_caught(made, with_table(program, core, np.concatenate(order)), 0)

    assert caught > 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type_name": "float64"}, "adds int32, float32, bfloat16, but got float64"),
        ({"slices": 0}, "from 1 to 100 slices, one for each element, but got 0"),
        ({"slices": 101}, "but got 101"),
        ({"n_elements": 0}, "a payload of one element or more"),
        ({"n_elements": 1_000_000, "slices": 1}, "use 62 or leave them open"),
        ({"wiring": Wiring({})}, r"a live cable from chip \(0, 0\) to chip \(1, 0\)"),
    ],
)
def test_what_cannot_be_a_table_is_refused(change: dict[str, object], message: str) -> None:
    made = planned("2x2", "none", "", "trees", "allreduce")
    given = {"wiring": wired(made), "n_elements": 100, **change}

    with pytest.raises(InputError, match=message):
        compiled(made, given.pop("wiring"), **given)  # type: ignore[arg-type]


def test_one_chip_is_refused() -> None:
    made = plan(Mesh((1, 1)), "trees")

    with pytest.raises(InputError, match="two live chips"):
        compiled(made, Wiring({}), n_elements=100)


def test_a_table_that_does_not_fit_is_refused() -> None:
    made = planned("1x2", "none", "", "trees", "allreduce")

    with pytest.raises(InputError, match="use more slices, or 'trees'"):
        compiled(made, wired(made, 1), n_elements=32_000, slices=1)
