"""What came out of a bench: a JSON value, a chart, and a file for the records."""

import datetime
import json
import os
import platform
import subprocess
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshmend.bench.benchmark import BenchmarkResults, Race, Result
from meshmend.draw.chart import Axis, Series, chart_svg
from meshmend.units import format_bandwidth, format_bytes, format_time

LIMIT_NOTE = "at the link rate asked for, all of it payload"
NO_LIMIT_NOTE = "no limit: loopback has no links of a known rate"


def summary(meeting: BenchmarkResults) -> dict[str, Any]:
    """Return the figures as a JSON value; a sweep over payloads is a list of races."""
    request = meeting.request
    head = {
        "mesh": str(request.mesh),
        "testbed_bytes_per_s": request.link_bandwidth,
        "limit": NO_LIMIT_NOTE if request.link_bandwidth is None else LIMIT_NOTE,
        "fabric": asdict(meeting.fabric),
        "absent": meeting.absent,
    }
    races = [_race_summary(race) for race in meeting.races]
    return head | ({"sweep": races} if len(races) > 1 else races[0])


def _race_summary(race: Race) -> dict[str, Any]:
    return {
        "payload_bytes": race.payload_bytes,
        "limit_s": race.limit_s,
        "results": [_result_summary(race, result) for result in race.results],
    }


def _result_summary(race: Race, result: Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "median_s": result.median_s,
        "min_s": min(result.times_s),
        "max_s": max(result.times_s),
        "ratio_to_limit": race.ratio(result.median_s),
        "predicted_s": result.predicted_s,
        "correct": result.correct,
        "detail": result.detail,
        "times_s": list(result.times_s),
    }


def meeting_svg(meeting: BenchmarkResults) -> str:
    """Return the chart of ratio to the limit against payload; of times, where there is none."""
    races = meeting.races
    has_limit = meeting.request.link_bandwidth is not None
    payloads = [float(race.payload_bytes) for race in races]
    curves = []
    for number, first in enumerate(races[0].results):
        times = [race.results[number].median_s for race in races]
        curves.append(Series(first.name, payloads, _heights(races, times)))
        predicted = [race.results[number].predicted_s for race in races]
        known = [time_s for time_s in predicted if time_s is not None]
        if len(known) == len(races):
            name = f"{first.name}, predicted"
            curves.append(Series(name, payloads, _heights(races, known), dashed=True))
    if has_limit:
        curves.append(Series("limit", payloads, [1.0] * len(races), dashed=True))
    return chart_svg(
        curves,
        x=Axis("payload", write=format_bytes),
        y=Axis("median time over the physical limit")
        if has_limit
        else Axis("median time", write=format_time),
        title=f"Allreduce measured on {meeting.request.mesh}",
        caption=f"{_where(meeting)} Lower is better. Dashed: simulated on {meeting.fabric}.",
    )


def _heights(races: tuple[Race, ...], times: list[float]) -> list[float]:
    return [time_s / (race.limit_s or 1.0) for race, time_s in zip(races, times, strict=True)]


def _where(meeting: BenchmarkResults) -> str:
    rate = meeting.request.link_bandwidth
    if rate is None:
        return "Processes on loopback."
    return f"A testbed with links of {format_bandwidth(rate)} each way."


def save(meeting: BenchmarkResults, folder: Path) -> Path:
    """Write `bench-MESH-DATE.json` with the machine and versions, and return its path."""
    today = datetime.date.today().isoformat()
    words = "".join(c if c.isalnum() else "-" for c in str(meeting.request.mesh))
    network = "loopback" if meeting.request.link_bandwidth is None else "testbed"
    path = folder / f"bench-{network}-{words}-{today}.json"
    document = {
        "benchmark": "bench",
        "date": today,
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": _versions(),
        **summary(meeting),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("meshmend", "numba", "numpy", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    try:
        said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
        found["openmpi"] = said.stdout.splitlines()[0].split()[-1]
    except (OSError, IndexError):
        pass
    return found
