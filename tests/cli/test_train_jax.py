"""`meshmend train --framework jax` as a user types it."""

import json
from pathlib import Path

import pytest

from commanding import commands
from forked_script import run_program
from meshmend.cli.main import run_line
from meshmend.planning.compile_once import compile_once
from packages import needs

pytestmark = needs("jax", "optax", "sklearn", "tensorboardX")


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("--framework numpy", "the framework needs to be one of torch, jax, but got 'numpy'"),
        (
            "--framework jax nosuch",
            "the model needs to be one of resnet, bert, gpt, but got 'nosuch'",
        ),
        ("--framework jax gpt", "--framework jax has resnet and bert, but got gpt"),
        ("--framework jax --size full", "has tiny models only, but got --size full"),
        ("--framework jax --norm batch", "has group normalisation only, but got --norm batch"),
    ],
)
def test_what_jax_cannot_train_is_refused_in_one_line(
    line: str, match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_line(["train", *line.split()]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert match in said


@pytest.mark.parametrize(
    ("framework", "missing", "extra"),
    [("jax", "jax", "jax,train"), ("jax", "optax", "jax,train"), ("torch", "torch", "train")],
)
def test_without_its_packages_one_line_says_what_to_install(
    framework: str, missing: str, extra: str
) -> None:
    compile_once()  # else a line says that it compiles
    program = (
        f"import sys\nsys.modules[{missing!r}] = None\n"
        "from meshmend.cli.main import run_line\n"
        f"sys.exit(run_line(['train', '--framework', {framework!r}]))\n"
    )
    done = run_program(program)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"meshmend: --framework {framework} needs {missing}, but it is not installed; run: "
        f"pip install 'meshmend[{extra}]'\n"
    )


@pytest.mark.slow
def test_a_jax_run_loses_a_chip_without_a_sample_and_is_resumed_by_jax_alone(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    common = ("train", "--framework", "jax", "--json")
    with commands(tmp_path) as start:
        mesh = (
            "--mesh",
            "1x3",
            "--batch",
            "12",
            "--steps",
            "8",
            "--save-every",
            "4",
            "--run-dir",
            first,
        )
        fault = ("--inject", "kill 0,2 at 3", "--check-every-step")
        ran = start("one", *common, *mesh, *fault)
        assert ran.end() == 0, ran.err
        two = ("--mesh", "1x1", "--batch", "4", "--steps", "10", "--run-dir", second)
        cache = str(first / "compiled")  # the same share, so the same program
        line = (*common, *two, "--lr", "0.01", "--resume", first)
        again = start("two", *line, JAX_COMPILATION_CACHE_DIR=cache)
        assert again.end() == 0, again.err
        other = start("three", "train", "--mesh", "1x1", "--steps", "10", "--resume", first)
        assert other.end() == 2
    result, resumed = json.loads(ran.out), json.loads(again.out)
    assert (result["steps"], result["chips"]) == (8, [3, 2])
    assert result["samples"] == {"used": 96, "lost": 0, "repeated": 0}
    assert result["replicas_equal"] is True
    assert (resumed["steps"], resumed["samples"]["used"]) == (10, 8)
    why = "another framework wrote it: it has a state of jax, but this job is of torch"
    assert f"step-00000008: {why}" in other.err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet", "bert"])
def test_a_chip_that_is_killed_comes_back(model: str, tmp_path: Path) -> None:
    faults = ("--inject", "kill 0,1 at 20", "--inject", "repair 0,1 at 40")
    line = ("train", model, "--framework", "jax", "--mesh", "2x2", "--json", *faults)
    with commands(tmp_path) as start:
        ran = start("run", *line, "--steps", "400", "--run-dir", tmp_path / "run")
        assert ran.end() == 0, ran.err
    result = json.loads(ran.out)
    assert (result["steps"], result["chips"], result["replicas_equal"]) == (400, [4, 3, 4], True)
    assert result["samples"] == {"used": 25600, "lost": 0, "repeated": 0}
    assert result["final_loss"] < result["first_loss"] / 1.2
