"""The backend `pallas` in Pallas' TPU interpreter: right sums, no races, and mutants are caught.

Each case runs in a process of its own, because the interpreter needs many threads.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from dma_mutants import MUTANTS
from pallas_run import Case, Outcome, interpreted
from tpu_compile import compiled_for_tpu, lowered_for_tpu
from virtual_devices import needs_jax, outcomes

pytestmark = needs_jax

TILE = 8 * 128
SQUARE = Case("3x3", "1,1", n_elements=8 * TILE)
ONE_TREE = Case("2x3", "0,1", slices=8, n_elements=8 * TILE)  # whose slots are used again
HOLE = Case("4x4", "2x2@0,2", n_elements=10 * TILE)


def faultless(n_blocks: int) -> Outcome:
    return Outcome(is_right=True, n_races=0, n_unbalanced=0, n_blocks=n_blocks)


def test_a_mesh_less_its_middle_sums_without_races() -> None:
    assert interpreted(SQUARE) == faultless(8)


@pytest.mark.parametrize(
    "mutant", ["credit removed", pytest.param("slots merged", marks=pytest.mark.slow)]
)
def test_missing_flow_control_is_caught(mutant: str) -> None:
    """By a race or, where the threads happened to wait for one another, by a wrong sum."""
    assert not interpreted(replace(ONE_TREE, mutant=mutant)).is_faultless


@pytest.mark.slow
@pytest.mark.parametrize("slices", [1, 4])
def test_a_mesh_with_a_hole_sums_without_races(slices: int) -> None:
    ended = interpreted(replace(HOLE, n_elements=slices * HOLE.n_elements, slices=slices))

    assert ended == faultless(10 * slices)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [name for name in MUTANTS if "dropped" in name])
def test_a_missing_wait_is_caught(mutant: str) -> None:
    assert not interpreted(replace(SQUARE, mutant=mutant)).is_faultless


@pytest.mark.slow
def test_a_payload_larger_than_all_slots_streams_through_them() -> None:
    """6 MB pass through slots and buffers of 1.5 MB."""
    assert interpreted(replace(SQUARE, n_elements=1_500_000)) == faultless(23)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "n_elements"),
    [("bfloat16", 9000), ("float16", 1), ("int32", 4097), ("int8", 100)],
)
def test_types_and_odd_sizes(dtype: str, n_elements: int) -> None:
    case = replace(SQUARE, mesh="2x3x2", fail="0,1,1", dtype=dtype, n_elements=n_elements)

    assert interpreted(case).is_faultless


@pytest.mark.slow
def test_routed_algorithms_run_too() -> None:
    assert interpreted(replace(HOLE, algorithm="ft-two-d", n_elements=16 * TILE)) == faultless(16)


def test_what_the_kernel_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_programs(monkeypatch, "refusals") == {"refusals": "ok"}


@pytest.mark.slow
def test_the_kernel_runs_inside_larger_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["trees", "gradients", "cores", "two axes"]

    assert in_programs(monkeypatch, *names) == dict.fromkeys(names, "ok")


def in_programs(monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, str]:
    """Return how checks in a process with 16 devices ended."""
    monkeypatch.setenv("NPROC", "64")
    return outcomes(Path(__file__).with_name("pallas_checks.py"), 16, *names)


def test_the_kernel_is_lowered_for_tpus() -> None:
    assert lowered_for_tpu("4x4", "2x2@0,2", 1_000_000, "float32") == 1


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("libtpu") is None, reason="needs the TPU compiler: pip install libtpu"
)
@pytest.mark.parametrize(
    ("topology", "dtype"),
    [
        ("v4:4x4x1", "float32"),
        ("v5p:4x4x1", "float32"),
        ("v5e:4x4", "float32"),
        ("v5e:4x4", "bfloat16"),
        ("v6e:4x4", "int32"),
        ("v6e:4x4", "int8"),
    ],
)
def test_the_kernel_is_compiled_for_tpus(topology: str, dtype: str) -> None:
    assert compiled_for_tpu("4x4", "2x2@0,2", 1_000_000, dtype, topology) == 1
