"""Runs a benchmark: contenders take turns on one network, payload by payload.

In every round each contender runs once, so that other work of the machine slows all of them alike.
OpenMPI starts its own processes, so all its repetitions run together at the end. The results become
a JSON value, a chart, and a file with date and machine.
"""

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshmend.errors import BenchmarkError, InputError
from meshmend.lab.bench.contenders import (
    ITEM_BYTES,
    SPEEDS_UNKNOWN,
    Gloo,
    Network,
    Planned,
    import_torch,
    planned,
)
from meshmend.lab.bench.link_figures import measured_fabric
from meshmend.lab.bench.openmpi import OpenMpi, openmpi_repetitions, why_unavailable
from meshmend.lab.bench.worker_pool import Repetition, WorkerPool
from meshmend.lab.testbed.bed import Testbed
from meshmend.pages.draw.chart import Axis, MeasuredBar, Series, bars_svg, chart_svg, limit_series
from meshmend.planning.plan import AUTO
from meshmend.planning.progress import ProgressCallback, ProgressShares
from meshmend.planning.target import Question
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.table import Collective
from meshmend.simulator.limit import limit
from meshmend.topology.fabric import Fabric
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.units import format_bandwidth, format_bytes, format_time

PEERS = ("gloo", "openmpi")
CHECKED = (Collective.ALLREDUCE, Collective.ALL_TO_ALL)  # whose results bench can check

Runner = Planned | Gloo | OpenMpi


@dataclass(frozen=True)
class BenchmarkRequest:
    """What to measure; without `link_bandwidth` the workers use loopback, not a testbed."""

    mesh: Mesh
    payloads: tuple[int, ...]
    algorithms: tuple[str, ...] = (AUTO,)
    peers: tuple[str, ...] = ()
    link_bandwidth: float | None = None
    repeat: int = 5
    collective: Collective = Collective.ALLREDUCE

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise InputError(f"--repeat needs 1 or more, but got {self.repeat}")
        if self.collective not in CHECKED:
            raise InputError(
                f"bench measures {' or '.join(CHECKED)}, but got --collective {self.collective}"
            )
        if unknown := [peer for peer in self.peers if peer not in PEERS]:
            raise InputError(f"--compare needs {' or '.join(PEERS)}, but got {unknown[0]!r}")
        part = largest_part(self.mesh)
        if part.n_live < 2:
            raise InputError(f"bench needs two connected chips or more, but got {self.mesh}")
        least_bytes = self.item_bytes(part)
        if small := [size for size in self.payloads if size < least_bytes]:
            raise InputError(f"--payload needs {least_bytes} bytes or more, but got {small[0]}")
        exchanges = self.collective is Collective.ALL_TO_ALL
        if exchanges and "openmpi" in self.peers:
            raise InputError("--compare openmpi is of an allreduce only; leave it out")
        for name in self.algorithms:
            if name != AUTO:
                algorithm(name).check_collective(self.collective)
                algorithm(name).check(part)

    def item_bytes(self, part: Mesh) -> int:
        """Return what a payload is a multiple of: an element, or one for each chip."""
        exchanges = self.collective is Collective.ALL_TO_ALL
        return ITEM_BYTES * (part.n_live if exchanges else 1)


@dataclass(frozen=True)
class Result:
    """The times of one contender, without those of the first repetition, which warms up."""

    name: str
    detail: str
    times_s: tuple[float, ...]
    predicted_s: float | None
    correct: bool

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)


@dataclass(frozen=True)
class PayloadResults:
    """The results for one payload; `limit_s` is None if the request names no link bandwidth."""

    payload_bytes: int
    limit_s: float | None
    results: tuple[Result, ...]

    def ratio(self, time_s: float) -> float | None:
        """Return a time divided by the limit, or None if there is no limit."""
        return None if self.limit_s is None else time_s / self.limit_s


@dataclass(frozen=True)
class BenchmarkResults:
    """The results of a request: the measured links, and one entry of `sweep` per payload.

    `absent` says, by name, why a contender was not measured.
    """

    request: BenchmarkRequest
    fabric: Fabric
    sweep: tuple[PayloadResults, ...]
    absent: dict[str, str]


def run_benchmark(request: BenchmarkRequest, progress: ProgressCallback) -> BenchmarkResults:
    """Measure what the request asks for on this machine, now, and return the results.

    Raises:
        InputError: this machine cannot make the testbed, or Gloo is wanted and torch is missing.
        BenchmarkError: a contender did not finish.
    """
    part = largest_part(request.mesh)
    if "gloo" in request.peers:
        progress("importing torch")
        import_torch()
    absent = {}
    if "openmpi" in request.peers and (reason := why_unavailable()):
        absent["openmpi"] = reason
    progress("building the network")
    with (
        nullcontext()
        if request.link_bandwidth is None
        else Testbed.up(request.mesh, link_bandwidth=request.link_bandwidth) as bed
    ):
        network = Network(part, bed)
        fabric = measured_fabric(network, progress)
        turn = ProgressShares(progress, len(request.payloads)).in_turn()
        sweep = tuple(
            _measure_payload(request, network, fabric, size, absent, next(turn))
            for size in request.payloads
        )
    return BenchmarkResults(request, fabric, sweep, absent)


def _measure_payload(
    request: BenchmarkRequest,
    network: Network,
    fabric: Fabric,
    size: int,
    absent: dict[str, str],
    progress: ProgressCallback,
) -> PayloadResults:
    item_bytes = request.item_bytes(network.mesh)
    payload_bytes = size // item_bytes * item_bytes
    n_elements = payload_bytes // ITEM_BYTES
    question = Question(network.mesh, payload_bytes, fabric, request.collective)
    predicts = network.bed is not None
    ours = [
        # The fractions of a plan's progress are not fractions of the benchmark's progress.
        planned(name, question, predicts=predicts, progress=lambda step, part=None: progress(step))
        for name in _with_unknown_speeds(request)
    ]
    runners: list[Planned | Gloo] = [*ours]
    if "gloo" in request.peers:
        runners.append(Gloo(n_elements, request.collective))
    repetitions = _rounds(network, runners, request.repeat, progress)
    results = [
        _result(runner, measured) for runner, measured in zip(runners, repetitions, strict=True)
    ]
    if "openmpi" in request.peers and "openmpi" not in absent:
        progress("openmpi")
        mpi = OpenMpi(n_elements)
        try:
            results.append(_result(mpi, openmpi_repetitions(network, mpi, request.repeat + 1)))
        except BenchmarkError as error:  # the results of the others still count
            absent["openmpi"] = str(error)
    return PayloadResults(
        payload_bytes, _limit_s(request, network.mesh, payload_bytes), tuple(results)
    )


def _with_unknown_speeds(request: BenchmarkRequest) -> list[str]:
    """Return the algorithms; where links are slow, `auto` is followed by what ignores that."""
    names = []
    for name in request.algorithms:
        names.append(name)
        if name == AUTO and request.mesh.has_slow:
            names.append(SPEEDS_UNKNOWN)
    return names


def _rounds(
    network: Network, runners: Sequence[Planned | Gloo], repeat: int, progress: ProgressCallback
) -> list[list[Repetition]]:
    repetitions: list[list[Repetition]] = [[] for _ in runners]
    with WorkerPool(network, runners) as pool:
        for turn in range(repeat + 1):
            for runner, measured in zip(runners, repetitions, strict=True):
                step = f"{runner.name}: {f'{turn} of {repeat}' if turn else 'warming up'}"
                progress(step, sum(map(len, repetitions)) / (len(repetitions) * (repeat + 1)))
                measured.append(pool.measure(runner))
    return repetitions


def _result(runner: Runner, repetitions: Sequence[Repetition]) -> Result:
    return Result(
        name=runner.name,
        detail=runner.detail,
        times_s=tuple(repetition.time_s for repetition in repetitions[1:]),
        predicted_s=runner.predicted_s,
        correct=all(repetition.correct for repetition in repetitions),
    )


def _limit_s(request: BenchmarkRequest, mesh: Mesh, payload_bytes: int) -> float | None:
    """Return the physical limit at the requested link bandwidth, without packet headers."""
    if request.link_bandwidth is None:
        return None
    requested = Fabric(
        "requested", request.link_bandwidth, hop_latency_s=0.0, message_overhead_s=0.0
    )
    return limit(mesh, requested, payload_bytes, collective=request.collective).time_s


LIMIT_NOTE = "at the link rate asked for, all of it payload"
NO_LIMIT_NOTE = "no limit: loopback has no links of a known rate"


def summary(measured: BenchmarkResults) -> dict[str, Any]:
    """Return the figures as a JSON value; several payloads become the list `sweep`."""
    request = measured.request
    head = {
        "mesh": str(request.mesh),
        "collective": str(request.collective),
        "testbed_bytes_per_s": request.link_bandwidth,
        "limit": NO_LIMIT_NOTE if request.link_bandwidth is None else LIMIT_NOTE,
        "fabric": measured.fabric.summary(),
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
        title=f"{_title(measured)} of {format_bytes(point.payload_bytes)} measured on "
        f"{measured.request.mesh}",
        caption=_caption(measured, "Predictions are for"),
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
        title=f"{_title(measured)} measured on {measured.request.mesh}",
        caption=_caption(measured, "Dashed: simulated on"),
    )


def _title(measured: BenchmarkResults) -> str:
    return str(measured.request.collective).capitalize()


def _heights(sweep: tuple[PayloadResults, ...], times: list[float]) -> list[float]:
    return [time_s / (point.limit_s or 1.0) for point, time_s in zip(sweep, times, strict=True)]


def _caption(measured: BenchmarkResults, predictions: str) -> str:
    """Return what stands below a chart; on loopback nothing is predicted."""
    rate = measured.request.link_bandwidth
    if rate is None:
        return "Processes on loopback. Lower is better."
    return (
        f"A testbed with links of {format_bandwidth(rate)} each way. Lower is better. "
        f"{predictions} {measured.fabric}."
    )


def save(measured: BenchmarkResults, folder: Path) -> Path:
    """Write `bench-MESH-DATE.json` with the machine and versions, and return its path."""
    today = datetime.date.today().isoformat()
    words = "".join(c if c.isalnum() else "-" for c in str(measured.request.mesh))
    if measured.request.collective is not Collective.ALLREDUCE:
        words = f"{measured.request.collective}-{words}"
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
