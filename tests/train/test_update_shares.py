"""Who owns and mirrors which share of the parameters, and what moves after a change."""

from hypothesis import given
from hypothesis import strategies as st

from meshmend.train.sharding.update_shares import (
    LARGEST_MOVE_BYTES,
    Spans,
    UpdateShares,
    batches_of_moves,
    mirrors_of,
    moves_to,
    without,
)

_SIZES = st.integers(0, 1 << 16)


def boards(*sizes: int) -> list[list[str]]:
    """Return the domain of each rank, given the number of ranks of each board."""
    return [[f"board {board}"] for board, size in enumerate(sizes) for _ in range(size)]


def covered(spans: Spans, n_bytes: int) -> bool:
    """Return whether spans are all of the row, each byte once."""
    return not without([(0, n_bytes)], spans) and sum(b - a for a, b in spans) == n_bytes


@given(_SIZES, st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_byte_has_one_owner_and_one_mirror_on_another_rank(
    n_bytes: int, sizes: list[int]
) -> None:
    shares = UpdateShares(n_bytes, mirrors_of(boards(*sizes)))
    ranks = range(shares.n_ranks)

    assert covered(tuple(shares.owned(rank) for rank in ranks), n_bytes)
    mirrored = tuple(span for rank in ranks for span in shares.mirrored(rank))
    assert covered(mirrored, n_bytes) or shares.n_ranks == 1
    assert all(shares.mirror_of[rank] != rank for rank in ranks) or shares.n_ranks == 1


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6))
def test_no_mirror_is_on_the_board_of_its_owner(sizes: list[int]) -> None:
    domains = boards(*sizes)
    mirror_of = mirrors_of(domains)

    assert all(domains[rank] != domains[mirror] for rank, mirror in enumerate(mirror_of))
    if 2 * max(sizes) <= sum(sizes):
        assert sorted(mirror_of) == list(range(len(domains)))  # every rank mirrors one share


def test_a_mirror_is_on_another_host_and_another_board() -> None:
    hosts = ["a", "a", "b", "b", "c", "c", "d", "d"]
    numbers = [0, 0, 0, 0, 1, 1, 1, 1]  # each board spans two hosts
    mirror_of = mirrors_of([[number, host] for number, host in zip(numbers, hosts, strict=True)])

    assert all(numbers[rank] != numbers[mirror] for rank, mirror in enumerate(mirror_of))
    assert all(hosts[rank] != hosts[mirror] for rank, mirror in enumerate(mirror_of))


def test_on_a_single_board_a_mirror_is_on_another_chip_and_a_single_chip_has_none() -> None:
    assert sorted(mirrors_of(boards(4))) == [0, 1, 2, 3]
    assert all(rank != mirror for rank, mirror in enumerate(mirrors_of(boards(4))))
    assert mirrors_of(boards(1)) == (0,)
    assert UpdateShares(1000, (0,)).kept(0) == ((0, 1000),)


def test_boards_that_hosts_join_to_one_group_still_separate_owner_and_mirror() -> None:
    mirror_of = mirrors_of([["left", "host"], ["left", "host"], ["right", "host"]])

    assert mirror_of == (2, 2, 0)


@given(
    _SIZES,
    st.lists(st.integers(1, 4), min_size=2, max_size=5),
    st.integers(0, 4),
)
def test_after_the_loss_of_a_board_moves_give_every_rank_what_it_needs(
    n_bytes: int, sizes: list[int], lost: int
) -> None:
    lost %= len(sizes)
    domains = boards(*sizes)
    before = UpdateShares(n_bytes, mirrors_of(domains))
    left = [rank for rank, each in enumerate(domains) if each != [f"board {lost}"]]
    held = [before.kept(rank) for rank in left]
    after = UpdateShares(n_bytes, mirrors_of([domains[rank] for rank in left]))
    needed = [after.kept(rank) for rank in range(len(left))]

    moves = moves_to(needed, held)

    for rank, wanted in enumerate(needed):
        got = [move.span for move in moves if move.target == rank]
        assert not without(wanted, [*held[rank], *got])
    for move in moves:
        assert not without([move.span], held[move.source])
        assert move.source != move.target


def test_nothing_moves_if_nothing_changes_and_a_board_that_comes_back_takes_its_share() -> None:
    whole = UpdateShares(16 << 10, mirrors_of(boards(2, 2, 2)))
    kept = [whole.kept(rank) for rank in range(6)]

    assert moves_to(kept, kept) == []

    small = UpdateShares(16 << 10, mirrors_of(boards(2, 2)))
    moves = moves_to(kept, [*(small.kept(rank) for rank in range(4)), (), ()])
    taken = [move.span for move in moves if move.target == 5]
    assert not without(whole.kept(5), taken)


def test_what_nobody_holds_is_left_out_and_the_rest_still_moves() -> None:
    needed: list[Spans] = [((0, 1000),), ()]
    moves = moves_to(needed, [(), ((100, 200), (500, 1000))])

    assert [move.span for move in moves] == [(100, 200), (500, 1000)]


def test_long_spans_move_in_pieces_from_the_holders_in_turn() -> None:
    size = 4 * LARGEST_MOVE_BYTES
    moves = moves_to([((0, size),), (), ()], [(), ((0, size),), ((0, size),)])

    assert [move.source for move in moves] == [1, 2, 1, 2]
    assert len(list(batches_of_moves(moves, 2 * LARGEST_MOVE_BYTES))) == 2
    assert [len(each) for each in batches_of_moves(moves, 1)] == [1, 1, 1, 1]
