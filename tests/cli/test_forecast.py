"""`meshmend forecast` as a user types it."""

import json
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from meshmend.cli.main import commands_by_name, run_line
from meshmend.forecast.inputs import INPUTS, PRESETS
from waiting import HANG_S, until

# Small, so that pricing a hole takes no time.
SMALL = ["--mesh", "4x4", "--host", "2x2", "--failures-per-1000-host-days", "6.5"]
QUICK = [*SMALL, "--repair", "24h", "--years", "5", "--payload", "1MB"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def forecast(*words: str) -> int:
    return run_line(["forecast", *words])


def printed_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert forecast(*words, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_json_has_the_four_answers_the_best_and_the_assumptions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = printed_json(capsys, *QUICK)

    names = ["fire-fighter", "sub-mesh", "spares", "fault-tolerant"]
    assert [answer["name"] for answer in document["answers"]] == names
    for answer in document["answers"]:
        assert abs(answer["goodput"] + sum(answer["lost"].values()) - 1) < 1e-9
        assert answer["p10"] <= answer["goodput"] + 1e-12
        assert answer["p90"] >= answer["p10"]
        assert answer["standard_error"] > 0
    assert document["best"] == max(document["answers"], key=lambda each: each["goodput"])["name"]
    assert any(each.startswith("restart 20min") for each in document["assumptions"])
    assert not any(each.startswith("repair 24h") for each in document["assumptions"])


def test_the_same_seed_prints_the_same_and_the_cache_changes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = printed_json(capsys, *QUICK, "--seed", "3")

    assert printed_json(capsys, *QUICK, "--seed", "3") == first
    assert printed_json(capsys, *QUICK, "--seed", "4") != first


def test_the_table_names_every_cause_and_the_price_of_a_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert forecast(*QUICK, "--price", "2", "--answer", "spares+fault-tolerant") == 0

    out = capsys.readouterr().out
    for word in ("detection", "restart", "lost work", "waiting", "saving", "cost/step"):
        assert word in out
    assert "best         spares+fault-tolerant" in out
    assert "*" in out
    assert "- restart 20min: AIReSim's default" in out


def test_the_table_fits_sixty_columns_with_any_number_of_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["fire-fighter", "sub-mesh", "spares", "fault-tolerant", "fault-tolerant:12+spares"]
    assert forecast(*QUICK, "--price", "2", *(f"--answer={name}" for name in names)) == 0

    table = capsys.readouterr().out.split("\n\n")[1:-1]
    assert len(table) == 2  # four answers side by side, and one below
    assert "".join(table).count("*") == 1
    assert max(len(line) for block in table for line in block.splitlines()) <= 60


def test_a_file_presets_and_options_add_up_and_options_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a machine.toml"
    path.write_text(
        'presets = ["meta-rsc-1"]\nmesh = "4x4"\nhost = "2x2"\nrepair = "48h"\npayload = "1MB"\n'
        "crews = 1\n"
    )
    by_file = printed_json(capsys, "--config", str(path), "--years", "5")
    options = ["--set", "crews=1", "--repair", "48h"]
    by_options = printed_json(capsys, *QUICK, *options)
    other = printed_json(capsys, "--config", str(path), "--years", "5", "--repair", "24h")

    assert by_file["answers"] == by_options["answers"]
    assert other["answers"] != by_file["answers"]
    assert any("preset meta-rsc-1" in each for each in by_file["assumptions"])


def test_options_are_inputs_and_what_is_no_option_is_told_so() -> None:
    options = {
        option.removeprefix("--")
        for parameter in commands_by_name()["meshmend forecast"].params
        for option in parameter.opts
    }

    assert set(INPUTS) & options == {each.name for each in INPUTS.values() if each.is_option}
    assert len(options) < 25


def test_the_example_is_a_file_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forecast("--example") == 0
    text = capsys.readouterr().out
    path = tmp_path / "example.toml"
    path.write_text(text.replace('"32x32"', '"4x4"').replace('"4x2"', '"2x2"'))

    assert tomllib.loads(text)["repair"] == "24h"
    assert printed_json(capsys, "--config", str(path), "--payload", "1MB", "--years", "2")


def test_presets_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert forecast("--list-presets") == 0

    out = capsys.readouterr().out
    assert {"meta-rsc-1", "llama-3", "tpu-v4", "lanl"} <= set(PRESETS)
    assert all(preset.source in out for preset in PRESETS.values())


def test_a_machine_that_never_fails_and_repairs_of_no_time_have_a_page_too(tmp_path: Path) -> None:
    words = ["--mesh", "4x4", "--host", "2x2", "--payload", "1MB", "--years", "2", "--break-even"]
    page = str(tmp_path / "page.html")

    for more in ("--failures-per-1000-host-days 0 --repair 1h", "--preset llama-3 --repair 0s"):
        assert forecast(*words, *more.split(), "-o", page) == 0


@pytest.mark.parametrize(
    "words",
    ["--repair 30years", "--repair 1e20years --set automatic-repair=1e20years --set burst=0.5"],
)
def test_repairs_that_outlast_every_year_are_forecast(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = printed_json(capsys, *SMALL, *words.split(), "--payload", "1MB", "--years", "2")

    assert document["answers"][0]["lost"]["waiting"] > 0.9


def test_break_evens_say_where_the_best_answer_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "--answer",
        "fire-fighter",
        "--answer",
        "spares",
        "--break-even",
        "--set",
        "restart=1s",
    ]

    document = printed_json(capsys, *QUICK, *words)

    assert document["break_even"] == [
        "1 spare: with fewer fire-fighter is best, with as many spares"
    ]


def test_a_trace_is_replayed_and_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "outages.csv"
    path.write_text("node,down,up\na,0,86400\nb,172800,180000\na,259200,345600\n")

    replayed = printed_json(capsys, *QUICK, "--trace", str(path))
    fit = printed_json(capsys, "--trace", str(path), "--fit")

    assert (replayed["days"], "years" in replayed) == (4, False)
    waiting = replayed["answers"][0]["lost"]["waiting"]
    assert waiting == pytest.approx((86400 + 7200 + 86400) / 345600, abs=0.02)
    assert (fit["nodes"], fit["outages"]) == (2, 3)


def test_the_table_of_a_trace_speaks_of_its_days(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "outages.csv"
    path.write_text("node,down,up\na,0,86400\nb,172800,180000\na,259200,345600\n")

    assert forecast(*QUICK, "--trace", str(path)) == 0

    out = capsys.readouterr().out
    assert "replayed     4 days, the same failures for each answer" in out
    assert "P10 day" in out
    assert "year" not in out.partition("assumed")[0]


def test_the_page_needs_no_network_and_has_every_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new" / "forecast.html"

    assert forecast(*QUICK, "-o", str(page)) == 0

    text = page.read_text()
    assert f"written      {page}" in capsys.readouterr().out
    for words in (
        "Where the time goes",
        "One year, the same failures",
        "Which answer is best",
        "Goodput against mean repair time",
        "Goodput against spare units",
        "Goodput against chips",
        "What is assumed",
    ):
        assert words in text
    for reference in ("http://", "https://", "src=", "url("):
        assert reference not in text.replace("http://www.w3.org/2000/svg", "")


# A process whose parent ignores Ctrl-C would ignore it too.
INTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from meshmend.cli.main import main; main()"
)


def test_a_long_forecast_says_what_it_does_and_ends_with_ctrl_c_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "err"
    words = [sys.executable, "-c", INTERRUPTIBLE, "forecast", *QUICK, "--years", "1000000"]
    with path.open("w") as err, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=err) as run:
        try:
            until(lambda: " ..." in path.read_text(), why=path.read_text)
            run.send_signal(signal.SIGINT)
            try:
                out, _ = run.communicate(timeout=HANG_S / 10)
            except subprocess.TimeoutExpired:  # Python drops one that falls into a finalizer
                run.send_signal(signal.SIGINT)
                out, _ = run.communicate(timeout=HANG_S)
        finally:
            run.kill()

    assert (run.returncode, out) == (130, b"")
    *others, last = path.read_text().splitlines()
    assert last == "meshmend: interrupted"
    assert all(line.startswith("meshmend: ") for line in others)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--failures-per-1000-host-days -1 --repair 1h", "needs a number from 0 to 1e+06"),
        ("--failures-per-1000-host-days x --repair 1h", "needs a number, but got 'x'"),
        ("--failures-per-1000-host-days nan --repair 1h", "needs a number from 0"),
        (
            "--failures-per-1000-host-days 1 --repair 24",
            "a duration needs a unit such as ms, s, min",
        ),
        ("--failures-per-1000-host-days 1 --repair -1h", "--repair: a duration needs a number"),
        ("--failures-per-1000-host-days 1", "needs the mean repair time: give --repair"),
        ("--repair 1h", "needs to know how often something fails"),
        ("--preset nobody", "--preset needs one of meta-rsc-1"),
        ("--failures-per-1000-host-days 1 --repair 1h --host 3x3", "needs to tile the mesh"),
        ("--failures-per-1000-host-days 1 --repair 1h --host 3y", "extents joined by x"),
        ("--failures-per-1000-host-days 1 --repair 1h --wrap 7", "--wrap needs none, all"),
        ("--failures-per-1000-host-days 1 --repair 1h --fabric x", "--fabric needs one of"),
        (
            "--failures-per-1000-host-days 1 --repair 1h --set algorithm=x",
            "--set algorithm needs one of",
        ),
        ("--failures-per-1000-host-days 1 --repair 1h --years 0", "--years needs a number from 1"),
        ("--failures-per-1000-host-days 1 --repair 1h --seed -1", "--seed needs a number from 0"),
        ("--failures-per-1000-host-days 1 --repair 1h --answer pray", "--answer needs one of"),
        ("--failures-per-1000-host-days 1 --repair 1h --set crews=1.5", "needs a whole number"),
        (
            "--failures-per-1000-host-days 1 --repair 1h --set spare-unit=x",
            "--set spare-unit needs host",
        ),
        (
            "--failures-per-1000-host-days 1 --repair 1h --set batch=big",
            "needs one of kept, shrunk",
        ),
        ("--failures-per-1000-host-days 1 --repair 1h --price -1", "--price needs a number"),
        (
            "--failures-per-1000-host-days 1 --repair 1h --config no.toml",
            "cannot read --config no.toml",
        ),
        ("--config /dev/zero", "it is a device, not a file"),
        (
            "--failures-per-1000-host-days 1 --repair 1h --trace no.csv",
            "cannot read the trace no.csv",
        ),
        ("--trace /dev/zero --fit", "it is a device, not a file"),
        (
            "--failures-per-1000-host-days 1 --repair 1h --set tile=3x1",
            "the tile 3x1 needs to tile",
        ),
        (
            "--failures-per-1000-host-days 1 --repair 1h --set tile=2x2 --set algorithm=trees",
            "tiles are summed by auto, but got 'trees'",
        ),
        ("--fit", "--fit needs a trace"),
        ("--crews 2", "(it is an input: --set crews=VALUE)"),
        ("--crew 2", "(see meshmend forecast --help)"),
        ("--set crews", "--set needs NAME=VALUE, but got 'crews'"),
        ("--set crew=2", "forecast knows no input 'crew'; see meshmend forecast --example"),
        ("--failures-per-1000-host-days 1 --repair 1h --spares 1000000", "--spares needs at most"),
        ("--set failures-per-1000-chip-days=1e6 --repair 1s", "at most 2000000 failures a year"),
        ("--failures-per-1000-host-days 1 --repair 1h -o /dev/null/x.html", "cannot write"),
        ("--failures-per-1000-host-days 1 --repair 1h -o page.svg", "-o writes HTML"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    line: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert forecast("--mesh", "4x4", "--host", "2x2", *line.split()) == 2

    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert len([each for each in err.splitlines() if "compiling" not in each]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh = ", "--config needs a TOML file"),
        ("speed = 3", "forecast knows no input 'speed'"),
        ("mesh = [4, 4]", "mesh needs a text or a number"),
        ('presets = "llama-3"', "presets needs a list of names"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_2(
    text: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)

    assert forecast("--config", str(path), "--repair", "1h") == 2
    assert message in capfd.readouterr().err


def test_a_value_that_cannot_be_read_is_told_before_what_is_missing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert forecast("--set", "crews=x") == 2
    assert "--set crews needs a whole number" in capfd.readouterr().err


def test_a_mesh_of_four_axes_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "failures-per-1000-chip-days=1", "--repair", "1h", "--host", "1x1x1x1"]

    assert forecast("--mesh", "2x2x2x2", *words) == 2
    assert "at most 3 axes" in capfd.readouterr().err
