"""Every example runs and prints what its `.out` file says."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_prints_what_it_says(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=600,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == example.with_suffix(".out").read_text(encoding="utf-8")


def test_there_are_examples_and_no_output_is_left_without_one() -> None:
    assert EXAMPLES
    outputs = sorted(EXAMPLES[0].parent.glob("*.out"))
    assert [path.stem for path in outputs] == [path.stem for path in EXAMPLES]
