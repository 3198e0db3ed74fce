"""Options and result files of the benchmarks: dated JSON, with the machine and the versions."""

import argparse
import datetime
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, with `--no-write`; other options are added to it."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--no-write", action="store_true", help="print only")
    return parser


def record(name: str, figures: dict[str, Any]) -> Path:
    """Write `results/NAME-DATE.json` and return its path."""
    today = datetime.date.today().isoformat()
    document = {
        "benchmark": name,
        "date": today,
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("meshmend", "numba", "numpy")},
        },
        **figures,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{today}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def read_today(name: str) -> dict[str, Any]:
    """Return the figures of today's file, so that a benchmark may go on where it ended."""
    path = RESULTS / f"{name}-{datetime.date.today().isoformat()}.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for key in ("benchmark", "date", "machine", "versions"):
        document.pop(key, None)
    figures: dict[str, Any] = document
    return figures
