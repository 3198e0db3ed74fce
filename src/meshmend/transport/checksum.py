"""Checksums of frames: one of the header, and one of the payload that may be left out.

They find what a network, a cable or a memory changes by accident; they are no proof against a liar.
Each finds every change that lies within one word: of 8 bytes in a header, of 4 in a payload.
"""

from functools import cache
from typing import Any, Final

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
from numba import carray, cfunc, types  # type: ignore[attr-defined]  # as its stubs have it

from meshmend.kernels import plain_kernel
from meshmend.transport.frames import CHECK_WORD

_SYMBOL: Final = "meshmend_checksum"
_WORD_BYTES: Final = 4
# Odd numbers whose multiples are spread evenly: 2^64 and 2^32 over the golden ratio, and others.
_SEED: Final = np.uint64(0x243F6A8885A308D3)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_STEP: Final = np.uint32(0x9E3779B1)
_FIRST: Final = np.uint32(0x85EBCA6B)
_HALF: Final = np.uint64(32)
_ODD: Final = np.uint32(1)

# For compiled code: checksum_at(address, number of bytes, place of the first byte in the payload)
# is the part of these bytes in the checksum of a payload: the parts are added. All places are
# multiples of 4. Call `bind_checksum` before code that uses it is compiled or loaded.
checksum_at: Any = types.ExternalFunction(
    _SYMBOL, types.int64(types.intp, types.int64, types.int64)
)


@cache
def bind_checksum() -> Any:
    """Compile or load the function behind `checksum_at`, and register its symbol."""
    signature = types.int64(types.voidptr, types.int64, types.int64)
    compiled = cfunc(signature, cache=True)(_checksum_at)
    llvmlite.binding.add_symbol(_SYMBOL, compiled.address)
    return compiled


@plain_kernel
def header_checksum(words):  # type: ignore[no-untyped-def]
    """Return the checksum of a header's first five words."""
    # Each step is one to one, so headers that differ in one word have different checksums.
    mixed = _SEED
    for at in range(CHECK_WORD):
        mixed = (mixed ^ np.uint64(words[at])) * _MIX
        mixed ^= mixed >> _HALF
    return np.int64(mixed)


@plain_kernel
def payload_checksum(parts):  # type: ignore[no-untyped-def]
    """Return the checksum that a header names, from the sum of the parts; it is never 0."""
    return parts if parts != 0 else np.int64(1)


def _checksum_at(address, n_bytes, place):  # type: ignore[no-untyped-def]
    """Return the sum of all 4-byte words, each times an odd number that depends on its place.

    A product of two numbers below 2^32, one of them changed, changes by less than 2^64, not by 0.
    """
    n_words = n_bytes // _WORD_BYTES
    words = carray(address, n_words, np.uint32)
    first = np.uint32(place // _WORD_BYTES)
    total = np.uint64(0)
    for at in range(n_words):
        factor = np.uint32((first + np.uint32(at)) * _STEP + _FIRST) | _ODD
        total += np.uint64(words[at]) * np.uint64(factor)
    n_left = n_bytes - n_words * _WORD_BYTES
    if n_left:
        every = carray(address, n_bytes, np.uint8)
        last = np.uint64(0)
        for at in range(n_left):
            last = (last << np.uint64(8)) | np.uint64(every[n_words * _WORD_BYTES + at])
        factor = np.uint32((first + np.uint32(n_words)) * _STEP + _FIRST) | _ODD
        total += last * np.uint64(factor)
    return np.int64(total)
