"""No failure of one domain takes an owner and its mirror, on any mesh, wherever that can be."""

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import InputError
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.train.sharding.update_shares import (
    DEFAULT_DOMAINS,
    check_domains,
    counted_domains,
    domains_of,
    kept_apart,
    mirrors_of,
)


def placed(mesh: Mesh, *names: str, board: tuple[int, ...] = (2, 2)) -> tuple[int, ...]:
    """Return the mirrors of all live chips, and check that they share no domain with owners."""
    domains = domains_of(names, mesh.live, {}, board)
    mirrors = mirrors_of(domains)
    for owner, mirror in enumerate(mirrors):
        assert owner != mirror
        assert not any(a == b for a, b in zip(domains[owner], domains[mirror], strict=True))
    return mirrors


@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ("4x4", ["board"]),
        ("4x4", ["2x2", "row"]),
        ("4x4", ["row", "column"]),
        ("4x4", ["board", "row", "column"]),
        ("8x8", ["4x2", "row"]),
        ("3x5", ["row", "column"]),
        ("1x6", ["column"]),
        ("2x3x4", ["1x3x4", "2x1x1"]),
        ("32x32", ["board", "4x2", "row", "column"]),
    ],
)
def test_several_domains_are_kept_apart_and_every_chip_mirrors_one_share(
    mesh: str, names: list[str]
) -> None:
    board = (2, 2, 1) if mesh.count("x") == 2 else (2, 2)
    whole = parse_mesh(mesh)

    mirrors = placed(whole, *names, board=board)

    assert sorted(mirrors) == list(range(whole.n_live))


@pytest.mark.parametrize("names", [["board"], ["row", "column"], ["board", "row"]])
def test_around_a_hole_too(names: list[str]) -> None:
    for hole in ("2x2@0,0", "2x2@0,2", "1,2", "2x4@0,0"):
        if (hole, names) != ("2x4@0,0", ["board", "row"]):  # two boards are left, side by side
            mirrors = placed(parse_mesh("4x4", fail=[hole]), *names)
            assert sorted(mirrors) == list(range(len(mirrors)))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
def test_mirrors_keep_apart_whatever_can_be_and_share_the_load(
    pairs: list[tuple[int, int]],
) -> None:
    domains: Any = [list(pair) for pair in pairs]
    mirrors, n_apart = mirrors_of(domains), kept_apart(domains)

    for owner, mirror in enumerate(mirrors):
        assert owner != mirror or len(pairs) == 1
        assert all(domains[owner][at] != domains[mirror][at] for at in range(n_apart))
    if n_apart == 0 and len(pairs) > 1:
        assert sorted(mirrors) == list(range(len(pairs)))


def test_a_chip_mirrors_several_shares_only_where_it_must() -> None:
    """Of five chips on two boards, the one that is alone mirrors four."""
    mirrors = mirrors_of([["a"], ["a"], ["a"], ["a"], ["b"]])

    assert mirrors == (4, 4, 4, 4, 0)


def test_hosts_count_only_if_there_are_several() -> None:
    one: dict[Chip, str] = {(0, 0): "a", (0, 1): "a"}
    two: dict[Chip, str] = {(0, 0): "a", (0, 1): "b"}

    assert counted_domains(DEFAULT_DOMAINS, one) == ["board"]
    assert counted_domains(DEFAULT_DOMAINS, two) == ["board", "host"]


@pytest.mark.parametrize(
    ("mesh", "names", "words"),
    [
        ("2x2", ["2x2"], r"shares no 2x2 with their owner, but on 2x2 chip \(0, 0\) shares one"),
        ("1x6", ["row"], "shares no row with their owner"),
        ("2x4", ["board", "row", "column"], None),
        ("1x6", ["column", "row"], "shares no column and no row with their owner"),
        ("4x4", ["rack"], r"board, host, row, column, or a block of 2 axes such as 2x2, but got"),
        ("4x4", ["2x2x2"], "a block of 2 axes such as 2x2, but got '2x2x2'"),
        ("4x4", ["0x2"], "but got '0x2'"),
        ("8", ["column"], "but got 'column'"),
        ("4x4", [], "at least one domain, such as board, but got none"),
        ("2x2", ["board", "host"], None),
        ("4x4", ["host"], None),
    ],
)
def test_what_cannot_be_kept_apart_is_said_in_one_line(
    mesh: str, names: list[str], words: str | None
) -> None:
    whole = parse_mesh(mesh)
    board = (2, 2) if len(whole.shape) == 2 else (1,)
    if words is None:
        check_domains(names, whole, board)
        return
    with pytest.raises(InputError, match=words) as refused:
        check_domains(names, whole, board)
    assert "\n" not in str(refused.value)


def test_domains_that_failures_join_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torch")
    import torch

    from sharded_chips import Death, ThreadJob

    job = ThreadJob(3, lambda each: torch.optim.SGD(each, lr=0.1))
    boards = [frozenset({(row, 0), (row, 1)}) for row in range(3)]
    with caplog.at_level(logging.WARNING):
        job.run(2, Death(5, boards[0]))
        job.run(2, Death(5, boards[2]))
        job.run(3)

    told = [each.getMessage() for each in caplog.records if "mirrors" in each.getMessage()]
    assert told == [
        "on 2 live chips, mirrors and their owners cannot be kept on another board each: one "
        "failure may take both"
    ]
