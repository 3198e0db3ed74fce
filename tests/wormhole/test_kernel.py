"""The kernel's sums are those of NumPy in every bit, and its binary is what its source gives."""

import ctypes
import subprocess
from itertools import product
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from meshmend.wormhole.machine import kernel_code
from meshmend.wormhole.table import HEADER_AT, KERNEL_AT, TYPES

KERNEL = Path(__file__).parents[2] / "src" / "meshmend" / "wormhole" / "kernel"
CROSS_COMPILER = "riscv64-unknown-elf-gcc"


def test_the_binary_is_what_its_source_gives(tmp_path: Path) -> None:
    if which(CROSS_COMPILER) is None:
        pytest.skip(f"{CROSS_COMPILER} is not installed (Debian: gcc-riscv64-unknown-elf)")
    built = tmp_path / "kernel.bin"

    subprocess.run([KERNEL / "build.sh", built], check=True)

    assert built.read_bytes() == kernel_code()


def test_the_binary_ends_before_its_header() -> None:
    assert 0 < len(kernel_code()) <= HEADER_AT - KERNEL_AT


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel's sums, compiled for this machine."""
    if which("cc") is None:
        pytest.skip("cc is not installed")
    folder = tmp_path_factory.mktemp("native")
    source = folder / "sums.c"
    source.write_text(
        '#include "add.h"\n'
        "void sum(uint32_t *a, const uint32_t *b, uint32_t n, uint32_t type)"
        " { add_words(a, b, n, type); }\n"
    )
    library = folder / "sums.so"
    options = ["-O2", "-shared", "-fPIC", f"-I{KERNEL}"]
    subprocess.run(["cc", *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def summed(native: ctypes.CDLL, a: NDArray[Any], b: NDArray[Any], type_name: str) -> NDArray[Any]:
    result = np.ascontiguousarray(a).copy()
    other = np.ascontiguousarray(b)
    assert result.nbytes % 16 == 0
    native.sum(
        ctypes.c_void_p(result.ctypes.data),
        ctypes.c_void_p(other.ctypes.data),
        ctypes.c_uint32(result.nbytes // 4),
        ctypes.c_uint32(TYPES[type_name]),
    )
    return result


def hard_bits(n_mantissa: int, n_exponent: int) -> NDArray[np.uint32]:
    """Return numbers at the edges: zeros, subnormals, powers, almost powers, infinities, NaNs."""
    ones = (1 << n_mantissa) - 1
    half = 1 << (n_mantissa - 1)
    mantissas = sorted(
        {0, 1, 2, 3, half - 1, half, half + 1, ones - 1, ones}
        | {1 << each for each in range(n_mantissa)}
    )
    top = (1 << n_exponent) - 1
    exponents = [0, 1, 2, 3, 24, 25, 26, 27, 28, 100, 101, 127, 128, top - 2, top - 1, top]
    signs = (0, 1 << (n_mantissa + n_exponent))
    return np.array(
        [
            sign | exponent << n_mantissa | mantissa
            for sign, exponent, mantissa in product(signs, exponents, mantissas)
        ],
        dtype=np.uint32,
    )


def same(one: NDArray[Any], other: NDArray[Any], bits: Any) -> bool:
    """Whether all bits agree; any NaN is like any other."""
    equal = (one.view(bits) == other.view(bits)) | (np.isnan(one) & np.isnan(other))
    return bool(equal.all())


def test_float32_at_all_edges(native: ctypes.CDLL) -> None:
    """Each pair of hard numbers: about a million, with all roundings, ties and cancellations."""
    numbers = hard_bits(23, 8)
    a, b = (each.reshape(-1).view(np.float32) for each in np.meshgrid(numbers, numbers))

    with np.errstate(all="ignore"):
        assert same(summed(native, a, b, "float32"), a + b, np.uint32)


def test_float32_at_random(native: ctypes.CDLL) -> None:
    """Any bits, and numbers whose exponents are so near that all roundings occur."""
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 1 << 32, (2, 1 << 19), dtype=np.uint32)
    near = (
        (rng.integers(0, 1 << 24, any_bits.shape, dtype=np.uint32) | 0x3F000000)
        + (rng.integers(0, 30, any_bits.shape, dtype=np.uint32) << 23)
        - (rng.integers(0, 2, any_bits.shape, dtype=np.uint32) << 31)
    )
    for a, b in (any_bits.view(np.float32), near.view(np.float32)):
        with np.errstate(all="ignore"):
            assert same(summed(native, a, b, "float32"), a + b, np.uint32)


def test_bfloat16_at_all_edges(native: ctypes.CDLL) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    edges = hard_bits(7, 8).astype(np.uint16)
    pairs = np.meshgrid(edges, edges)
    others = rng.integers(0, 1 << 16, (2, 1 << 18), dtype=np.uint16)
    a, b = (
        np.concatenate([pair.reshape(-1), other]).view(ml_dtypes.bfloat16)
        for pair, other in zip(pairs, others, strict=True)
    )

    with np.errstate(all="ignore"):
        assert same(summed(native, a, b, "bfloat16"), a + b, np.uint16)


def test_int32_wraps_around(native: ctypes.CDLL) -> None:
    a, b = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, (2, 4096)).astype(np.int32)

    with np.errstate(over="ignore"):
        assert np.array_equal(summed(native, a, b, "int32"), a + b)
