"""Gathering bytes over sums: what is damaged is refused, a length before memory is taken for it."""

from typing import Any, cast

import numpy as np
import pytest

from meshmend.errors import MismatchError, WrongResultError
from meshmend.topology.text import parse_mesh
from meshmend.train.core import byte_gather
from meshmend.train.core.byte_gather import gather_bytes
from meshmend.train.core.exchange import Exchange


class DamagedSum:
    """Stands for an exchange of two chips whose sum arrives with one flipped bit."""

    mesh = parse_mesh("1x2")
    rank = 0

    def __init__(self, byte: int, bit: int) -> None:
        self._byte, self._bit = byte, bit

    def sum(self, array: np.ndarray[Any, np.dtype[np.uint8]], *_: object) -> None:
        array[self._byte] ^= np.uint8(1 << self._bit)


@pytest.mark.parametrize(
    ("byte", "bit"),
    [(0, 0), (7, 7), (8, 0), (16, 3), (25, 7), (512 + 6, 0), (512 + 7, 7), (512 + 8, 1)],
    ids=str,
)
def test_a_damaged_length_hash_or_word_is_refused(byte: int, bit: int) -> None:
    exchange = cast(Exchange, DamagedSum(byte, bit))

    with pytest.raises(WrongResultError, match=r"damaged on its way.*MESHMEND_CHECKSUM=1"):
        gather_bytes(exchange, b"some words")


def test_an_undamaged_sum_is_what_the_chips_said() -> None:
    exchange = cast(Exchange, DamagedSum(511, 0))  # behind the words

    assert gather_bytes(exchange, b"some words") == [b"some words", b""]


def test_a_gather_that_looks_at_no_hash_believes_what_is_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mutant: so the test above would find it."""
    monkeypatch.setattr(byte_gather, "_hash", lambda data, topic: bytes(8))

    assert gather_bytes(cast(Exchange, DamagedSum(16, 3)), b"some words")[0] != b"some words"


class ToldError(Exception):
    """A chip has told what it has."""


class OneOfTwo:
    """Stands for the exchange of one of two chips; the other has told something before."""

    mesh = parse_mesh("1x2")
    members = mesh.live

    def __init__(self, rank: int, other: Any = None) -> None:
        self.rank, self._other = rank, other
        self.told: Any = None

    def sum(self, array: np.ndarray[Any, np.dtype[np.uint8]], *_: object) -> None:
        self.told = array.copy()
        if self._other is None:
            raise ToldError
        array += self._other


@pytest.mark.parametrize("others", ["gather or all_reduce", ""])
def test_chips_that_gather_for_different_calls_are_told_so(others: str) -> None:
    first = OneOfTwo(0)
    with pytest.raises(ToldError):
        gather_bytes(cast(Exchange, first), b"a metric", others)
    second = cast(Exchange, OneOfTwo(1, first.told))

    with pytest.raises(
        MismatchError,
        match=r"chip \(0, 1\) is in evaluate in 3 parts, and chip \(0, 0\) in another call",
    ):
        gather_bytes(second, b"a part", "evaluate in 3 parts")
    assert gather_bytes(second, b"one", others) == [b"a metric", b"one"]
