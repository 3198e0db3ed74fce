"""Draws a training job that loses a board and gets it back: as a timeline, and moving.

    python benchmarks/survival_picture.py [-o FOLDER]

Runs the command at the top of the README and draws survives.svg, the timeline of its report, and
moving.svg, which plays its events.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from meshmend.pages.report.training_page import timeline_svg
from meshmend.pages.report.training_run import training_run
from moving_picture import moving_svg

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
FAULTS = ("kill 2x2@0,2 at 30", "repair 2x2@0,2 at 60")


def main() -> None:
    """Train, and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=PICTURES)
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        command = [sys.executable, "-m", "meshmend", "train", "--run-dir", str(folder), "--json"]
        for fault in FAULTS:
            command += ["--inject", fault]
        summary = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    run = training_run(lines)
    (output / "survives.svg").write_text(timeline_svg(run), encoding="utf-8")
    (output / "moving.svg").write_text(moving_svg(run), encoding="utf-8")
    print(f"written {output}: replicas equal {summary['replicas_equal']}")


if __name__ == "__main__":
    main()
