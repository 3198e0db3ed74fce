"""`meshmend simulate`, `fabrics` and `show` as a user types them."""

import gzip
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from meshmend.cli.main import run_line
from meshmend.simulator import trace

HOLE = ["--mesh", "4x4", "--fail", "2x2@0,2"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def printed_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run_line([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_all_algorithms_stand_beside_the_limit_and_none_is_below_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = printed_json(
        capsys, "simulate", *HOLE, "--payload", "1MB", "--algorithm", "all,auto"
    )

    assert document["fabric"]["name"] == "reference"
    assert document["payload_bytes"] == 1_000_000
    assert document["limit_kind"] in {"bandwidth", "exit", "chip"}
    names = [result["algorithm"] for result in document["results"]]
    assert {"trees", "ring-1d", "ft-two-d", "rank-ring", "sub-mesh", "drop-lines"} <= set(names)
    on_all_chips = [result for result in document["results"] if result["chips"] == 12]
    times = {result["algorithm"]: result["time_s"] for result in on_all_chips}
    assert times["auto"] <= 1.02 * min(times.values())
    for result in document["results"]:
        assert result["ratio_to_limit"] == pytest.approx(result["time_s"] / document["limit_s"])
        if result["chips"] == 12:
            assert result["ratio_to_limit"] >= 1
        assert 0 < result["max_link_utilisation"] <= 1


def test_the_cost_of_a_hole_stands_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    before = printed_json(capsys, "simulate", "--mesh", "4x4", "--algorithm", "auto")
    now = printed_json(capsys, "simulate", *HOLE)

    assert run_line(["simulate", *HOLE]) == 0

    (was,) = before["results"]
    best = next(each for each in now["results"] if each["chips"] == 12)
    assert now["whole_mesh_time_s"] == was["time_s"]
    assert "whole_mesh_time_s" not in before
    text = capsys.readouterr().out
    assert f"on 4x4; with what has failed {best['algorithm']} takes " in text
    assert f", {best['time_s'] / was['time_s'] - 1:.1%} longer\n" in text


def test_a_sweep_prints_every_payload_and_draws_the_curve(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "curve.svg"
    document = printed_json(
        capsys,
        *("simulate", *HOLE, "--payload", "1KB..100KB", "--algorithm", "trees,ring-1d"),
        *("-o", str(picture)),
    )

    assert [each["payload_bytes"] for each in document["sweep"]] == [1_000, 10_000, 100_000]
    text = picture.read_text()
    ElementTree.fromstring(text)
    assert "trees" in text
    assert "limit" in text


def test_a_trace_opens_as_trace_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json.gz"

    code = run_line(
        ["simulate", *HOLE, "--payload", "10KB", "--algorithm", "trees", "--save-trace", str(trace)]
    )

    assert code == 0
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event["ph"] == "X" and event["dur"] > 0 for event in events)


def test_a_large_trace_is_thinned_out_and_its_size_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trace.json.gz"

    def slices_written() -> tuple[set[str], str]:
        line = ["simulate", *HOLE, "--payload", "10MB", "--algorithm", "trees"]
        assert run_line([*line, "--save-trace", str(file)]) == 0
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        names = {event["name"] for event in events if event["ph"] == "X"}
        return {name.split("slice ")[1] for name in names}, capsys.readouterr().err

    all_of_them, _ = slices_written()
    monkeypatch.setattr(trace, "_USUAL_BARS", 2000)
    few, said = slices_written()

    assert 1 < len(few) < len(all_of_them)
    assert f"the trace of trees has {len(few)} of {len(all_of_them)} slices, " in said
    assert {"0", str(len(all_of_them) - 1)} <= few


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--save-trace t.pb", "--save-trace writes JSON"),
        ("--save-trace t.json --payload 1KB..1MB", "--save-trace needs one payload"),
    ],
)
def test_a_trace_that_cannot_be_written_is_refused(
    options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_line(["simulate", *HOLE, *options.split()]) == 2
    assert said in capsys.readouterr().err


def test_tables_fit_sixty_columns_and_a_star_marks_the_fastest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for payload in ("1MB", "1KB..1GB"):
        assert run_line(["simulate", *HOLE, "--payload", payload]) == 0
        lines = capsys.readouterr().out.splitlines()
        table = [line for line in lines if line.lstrip("* ").startswith(("trees", "ring-1d"))]

        assert len(table) >= 2
        assert all(len(line) <= 60 for line in table)
        assert any("*" in line for line in table)


def test_a_sweep_says_where_the_fastest_algorithm_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["simulate", "--mesh", "8x8", "--algorithm", "row-pair,ring-1d", "--payload", "1KB..1GB"]
    document = printed_json(capsys, *line)
    (found,) = document["crossovers"]
    times = {
        point["payload_bytes"]: {each["algorithm"]: each["time_s"] for each in point["results"]}
        for point in document["sweep"]
    }

    assert (found["before"], found["after"]) == ("row-pair", "ring-1d")
    for payload, time_s in times.items():
        assert (time_s["ring-1d"] < time_s["row-pair"]) == (payload > found["payload_bytes"])
    assert run_line(line) == 0
    assert "on ring-1d beats row-pair" in capsys.readouterr().out


def test_figures_of_the_fabric_can_be_overridden(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["simulate", *HOLE, "--payload", "1GB", "--algorithm", "ring-1d", "--slices", "1"]
    slow = printed_json(capsys, *one, "--link-bandwidth", "1GB/s")["fabric"]
    late = printed_json(capsys, *one, "--hop-latency", "1us", "--message-overhead", "9ns")["fabric"]

    assert (slow["name"], slow["link_bandwidth_bytes_per_s"]) == ("reference*", 1e9)
    assert (late["hop_latency_s"], late["message_overhead_s"]) == (1e-6, 9e-9)


def test_a_fabric_may_be_figures_of_your_own(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["simulate", *HOLE, "--payload", "1GB", "--algorithm", "ring-1d", "--slices", "1"]
    slow = printed_json(capsys, *one, "--fabric", "1GB/s,0.5us,50ns")
    fast = printed_json(capsys, *one, "--fabric", "10GB/s,0.5us,50ns")

    assert slow["fabric"]["name"] == "1GB/s,0.5us,50ns"
    assert slow["results"][0]["time_s"] == pytest.approx(
        10 * fast["results"][0]["time_s"], rel=0.01
    )


def test_fabrics_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    document = printed_json(capsys, "fabrics")

    names = {fabric["name"] for fabric in document["fabrics"]}
    assert {
        "reference",
        "tpu-v2",
        "tpu-v3",
        "tpu-v7",
        "trainium2",
        "wormhole-galaxy",
        "dojo",
    } <= names
    assert all(fabric["source"] for fabric in document["fabrics"])


@pytest.mark.parametrize("algorithm", ["trees", "ring-1d", "ft-two-d", "rank-ring"])
def test_show_draws_what_an_algorithm_lays_over_the_mesh(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "rings.svg"

    assert run_line(["show", *HOLE, "--algorithm", algorithm, "-o", str(picture)]) == 0
    assert run_line(["show", *HOLE, "--algorithm", algorithm, "--load", "-o", str(picture)]) == 0
    ElementTree.fromstring(picture.read_text())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", *HOLE, "--algorithm", "nope"], "no algorithm 'nope'"),
        (["simulate", *HOLE, "--algorithm", "two-d"], "two-d needs a full mesh"),
        (["simulate", *HOLE, "--payload", "lots"], "needs a number and a unit"),
        (["simulate", *HOLE, "--fabric", "abacus"], "--fabric needs one of"),
        (["simulate", *HOLE, "--slices", "0"], "--slices needs 1 or more"),
        (["simulate", *HOLE, "--payload", "1KB..1MB", "--save-trace", "x"], "one payload"),
        (["show", *HOLE, "--load", "-o", "x.svg"], "--load needs --algorithm"),
        (["show", *HOLE, "--algorithm", "trees"], "--algorithm needs -o"),
        (["show", *HOLE, "--algorithm", "nope", "-o", "x.svg"], "no algorithm 'nope'"),
        (["show", *HOLE, "--route", "0,0-0,2"], "two live chips"),
        (["show", *HOLE, "--route", "2x2@0,0-3,3"], "two live chips"),
        (["show", *HOLE, "--route", "0,0-0,0"], "two different chips"),
        (["verify", "plan.json", "--fail", "0,0"], "--fail, --slow and --wrap need --mesh"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_line(arguments) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_buckets_in_flight_stand_next_to_one_sum_of_the_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["simulate", *HOLE, "--buckets", "4x250KB", "--algorithm", "trees,ring-1d"]

    document = printed_json(capsys, *line)

    assert (document["buckets"], document["bucket_bytes"]) == (4, 250_000)
    assert {result["algorithm"] for result in document["results"]} == {"trees", "ring-1d"}
    for result in document["results"]:
        assert result["in_flight_s"] < result["one_at_a_time_s"]
        assert result["in_flight_of_whole"] == pytest.approx(
            result["in_flight_s"] / result["whole_s"]
        )
    assert run_line(line) == 0
    printed = capsys.readouterr().out
    assert "4 x 250 KB, in all 1 MB" in printed
    assert "in flight" in printed


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--buckets", "4"], "write 4x25MB"),
        (["--buckets", "0x1MB"], "--buckets needs 1 to 1000 buckets"),
        (["--buckets", "4x1MB", "--payload", "1MB"], "--buckets does not go with --payload"),
        (["--buckets", "4x1MB", "-o", "x.svg"], "--buckets does not go with -o"),
        (["--buckets", "4x1MB", "--algorithm", "sub-mesh"], "needs algorithms for the whole mesh"),
    ],
)
def test_buckets_that_make_no_sense_are_refused_in_one_line(
    arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_line(["simulate", *HOLE, *arguments]) == 2
    errors = capsys.readouterr().err
    assert match in errors
    assert len(errors.splitlines()) == 1
