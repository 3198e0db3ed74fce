"""Gathering bytes over sums: what is damaged is refused, a length before memory is taken for it."""

from typing import Any, cast

import numpy as np
import pytest

from meshmend.errors import WrongResultError
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
    monkeypatch.setattr(byte_gather, "_hash", lambda data: bytes(8))

    assert gather_bytes(cast(Exchange, DamagedSum(16, 3)), b"some words")[0] != b"some words"
