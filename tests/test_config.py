"""The tree of settings: where a setting comes from, what is refused, and what is made of it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.cli.main import commands_by_name, run_line
from meshmend.config import (
    COMMANDS,
    LEAVES,
    JobConfig,
    Leaf,
    command_words,
    job_config,
    settings_page,
)
from meshmend.errors import InputError

Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[1]
KEY, VARIABLE = "timing.link_timeout", "MESHMEND_LINK_TIMEOUT"


def values_of(leaf: Leaf) -> st.SearchStrategy[Any]:
    """Values that a setting may have."""
    word = st.text(st.characters(categories=["L", "N"]), min_size=1)
    least = -(10**6) if leaf.least is None else leaf.least
    most = 10**6 if leaf.most is None else leaf.most
    numbers = st.integers(int(least), int(most)), st.floats(least, most)
    return {
        bool: st.booleans(),
        str: st.sampled_from(leaf.one_of) if leaf.one_of else word,
        tuple: st.lists(word).map(tuple),
        int: numbers[0],
        float: numbers[1],
    }[leaf.kind]


CONFIGS = st.fixed_dictionaries({}, optional={k: values_of(v) for k, v in LEAVES.items()}).map(
    JobConfig().with_
)


def options_in(command: str, words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a command's options by key, and its assignments."""
    key_of = {LEAVES[key].option: key for key in COMMANDS[command].options}
    given: dict[str, Any] = {}
    assignments, rest = [], list(words)
    while rest:
        name = rest.pop(0)
        if name == "--set":
            assignments.append(rest.pop(0))
        elif LEAVES[key_of[name]].kind is bool:
            given[key_of[name]] = True
        elif LEAVES[key_of[name]].kind is tuple:
            given.setdefault(key_of[name], []).append(rest.pop(0))
        else:
            given[key_of[name]] = rest.pop(0)
    return given, assignments


@given(CONFIGS, st.sampled_from(sorted(COMMANDS)))
def test_a_command_that_a_launcher_starts_has_the_settings_that_it_reads(
    config: JobConfig, command: str
) -> None:
    options, assignments = options_in(command, command_words(command, config))

    found = job_config(options, assignments=assignments, command=command)

    read = {key: config.get(key) for key in LEAVES if COMMANDS[command].is_read(key)}
    assert {key: found.get(key) for key in read} == read


@given(CONFIGS)
def test_a_worker_reads_the_settings_that_have_variables(config: JobConfig) -> None:
    found = job_config(environment=config.variables())

    told = {key: config.get(key) for key, leaf in LEAVES.items() if leaf.variable}
    assert {key: found.get(key) for key in told} == told


def test_the_first_source_that_has_a_setting_counts(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        "[mesh]\nshape = '3x3'\nboard = '1x3'\n[timing]\nlink_timeout = 4\ngather = 5\n"
    )
    variables = {
        "MESHMEND_MESH": "2x2",
        "MESHMEND_BOARD": "2x2",
        VARIABLE: "3",
        "MESHMEND_JOB": "v",
    }

    config = job_config(
        {"mesh.shape": "4x4"},
        assignments=["mesh.shape=5x5", f"{KEY}=6", f"{KEY}=7"],
        file=file,
        environment=variables,
        defaults={"timing.gather": 600.0, "timing.linger": 9.0},
    )

    assert (config.mesh.shape, config.timing.link_timeout_s) == ("4x4", 7.0)
    assert (config.mesh.board, config.timing.gather_s) == ("1x3", 5.0)
    assert (config.job.name, config.timing.linger_s) == ("v", 9.0)
    assert config.timing.heartbeat_timeout_s == 2.0


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[timing]\nlink_timeout = 0", "timing.link_timeout needs seconds from 0.5 to 1e+06, but"),
        ("[timing]\nlink_timeout = nan", "timing.link_timeout needs seconds .* but got nan"),
        ("[timing]\nlink_timeout = true", "timing.link_timeout needs seconds .* but got True"),
        ("[timing]\nlink_timeot = 3", "no setting 'timing.link_timeot'; did you mean timing.link"),
        ("[mesh]\nfail = 'a'\nshape = 4", "mesh.shape needs a text, but got 4"),
        ("[mesh]\nfail = [4]", "mesh.fail needs a list of texts, but got"),
        (
            "[training]\nsteps = 9007199254740992",
            "needs at most 9007199254740991, but got 9007199254740992",
        ),
        ("[sums]\nslices = 1.5", "sums.slices needs a whole number of at least 0, but got 1.5"),
        ("[sums]\nchecksum = 2", "sums.checksum needs 1 or 0, but got 2"),
        ("link_timeout = 3", "link_timeout needs to be in a group"),
        ("[timing]\nlink_timeout = ", "--config needs a TOML file, but .* is none: Invalid value"),
        ("[training]\nlr = " + "9" * 400, "training.lr needs a number"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(
    text: str, match: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "job.toml").write_text(text)

    assert run_line(["train", "--config", str(tmp_path / "job.toml")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    with pytest.raises(InputError, match=match.replace("+", r"\+")):
        job_config(file=tmp_path / "job.toml")
    assert "job.toml" in said


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("train --set link_timeout=3", "--set: there is no setting 'link_timeout'; did you mean"),
        ("train --set timing.link_timeout", "--set needs GROUP.NAME=VALUE, but got 'timing.link"),
        ("train --set timing.link_timeout=x", "--set timing.link_timeout needs seconds from 0.5"),
        ("train --steps 0", "--steps needs a whole number of at least 1, but got '0'"),
        ("train --config nowhere.toml", "cannot read --config nowhere.toml: No such file"),
        ("train --config /dev/zero", "cannot read --config /dev/zero: it is a device"),
        ("train --config /", "cannot read --config /: Is a directory"),
        ("train --on-wrong-result sing", "--on-wrong-result needs one of restore, continue, stop"),
        ("run --mesh 2x2 --shares half x.py", "--shares needs one of equal, speed, but got 'half'"),
        ("run x.py", "meshmend run needs --mesh RxC, or mesh.shape in --config"),
        (
            "coordinator --mesh 2x2 --listen 127.0.0.1:0 --set training.lr=3",
            "--set training.lr has no effect: meshmend coordinator does not read it",
        ),
        ("run --mesh 2x2 nowhere.py --set a=b", "there is no file nowhere.py"),
    ],
)
def test_what_cannot_be_set_is_refused_in_one_line(line: str, match: str, capsys: Captured) -> None:
    assert run_line(line.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert match in said


def test_an_option_that_does_not_exist_but_is_a_setting_is_told_as_one(capsys: Captured) -> None:
    line = "coordinator --mesh 2x2 --listen 127.0.0.1:7000 --heartbeat-timeout 5"

    assert run_line(line.split()) == 2
    assert "it is a setting: --set timing.heartbeat_timeout=VALUE" in capsys.readouterr().err


def test_a_bad_variable_is_refused_by_name_unless_something_else_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv(VARIABLE, "soon")

    assert run_line(["train", "--set", "timing.link_timeout=3", "--steps", "0"]) == 2
    assert "--steps needs" in capsys.readouterr().err
    assert run_line(["train"]) == 2
    assert f"{VARIABLE} needs seconds from 0.5" in capsys.readouterr().err


def test_the_documentation_shows_the_tables() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()

    assert text.endswith(f"\n{settings_page()}")


@pytest.mark.parametrize("name", commands_by_name())
def test_the_help_of_a_command_fits_two_screens(
    name: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    assert run_line([*name.split()[1:], "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 90
