"""Which samples a step uses: every one of an epoch once, whatever the chips."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import InputError
from meshmend.train.data.samples import Order, batch_of, share_of

SIZES = st.integers(1, 50)


@given(SIZES, st.integers(0, 3), st.integers(0, 3))
def test_every_sample_of_an_epoch_is_used_once(n_samples: int, seed: int, epoch: int) -> None:
    order = Order(n_samples, seed)

    row = order.samples(epoch * n_samples, (epoch + 1) * n_samples)

    assert sorted(row) == list(range(n_samples))


@given(SIZES, st.integers(0, 120), st.lists(st.integers(0, 40), max_size=5))
def test_the_row_is_the_same_however_it_is_cut(n: int, start: int, sizes: list[int]) -> None:
    order = Order(n, seed=1)
    ends = np.cumsum([start, *sizes])

    parts = [order.samples(int(one), int(two)) for one, two in pairwise(ends)]

    whole = order.samples(start, int(ends[-1]))
    assert np.concatenate([whole[:0], *parts]).tolist() == whole.tolist()


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    rows = [Order(20, seed).samples(at, at + 20).tolist() for seed in (0, 1) for at in (0, 20)]

    assert len({tuple(row) for row in rows}) == 4
    assert rows == [
        Order(20, seed).samples(at, at + 20).tolist() for seed in (0, 1) for at in (0, 20)
    ]


@given(st.integers(0, 1000), st.integers(1, 100), st.integers(1, 40))
def test_shares_tile_the_batch_and_differ_by_one_at_most(
    position: int, batch: int, n_ranks: int
) -> None:
    shares = [share_of(position, batch, rank, n_ranks) for rank in range(n_ranks)]

    places = [place for share in shares for place in range(share.start, share.stop)]
    sizes = [share.n_samples for share in shares]
    assert places == list(range(position, position + batch))
    assert max(sizes) - min(sizes) <= 1
    assert {share.batch for share in shares} == {batch}


def test_three_chips_share_eight_samples_by_hand() -> None:
    shares = [share_of(16, 8, rank, 3) for rank in range(3)]

    assert [(share.start, share.stop) for share in shares] == [(16, 18), (18, 21), (21, 24)]


@pytest.mark.parametrize(
    ("policy", "n_live", "batch"),
    [("constant", 12, 64), ("constant", 1, 64), ("shrink", 16, 64), ("shrink", 12, 48)],
)
def test_the_batch_stays_or_shrinks_with_the_chips(policy: str, n_live: int, batch: int) -> None:
    assert batch_of(policy, 64, n_live, 16) == batch


def test_a_batch_never_shrinks_to_nothing() -> None:
    assert batch_of("shrink", 2, 1, 16) == 1


def test_no_samples_are_refused() -> None:
    with pytest.raises(InputError, match="at least one sample, but got 0"):
        Order(0)
