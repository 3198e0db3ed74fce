"""The digest of a training state: one hash per array and plain value, and one over all of them.

States that differ in one bit have different digests, always: every step of the hash can be undone,
so a word that differs leaves a hash that differs. Any other difference escapes once in about 2^64
times. The digest does not depend on the order of dicts. Knows no framework: see `state_tree.py`.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import inlined, plain_kernel

Parts = Mapping[str, str]  # by name: type, shape and hash of an array, or a plain value in words

# The constants and rounds of xxHash64; its way to merge lanes could lose a difference.
_FIRST: Final = np.uint64(0x9E3779B185EBCA87)
_SECOND: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_THIRD: Final = np.uint64(0x165667B19E3779F9)
_LEFT, _RIGHT = np.uint64(31), np.uint64(33)
_LANES: Final = 4
_WORD_BYTES: Final = 8
_LONGEST_WORDS: Final = 60
_PLAIN: Final[tuple[Any, ...]] = (type(None), bool, int, float, complex, str)
_LARGE_BYTES: Final = 1 << 20  # takes a core 0.1 ms to hash, about as long as a thread to start


@inlined
def _mixed(lane: np.uint64, word: np.uint64) -> np.uint64:
    """Return a lane with one more word; different words, or lanes, give different results."""
    lane += word * _SECOND
    return ((lane << _LEFT) | (lane >> _RIGHT)) * _FIRST


@plain_kernel
def hash_words(words: NDArray[np.uint64]) -> np.uint64:
    """Return a hash of 64 bits; words that differ in one place have different hashes."""
    a, b, c, d = _FIRST, _SECOND, _THIRD, np.uint64(len(words))
    n_whole = len(words) // _LANES * _LANES
    for at in range(0, n_whole, _LANES):
        a = _mixed(a, words[at])
        b = _mixed(b, words[at + 1])
        c = _mixed(c, words[at + 2])
        d = _mixed(d, words[at + 3])
    for at in range(n_whole, len(words)):
        a = _mixed(a, words[at])
    # The bits of a product go up only: this takes them down again.
    return _down(_mixed(_mixed(_mixed(_down(a), _down(b)), _down(c)), _down(d)))  # type: ignore[no-any-return]


@inlined
def _down(lane: np.uint64) -> np.uint64:
    lane ^= lane >> np.uint64(33)
    lane *= _SECOND
    lane ^= lane >> np.uint64(29)
    lane *= _THIRD
    return lane ^ (lane >> np.uint64(32))


def hash_bytes(data: NDArray[np.uint8]) -> int:
    """Return a hash of the bytes of an array; the length of the last word is part of it."""
    n_whole = len(data) // _WORD_BYTES * _WORD_BYTES
    words = data[:n_whole].view(np.uint64)
    if not words.flags.aligned:
        words = words.copy()
    words.flags.writeable = False  # writable arrays would compile another loop
    found = int(hash_words(words))
    if n_whole == len(data):
        return found
    rest = np.zeros(_WORD_BYTES, dtype=np.uint8)
    rest[: len(data) - n_whole] = data[n_whole:]
    last = np.array([found, rest.view(np.uint64)[0], len(data)], dtype=np.uint64)
    last.flags.writeable = False
    return int(hash_words(last))


def load_hash() -> None:
    """Compile or load the loop that hashes, by hashing a word."""
    hash_bytes(np.zeros(_WORD_BYTES, dtype=np.uint8))


@dataclass(frozen=True)
class BegunDigests:
    """A hash of each part of a state by its name, once `wait` has returned them.

    `is_early`: large arrays were still to be hashed when `begun_digests` returned. Who changes them
    before `wait` has returned may get the hash of neither the state before nor that after.
    """

    wait: Callable[[], dict[str, str]]
    is_early: bool


def begun_digests(state: Any, raw: Callable[[Any, str], Any]) -> BegunDigests:
    """Begin to hash each tensor of a nested state, and each plain value; large tensors in a thread.

    `raw(leaf, where)` returns a tensor as `RawArray`, and None for what is none.
    What is neither an array nor plain is only named by its type: no state can hold it.
    """
    small, large = dict[str, str](), dict[str, Any]()
    for name, leaf in leaves_of(state):
        array = raw(leaf, name)
        if array is not None and array.n_bytes >= _LARGE_BYTES:
            large[name] = array
        else:
            small[name] = _words(leaf) if array is None else _array_words(array)
    if not large:
        return BegunDigests(lambda: small, is_early=False)
    thread = ThreadPoolExecutor(1, "meshmend-digest")
    found = thread.submit(lambda: {name: _array_words(each) for name, each in large.items()})
    thread.shutdown(wait=False)  # it ends when that is done
    return BegunDigests(lambda: {**small, **found.result()}, is_early=True)


def total_of(parts: Parts) -> str:
    """Return one digest of all parts of a state, whatever their order."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(parts):
        found.update(f"{name}\n{parts[name]}\n".encode())
    return found.hexdigest()


def leaves_of(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the parts of a nested state with their names; what is empty counts too."""
    if isinstance(state, dict | list | tuple) and state:
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves_of(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, state


def _array_words(array: Any) -> str:
    """Return type, shape and hash of an array."""
    return f"{array.dtype}{list(array.shape)} {hash_bytes(array.data):016x}"


def _words(leaf: Any) -> str:
    """Return what is no array in words."""
    if isinstance(leaf, dict | list | tuple):
        return "{}" if isinstance(leaf, dict) else "[]"
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    words_of = next((each.__repr__ for each in _PLAIN if isinstance(leaf, each)), None)
    if words_of is not None:
        words = words_of(leaf)  # as where it arrives: those of a float, not of a subclass
        is_long = len(words) > _LONGEST_WORDS
        return hashlib.blake2b(words.encode()).hexdigest()[:16] if is_long else words
    return type(leaf).__name__
