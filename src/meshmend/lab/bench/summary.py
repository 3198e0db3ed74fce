"""Turns the results of a benchmark into a JSON value, a chart, and a file with date and machine."""

import datetime
import json
import os
import platform
import subprocess
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshmend.lab.bench.benchmark import BenchmarkResults, PayloadResults, Result
from meshmend.pages.draw.chart import Axis, MeasuredBar, Series, bars_svg, chart_svg, limit_series
from meshmend.units import format_bandwidth, format_bytes, format_time

LIMIT_NOTE = "at the link rate asked for, all of it payload"
NO_LIMIT_NOTE = "no limit: loopback has no links of a known rate"


def summary(measured: BenchmarkResults) -> dict[str, Any]:
    """Return the figures as a JSON value; several payloads become the list `sweep`."""
    request = measured.request
    head = {
        "mesh": str(request.mesh),
        "testbed_bytes_per_s": request.link_bandwidth,
        "limit": NO_LIMIT_NOTE if request.link_bandwidth is None else LIMIT_NOTE,
        "fabric": asdict(measured.fabric),
        "absent": measured.absent,
    }
    sweep = [_payload_summary(point) for point in measured.sweep]
    return head | ({"sweep": sweep} if len(sweep) > 1 else sweep[0])


def _payload_summary(point: PayloadResults) -> dict[str, Any]:
    return {
        "payload_bytes": point.payload_bytes,
        "limit_s": point.limit_s,
        "results": [_result_summary(point, result) for result in point.results],
    }


def _result_summary(point: PayloadResults, result: Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "median_s": result.median_s,
        "min_s": min(result.times_s),
        "max_s": max(result.times_s),
        "ratio_to_limit": point.ratio(result.median_s),
        "predicted_s": result.predicted_s,
        "correct": result.correct,
        "detail": result.detail,
        "times_s": list(result.times_s),
    }


def results_svg(measured: BenchmarkResults) -> str:
    """Return the chart of the results: bars for one payload, curves for several.

    They show the ratio to the limit, or times if there is no limit.
    """
    return _bars(measured) if len(measured.sweep) == 1 else _curves(measured)


def _bars(measured: BenchmarkResults) -> str:
    (point,) = measured.sweep
    unit_s = point.limit_s or 1.0
    bars = [
        MeasuredBar(
            result.name,
            result.median_s / unit_s,
            min(result.times_s) / unit_s,
            max(result.times_s) / unit_s,
            None if result.predicted_s is None else result.predicted_s / unit_s,
        )
        for result in point.results
    ]
    has_limit = point.limit_s is not None
    return bars_svg(
        bars,
        words="median time over the physical limit" if has_limit else "median time",
        write="{:.3g}".format if has_limit else format_time,
        limit=1.0 if has_limit else None,
        title=f"Allreduce of {format_bytes(point.payload_bytes)} measured on "
        f"{measured.request.mesh}",
        caption=f"{_where(measured)} Lower is better. Predictions are for {measured.fabric}.",
    )


def _curves(measured: BenchmarkResults) -> str:
    sweep = measured.sweep
    has_limit = measured.request.link_bandwidth is not None
    payloads = [float(point.payload_bytes) for point in sweep]
    curves = []
    for number, first in enumerate(sweep[0].results):
        times = [point.results[number].median_s for point in sweep]
        curves.append(Series(first.name, payloads, _heights(sweep, times)))
        predicted = [point.results[number].predicted_s for point in sweep]
        known = [time_s for time_s in predicted if time_s is not None]
        if len(known) == len(sweep):
            name = f"{first.name}, predicted"
            curves.append(Series(name, payloads, _heights(sweep, known), dashed=True))
    if has_limit:
        curves.append(limit_series(payloads, [1.0] * len(sweep)))
    return chart_svg(
        curves,
        x=Axis("payload", write=format_bytes),
        y=Axis("median time over the physical limit")
        if has_limit
        else Axis("median time", write=format_time),
        title=f"Allreduce measured on {measured.request.mesh}",
        caption=f"{_where(measured)} Lower is better. Dashed: simulated on {measured.fabric}.",
    )


def _heights(sweep: tuple[PayloadResults, ...], times: list[float]) -> list[float]:
    return [time_s / (point.limit_s or 1.0) for point, time_s in zip(sweep, times, strict=True)]


def _where(measured: BenchmarkResults) -> str:
    rate = measured.request.link_bandwidth
    if rate is None:
        return "Processes on loopback."
    return f"A testbed with links of {format_bandwidth(rate)} each way."


def save(measured: BenchmarkResults, folder: Path) -> Path:
    """Write `bench-MESH-DATE.json` with the machine and versions, and return its path."""
    today = datetime.date.today().isoformat()
    words = "".join(c if c.isalnum() else "-" for c in str(measured.request.mesh))
    network = "loopback" if measured.request.link_bandwidth is None else "testbed"
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
        **summary(measured),
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
        result = subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, check=False
        )
        found["openmpi"] = result.stdout.splitlines()[0].split()[-1]
    except (OSError, IndexError):
        pass
    return found
