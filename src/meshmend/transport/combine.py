"""Combines two payloads element by element, in place, in compiled code.

Element types and operations are numbers, so that one compiled function serves every payload.
Compiled code calls this function by its symbol, so that its loops are compiled once and not again
in each caller. Half-precision values are combined in single precision and rounded to nearest even
after each step, as torch does.
"""

from functools import cache
from typing import Any, Final

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
from numba import carray, types  # type: ignore[attr-defined]  # as its stubs have it
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.kernels import c_function, kernel

DTYPES: Final = (
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "int64",
    "int32",
    "uint8",
)
OPS: Final = ("sum", "product", "min", "max")

_SUM, _PRODUCT, _MIN = 0, 1, 2

_SYMBOL: Final = "meshmend_combine"

# For compiled code: combine_at(code, address of `kept`, address of `sent`, number of bytes).
# Call `bind_combine` before code that uses it is compiled or loaded.
combine_at: Any = types.ExternalFunction(
    _SYMBOL, types.void(types.int64, types.intp, types.intp, types.int64)
)


@cache
def bind_combine() -> Any:
    """Compile or load the function behind `combine_at`, and register its symbol."""
    signature = types.void(types.int64, types.voidptr, types.voidptr, types.int64)
    compiled = c_function(_combine_at, signature)
    llvmlite.binding.add_symbol(_SYMBOL, compiled.address)
    return compiled


def combine_code(dtype: str, op: str = "sum") -> int:
    """Return the code by which `combine` knows an element type and an operation.

    Raises:
        InputError: the type or the operation is not supported; the message lists those that are.
    """
    if dtype not in DTYPES or op not in OPS:
        raise InputError(
            f"combine needs one of the types {', '.join(DTYPES)} and one of the operations "
            f"{', '.join(OPS)}, but got {dtype!r} and {op!r}"
        )
    return len(OPS) * DTYPES.index(dtype) + OPS.index(op)


def describe_code(code: int) -> str:
    """Return in words what a code of `combine_code` stands for: `sum of float32`."""
    return f"{OPS[code % len(OPS)]} of {DTYPES[code // len(OPS) % len(DTYPES)]}"


def combine(code: int, kept: NDArray[np.uint8], sent: NDArray[np.uint8]) -> None:
    """Replace the values in the bytes `kept` by their combination with those in `sent`."""
    bind_combine().ctypes(code, kept.ctypes.data, sent.ctypes.data, kept.nbytes)


@kernel
def _fold(op, kept, sent):  # type: ignore[no-untyped-def]
    """Combine element by element; the minimum or maximum with a NaN is NaN."""
    if op == _SUM:
        for at in range(len(kept)):
            kept[at] += sent[at]
    elif op == _PRODUCT:
        for at in range(len(kept)):
            kept[at] *= sent[at]
    elif op == _MIN:
        for at in range(len(kept)):
            if sent[at] < kept[at] or sent[at] != sent[at]:
                kept[at] = sent[at]
    else:
        for at in range(len(kept)):
            if sent[at] > kept[at] or sent[at] != sent[at]:
                kept[at] = sent[at]


@kernel
def _fold_half(ieee, op, kept, sent):  # type: ignore[no-untyped-def]
    """Combine 16-bit floats: float16 if `ieee`, else bfloat16."""
    wide_kept = np.empty(len(kept), dtype=np.uint32)
    wide_sent = np.empty(len(kept), dtype=np.uint32)
    if ieee:
        _widen_ieee(kept, wide_kept)
        _widen_ieee(sent, wide_sent)
    else:
        for at in range(len(kept)):
            wide_kept[at] = np.uint32(kept[at]) << np.uint32(16)
            wide_sent[at] = np.uint32(sent[at]) << np.uint32(16)
    _fold(op, wide_kept.view(np.float32), wide_sent.view(np.float32))
    if ieee:
        _narrow_ieee(wide_kept, kept)
    else:
        _narrow_bfloat(wide_kept, kept)


@kernel
def _narrow_bfloat(wide, halves):  # type: ignore[no-untyped-def]
    for at in range(len(wide)):
        bits = np.int64(wide[at])
        if bits & 0x7FFFFFFF > 0x7F800000:  # NaN: stays NaN whatever bits are cut off
            halves[at] = np.uint16((bits >> 16) | 0x40)
        else:
            halves[at] = np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@kernel
def _widen_ieee(halves, wide):  # type: ignore[no-untyped-def]
    values = wide.view(np.float32)
    for at in range(len(halves)):
        half = np.int64(halves[at])
        sign, rest = half & 0x8000, half & 0x7FFF
        if rest < 0x0400:  # zero or subnormal: a multiple of 2^-24
            values[at] = np.float32(rest) * np.float32(2.0**-24)
            wide[at] = np.uint32(np.int64(wide[at]) | (sign << 16))
        else:
            bias = (255 - 31) << 23 if rest >= 0x7C00 else (127 - 15) << 23
            wide[at] = np.uint32(((rest << 13) + bias) | (sign << 16))


@kernel
def _narrow_ieee(wide, halves):  # type: ignore[no-untyped-def]
    one = np.empty(1, dtype=np.uint32)
    value = one.view(np.float32)
    for at in range(len(wide)):
        bits = np.int64(wide[at])
        sign, rest = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
        if rest > 0x7F800000:
            half = np.int64(0x7E00)  # NaN
        elif rest >= 0x47800000:  # 65536 and more: infinity
            half = np.int64(0x7C00)
        elif rest < 0x38800000:  # below 2^-14: adding 0.5 rounds to a multiple of 2^-24
            one[0] = np.uint32(rest)
            value[0] += np.float32(0.5)
            half = np.int64(one[0]) - 0x3F000000
        else:
            half = (rest - ((127 - 15) << 23) + 0xFFF + ((rest >> 13) & 1)) >> 13
        halves[at] = np.uint16(half | sign)


def _combine_at(code, kept_at, sent_at, n_bytes):  # type: ignore[no-untyped-def]
    kept, sent = carray(kept_at, n_bytes, np.uint8), carray(sent_at, n_bytes, np.uint8)
    dtype, op = code // 4, code % 4
    if dtype == 0:
        _fold(op, kept.view(np.float32), sent.view(np.float32))
    elif dtype == 1:
        _fold(op, kept.view(np.float64), sent.view(np.float64))
    elif dtype == 2 or dtype == 3:
        _fold_half(dtype == 3, op, kept.view(np.uint16), sent.view(np.uint16))
    elif dtype == 4:
        _fold(op, kept.view(np.int64), sent.view(np.int64))
    elif dtype == 5:
        _fold(op, kept.view(np.int32), sent.view(np.int32))
    else:
        _fold(op, kept, sent)
