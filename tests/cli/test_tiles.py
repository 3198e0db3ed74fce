"""`--tile` on the command line: plan, verify, show and simulate, and what they refuse."""

import json
from pathlib import Path

import pytest

from meshmend.cli.main import run_line

HOLE = ["--mesh", "4x6", "--fail", "2x2@0,2"]

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_plan_for_tiles_is_written_verified_and_drawn(tmp_path: Path, capsys: Captured) -> None:
    file, picture = str(tmp_path / "plan.json"), tmp_path / "plan.svg"

    assert run_line(["plan", *HOLE, "--tile", "2x2", "--payload", "1MB", "-o", file]) == 0
    planned = capsys.readouterr().out
    assert run_line(["verify", file, "--tile", "2x2", "--json"]) == 0
    verified = json.loads(capsys.readouterr().out)
    assert run_line(["verify", file, "--tile", "1x4"]) == 2
    refused = capsys.readouterr().err
    assert run_line(["show", file, "-o", str(picture)]) == 0
    for other in ("msccl-xml", "chakra-et"):
        assert run_line(["export", file, "--to", other, "-o", str(tmp_path / "other")]) == 2
        assert "needs one sum over all ranks, but colours sums 4" in capsys.readouterr().err

    assert "5 tiles of 2x2: 4 colours, each summed over 5 chips at the same time" in planned
    assert "times the limit" in planned
    assert verified["tiling"]["tiles"] == 5
    assert verified["verified"]
    assert "is a plan for tiles of 2x2, but got --tile 1x4" in refused
    assert picture.read_text().startswith("<svg")


def test_show_draws_a_letter_for_each_tile(capsys: Captured) -> None:
    assert run_line(["show", "--mesh", "4x4", "--fail", "0,0", "--fail", "0,3", "--tile=2x2"]) == 0

    out = capsys.readouterr().out
    assert out.splitlines()[:7] == [
        "x a-a x",
        "  | |",
        "+-a-a-+",
        "| | | |",
        "b-b-c-c",
        "| | | |",
        "b-b-c-c",
    ]
    assert "3 tiles of 2x2, 2 spares (+); no tiling has more" in out


def test_simulate_compares_one_plan_for_all_colours_with_others(capsys: Captured) -> None:
    assert run_line(["simulate", *HOLE, "--tile", "2x2", "--payload", "10MB", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    names = [each["algorithm"] for each in found["results"]]
    assert sorted(names) == ["all-chips", "colours", "independent"]
    assert all(each["time_s"] >= found["limit_s"] for each in found["results"])


def test_a_tile_of_one_chip_is_priced_as_without(capsys: Captured) -> None:
    found = []
    for tile in ([], ["--tile", "1x1"]):
        line = ["simulate", *HOLE, *tile, "--algorithm", "ring-1d", "--payload", "1MB", "--json"]
        assert run_line(line) == 0
        found.append(json.loads(capsys.readouterr().out))

    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["plan", *HOLE, "--tile", "2by2"], "--tile needs positive extents joined by x"),
        (["plan", *HOLE, "--tile", "9x9"], "a tile of 9x9 needs 81 connected live chips"),
        (["plan", *HOLE, "--tile", "2x2", "--lower", "jax"], "does not go with --tile"),
        (["plan", *HOLE, "--tile", "2x2", "--algorithm", "trees"], "an allreduce by 'auto'"),
        (["plan", *HOLE, "--tile", "2x2", "--collective", "all-gather"], "but got all-gather"),
        (["simulate", *HOLE, "--tile", "2x2", "--algorithm", "trees"], "leave out --algorithm"),
        (["simulate", *HOLE, "--tile", "2x2", "--buckets", "2x1MB"], "leave out --algorithm"),
        (["show", *HOLE, "--tile", "2x2", "--algorithm", "trees"], "leave out --algorithm trees"),
    ],
)
def test_what_does_not_go_with_tiles_is_refused_in_one_line(
    line: list[str], message: str, capsys: Captured
) -> None:
    assert run_line(line) == 2

    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1
