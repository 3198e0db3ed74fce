"""`meshmend bench`: how long a collective really takes: ours, Gloo's and OpenMPI's."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import (
    announce_compilation,
    check_suffix,
    check_writable,
    note,
    print_json,
    progress,
    write_text,
)
from meshmend.cli.options import (
    FailOption,
    JsonOption,
    MeshOption,
    SlowOption,
    WrapOption,
    check_algorithms,
    mesh_of,
)
from meshmend.errors import InputError
from meshmend.units import counted

if TYPE_CHECKING:
    from meshmend.lab.bench.benchmark import BenchmarkResults, PayloadResults
    from meshmend.planning.progress import ProgressCallback

_BUSY_SHARE = 0.5  # of the cores, by the load of the last minute
_BEFORE_MEASURING = frozenset({"importing torch", "building the network"})


def bench_command(
    mesh: MeshOption,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    slow: SlowOption = None,
    payload: Annotated[
        str,
        typer.Option("--payload", metavar="SIZE", help="Bytes per chip, or a sweep: 64KiB..4MiB."),
    ] = "4MiB",
    collective: Annotated[
        str, typer.Option("--collective", metavar="KIND", help="allreduce, or all-to-all.")
    ] = "allreduce",
    testbed: Annotated[
        str | None,
        typer.Option(
            "--testbed",
            metavar="RATE",
            help="Run on a mesh network with links of this rate: 50Mbit. Else on loopback.",
        ),
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            "--algorithm",
            metavar="NAME",
            help="auto, or names of algorithms; repeat or use commas.",
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="NAME", help="gloo, openmpi; repeat or use commas."),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat",
            metavar="N",
            help="How often each is measured, after a warm-up that does not count.",
        ),
    ] = 5,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Write an SVG chart: ratio to the limit."
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FOLDER", help="Write a dated result file in this folder."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Measure how long an allreduce, or an all-to-all, takes with one process per live chip.

    First it measures the links, through the same sockets. With these figures auto chooses and the
    simulator predicts. Then all algorithms take turns, so that noise slows all of them equally.
    Every result is checked. The limit is what physics allows at the link rate asked for. With
    --slow links of the testbed have less than that, and a row shows the plan that auto makes
    without knowing it.

    **Examples**

    - meshmend bench --mesh 4x4 --fail 2x2@0,2 --testbed 50Mbit --compare gloo,openmpi

    - meshmend bench --mesh 4x4 --testbed 50Mbit --algorithm auto,ring-1d --payload 64KiB..4MiB

    - meshmend bench --mesh 4x4 --payload 25MB --compare gloo

    - meshmend bench --mesh 4x4 --testbed 50Mbit --slow link:0,0-0,1=0.25 --compare gloo

    - meshmend bench --mesh 4x4 --fail 2x2@1,1 --testbed 50Mbit --collective all-to-all
    """
    from meshmend.planning.target import collective_named
    from meshmend.units import parse_bandwidth, parse_payloads

    broken, payloads = mesh_of(mesh, wrap, fail, slow), parse_payloads(payload)
    bandwidth = None if testbed is None else parse_bandwidth(testbed)
    if slow and testbed is None:
        raise InputError("--slow needs --testbed RATE: loopback has no links that could be slow")
    names = _names(algorithm or ["auto"])
    check_algorithms(names, "auto")
    announce_compilation()
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, and workers are forked
    from meshmend.lab.bench.benchmark import BenchmarkRequest, results_svg, run_benchmark, summary
    from meshmend.lab.bench.benchmark import save as save_summary

    request = BenchmarkRequest(
        mesh=broken,
        payloads=payloads,
        algorithms=names,
        peers=_names(compare or []),
        link_bandwidth=bandwidth,
        repeat=repeat,
        collective=collective_named(collective),
    )
    check_suffix(output, ".svg")
    check_writable(output, save / "result.json" if save else None)
    with progress(quiet=as_json) as bar:
        measured = run_benchmark(request, _BusyWarning(bar))
    if as_json:
        print_json(summary(measured))
    else:
        _print_results(measured)
    if measured.absent:
        note(f"meshmend: left out: {'; '.join(measured.absent.values())}")
    if output is not None:
        write_text(output, results_svg(measured))
    if save is not None:
        try:
            path = save_summary(measured, save)
        except OSError as error:
            raise InputError(f"cannot write in {save}: {error.strerror}") from None
        note(f"meshmend: written {path}")
    return 0 if all(result.correct for point in measured.sweep for result in point.results) else 1


def _names(texts: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for text in texts for name in text.split(",")))


def _print_results(measured: "BenchmarkResults") -> None:
    from meshmend.units import format_bandwidth

    rate, fabric = measured.request.link_bandwidth, measured.fabric
    where = "loopback, no rate limit" if rate is None else f"links of {format_bandwidth(rate)}"
    print(f"mesh         {measured.request.mesh}")
    print(f"network      {where}")
    print(f"fabric       {fabric}")
    if rate is not None:  # jobs on loopback plan by a rule
        print(f"for a job    --fabric {fabric.figures}")
    if measured.request.collective != "allreduce":
        print(f"collective   {measured.request.collective}")
    for point in measured.sweep:
        _print_payload(point)


def _print_payload(point: "PayloadResults") -> None:
    from meshmend.lab.bench.benchmark import LIMIT_NOTE, NO_LIMIT_NOTE
    from meshmend.units import format_bytes, format_time

    limit = NO_LIMIT_NOTE
    if point.limit_s is not None:
        limit = f"limit {format_time(point.limit_s)}, {LIMIT_NOTE}"
    print(f"\n{format_bytes(point.payload_bytes)}: {limit}")
    width = max(9, *(len(result.name) for result in point.results))
    line = f"{{:<{width}}} {{:>8}}{{:>8}}{{:>8}}{{:>9}}{{:>10}}{{:>7}}"
    print(line.format("name", "median", "min", "max", "of limit", "predicted", "error"))
    for result in point.results:
        ratio, predicted_s = point.ratio(result.median_s), result.predicted_s
        words = [
            format_time(t) for t in (result.median_s, min(result.times_s), max(result.times_s))
        ]
        words.append("" if ratio is None else f"{ratio:.3f}x")
        words.append("" if predicted_s is None else format_time(predicted_s))
        words.append("" if predicted_s is None else f"{predicted_s / result.median_s - 1:+.1%}")
        print(line.format(result.name, *words).rstrip())
    for result in point.results:
        print(f"{result.name}: {'' if result.correct else 'WRONG RESULT; '}{result.detail}")


class _BusyWarning:
    """Passes steps on; when measuring begins, it prints a line if the host was busy before.

    It waits until the network is built, so that bad input gets one line only.
    """

    def __init__(self, bar: "ProgressCallback") -> None:
        self._bar = bar
        self._load = os.getloadavg()[0]  # before the benchmark's own processes start
        self._is_waiting = True

    def __call__(self, step: str, part: float | None = None, /) -> None:
        if self._is_waiting and step not in _BEFORE_MEASURING:
            self._is_waiting = False
            n_cores = len(os.sched_getaffinity(0))
            if self._load > _BUSY_SHARE * n_cores:
                note(
                    f"meshmend: this host is busy (load {self._load:.1f} on "
                    f"{counted(n_cores, 'core')}): times will be longer than on a quiet one; "
                    "ratios hold better"
                )
        self._bar(step, part)
