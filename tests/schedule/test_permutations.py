"""Pairs as permutations: each pair once, no rank twice, and as few as Koenig's theorem allows."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from meshmend.schedule.lockstep_program import permutations_of

ranks = st.integers(0, 9)


@given(st.sets(st.tuples(ranks, ranks)))
def test_pairs_fall_into_as_few_permutations_as_the_busiest_rank_has_pairs(
    pairs: set[tuple[int, int]],
) -> None:
    listed = sorted(pairs)

    found = permutations_of([src for src, _ in listed], [dst for _, dst in listed])

    assert sorted(pair for permutation in found for pair in permutation) == listed
    for permutation in found:
        assert len({src for src, _ in permutation}) == len(permutation)
        assert len({dst for _, dst in permutation}) == len(permutation)
    ends = [Counter(pair[end] for pair in listed) for end in (0, 1)]
    assert len(found) == max((max(count.values()) for count in ends if count), default=0)


def test_a_square_takes_two_permutations_of_four() -> None:
    pairs = [(0, 1), (0, 2), (1, 0), (1, 3), (2, 0), (2, 3), (3, 1), (3, 2)]

    found = permutations_of([src for src, _ in pairs], [dst for _, dst in pairs])

    assert [len(permutation) for permutation in found] == [4, 4]
