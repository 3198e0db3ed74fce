"""`meshmend bench` from the command line."""

import json
from pathlib import Path

import pytest

from meshmend.cli.main import run_line


def bench(line: str) -> int:
    """Run `meshmend bench` with these words and return its exit code."""
    return run_line(["bench", *line.split()])


def test_bench_prints_one_json_object_and_writes_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chart, folder = tmp_path / "chart.svg", tmp_path / "results"

    code = bench(f"--mesh 1x2 --payload 8KiB --repeat 2 -o {chart} --save {folder} --json")

    document = json.loads(capfd.readouterr().out)
    assert code == 0
    assert document["limit_s"] is None
    assert document["results"][0]["name"] == "auto"
    assert document["results"][0]["correct"] is True
    assert chart.read_text().startswith("<svg")
    assert len(list(folder.glob("bench-loopback-1x2-*.json"))) == 1


def test_bench_prints_a_table_with_the_figures_of_the_links(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert bench("--mesh 2x2 --payload 8KiB --repeat 1 --algorithm auto,ring-1d") == 0

    out = capfd.readouterr().out
    assert "network      loopback, no rate limit" in out
    assert "fabric       measured: " in out
    assert "8.19 KB: no limit: loopback has no links of a known rate" in out
    assert "ring-1d, 8 chunks" in out


@pytest.mark.parametrize(("load", "n_lines"), [(1000.0, 1), (0.0, 0)])
def test_a_busy_host_is_told_before_measuring(
    load: float, n_lines: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))

    assert bench("--mesh 1x2 --payload 8KiB --repeat 1") == 0
    said = capfd.readouterr().err.splitlines()
    assert len([line for line in said if "this host is busy (load 1000.0 on " in line]) == n_lines


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--mesh 2x2 --repeat 0", "--repeat needs 1 or more, but got 0"),
        ("--mesh 2x2 --payload many", "a size needs a number and a unit, but got 'many'"),
        ("--mesh 2x2 --testbed fast", "a bandwidth needs a number and a unit, but got 'fast'"),
        ("--mesh 2x2 --compare nccl", "--compare needs gloo or openmpi, but got 'nccl'"),
        ("--mesh 2x2 --algorithm magic", "there is no algorithm 'magic'"),
        ("--mesh 1x1", "bench needs two connected chips or more"),
        ("--mesh 2x2 --testbed 1bit", "a testbed needs links of"),
        ("--mesh 2x2 --slow link:0,0-0,1=0.5", "--slow needs --testbed RATE"),
        ("--mesh 2x2 --testbed 1Mbit --slow link:0,0-0,1=0", "needs a speed from 0.001 to 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    line: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench(line) == 2

    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert len([each for each in err.splitlines() if "compiling" not in each]) == 1
