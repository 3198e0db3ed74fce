"""Every block of code of docs/your-loop.md runs, as a reader would type it."""

import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from forked_script import run_forked

pytest.importorskip("torch", reason="the page needs: pip install 'meshmend[torch]'")

PAGE = (Path(__file__).parent.parent / "docs" / "your-loop.md").read_text(encoding="utf-8")
PLAIN, MENDED, REST, CHECKPOINTS = map(str, re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
RUN = re.findall(r"^    (meshmend run .*)$", PAGE, re.MULTILINE)
LAST_LINE = re.findall(r"^    (meshmend: .*)$", PAGE, re.MULTILINE)


def run(folder: Path, script: str) -> str:
    with chdir(folder):
        ended = run_forked(str(folder / script))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def losses(printed: str) -> list[float]:
    return [float(each) for each in re.findall(r"loss ([\d.]+)", printed)]


def resuming(steps: int) -> str:
    """Return the mended loop with the checkpoints of the page, and so many steps."""
    imports, _, call = CHECKPOINTS.partition("\n\njob = ")
    script = MENDED.replace("from meshmend.train import Job\n", imports + "\n")
    made = "job = " + call.replace("128", str(steps))
    return script.replace("job = Job(model, optimizer, loader, steps=128)\n", made)


def test_the_page_is_read_in_ten_minutes() -> None:
    assert len(PAGE.split()) <= 1100


def test_both_loops_learn_and_five_lines_differ(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "train.py").write_text(MENDED)

    plain, mended = losses(run(tmp_path, "plain.py")), losses(run(tmp_path, "train.py"))

    assert len(plain) == 2
    assert len(mended) == 4
    assert plain[-1] < plain[0] / 2
    assert mended[-1] < mended[0] / 2
    new = [line for line in MENDED.splitlines() if line.strip() and line not in PLAIN.splitlines()]
    assert len([line for line in new if "loss =" not in line and "zero_grad" not in line]) <= 6


def test_the_rest_of_a_loop_learns_and_saves(tmp_path: Path) -> None:
    made, _, _ = MENDED.partition("job = ")
    (tmp_path / "train.py").write_text(made + REST)

    printed = run(tmp_path, "train.py")

    errors = [float(each) for each in re.findall(r"error ([\d.]+)", printed)]
    assert len(errors) == 2
    assert errors[1] < errors[0] / 2
    assert (tmp_path / "model.pt").stat().st_size > 0


def test_a_job_of_the_page_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    for steps in (60, 96):
        (tmp_path / "train.py").write_text(resuming(steps) + f"assert len(job) == {steps}\n")
        printed = run(tmp_path, "train.py")

    assert re.findall(r"step (\d+) loss", printed) == ["64", "96"]


@pytest.mark.slow
def test_the_command_of_the_page_prints_the_line_that_it_promises(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MENDED)
    (command,), (promised,) = RUN, LAST_LINE
    words = re.findall(r'"[^"]*"|\S+', command)

    line = [sys.executable, "-m", "meshmend", *(word.strip('"') for word in words[1:])]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=600)

    assert ended.returncode == 0, ended.stderr
    assert promised in ended.stderr
