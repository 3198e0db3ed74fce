"""The README's program prints what the README says, and the files that it names are there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_ten_lines_print_what_stands_below_them() -> None:
    match = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)
    assert match is not None

    ended = subprocess.run([sys.executable, "-c", match[1]], capture_output=True, text=True)

    assert ended.stdout == match[2]
    assert ended.returncode == 0


def test_every_file_that_the_readme_names_is_there() -> None:
    paths = re.findall(r"\]\(([^)#:]+)\)", README)

    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
