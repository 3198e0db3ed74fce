"""What `--help` and mistakes say: examples for every command, and where to read on."""

import pytest

from meshmend.cli.main import commands_by_name, run_line

# These print no figures: they run a script or a command, or print a job's file.
WITHOUT_JSON = {
    "meshmend explore",
    "meshmend run",
    "meshmend coordinator",
    "meshmend worker",
    "meshmend agent",
    "meshmend testbed exec",
    "meshmend submit slurm",
    "meshmend submit jobset",
    "meshmend submit job",
}


COMMANDS = commands_by_name()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_of_itself(name: str) -> None:
    words = COMMANDS[name].help or ""

    assert "**Examples**" in words
    examples = [line.strip() for line in words.split("**Examples**")[1].splitlines() if line]
    assert any(name in line for line in examples), name


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - WITHOUT_JSON))
def test_every_command_that_prints_figures_takes_json(name: str) -> None:
    assert "--json" in [option for each in COMMANDS[name].params for option in each.opts]


def test_an_option_asks_for_the_same_thing_in_every_command() -> None:
    """`--output` asks for a file, a folder, or either; `--set` of a forecast has no groups."""
    asked: dict[str, set[str | None]] = {}
    for command in COMMANDS.values():
        for each in command.params:
            name = next((name for name in each.opts if name.startswith("--")), "")
            if name and not getattr(each, "is_flag", False) and not each.hidden:
                asked.setdefault(name, set()).add(each.metavar)

    assert [name for name, words in asked.items() if None in words] == []
    assert {name for name, words in asked.items() if len(words) > 1} == {"--output", "--set"}


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("plan --nope", "meshmend plan --help"),
        ("plan", "meshmend plan --help"),
        ("testbed up --nope", "meshmend testbed up --help"),
        ("testbed nope", "meshmend testbed --help"),
        ("checkpoint export --nope", "meshmend checkpoint export --help"),
        ("nope", "meshmend --help"),
    ],
)
def test_a_mistake_points_to_the_help_of_its_own_command(
    line: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_line(line.split()) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.endswith(f"(see {where})")
