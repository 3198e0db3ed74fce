"""`meshmend simulate`: what algorithms cost on a mesh, next to the physical limit."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshmend.cli.console import (
    announce_compilation,
    cache_dir,
    check_suffix,
    check_writable,
    note,
    print_json,
    progress,
    write_text,
)
from meshmend.cli.options import (
    ChipBandwidthOption,
    FabricOption,
    FailOption,
    HopLatencyOption,
    JsonOption,
    LinkBandwidthOption,
    MeshOption,
    MessageOverheadOption,
    WrapOption,
    check_algorithms,
    fabric_of,
    mesh_of,
)
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.planning.bucket_comparison import BucketComparison
    from meshmend.planning.comparison import Comparison
    from meshmend.topology.fabric import Fabric
    from meshmend.topology.mesh import Mesh


def simulate_command(
    mesh: MeshOption,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    payload: Annotated[
        str | None,
        typer.Option(
            "--payload",
            metavar="SIZE",
            help="Bytes per chip, or a sweep: 1KB..1GB, 1KB..1GB:3.",
            show_default="100MB",
        ),
    ] = None,
    buckets: Annotated[
        str | None,
        typer.Option(
            "--buckets",
            metavar="NxSIZE",
            help="Sums that start together, instead of --payload: 4x25MB.",
        ),
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option("--algorithm", metavar="NAME", help="all, or names; repeat or use commas."),
    ] = None,
    fabric: FabricOption = "reference",
    link_bandwidth: LinkBandwidthOption = None,
    hop_latency: HopLatencyOption = None,
    message_overhead: MessageOverheadOption = None,
    chip_bandwidth: ChipBandwidthOption = None,
    slices: Annotated[
        int | None, typer.Option("--slices", help="Slices of the payload; the best if not given.")
    ] = None,
    save_trace: Annotated[
        Path | None,
        typer.Option("--save-trace", help="Write the fastest algorithm's trace, for a viewer."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write an SVG: a sweep's curve, or busy links."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what each algorithm costs on a mesh, and how far that is from what physics allows.

    Simulates messages on links, with contention and latency. For comparison
    it adds what people do instead on a broken mesh: sub-mesh (the largest intact box), drop-lines
    (without the rows or columns that hold failures) and rank-ring (a ring that ignores the mesh).

    With --buckets it says what several sums of one size cost: one at a time, all in flight at once
    (the older first on each link), and next to them one sum of the whole.

    **Examples**

    - meshmend simulate --mesh 8x8 --fail 2x2@2,2 --payload 10MB

    - meshmend simulate --mesh 16x32 --fail 4x2@6,14 --fabric tpu-v3 --algorithm trees,ft-two-d

    - meshmend simulate --mesh 8x8 --fail 2x2@2,2 --payload 1KB..1GB -o curve.svg

    - meshmend simulate --mesh 8x8 --fail 2x2@2,2 --buckets 4x25MB --algorithm auto
    """
    from meshmend.schedule.algorithm_names import BASELINE_NAMES
    from meshmend.units import parse_payloads

    broken = mesh_of(mesh, wrap, fail)
    machine = fabric_of(
        fabric,
        link_bandwidth=link_bandwidth,
        hop_latency=hop_latency,
        message_overhead=message_overhead,
        chip_bandwidth=chip_bandwidth,
    )
    if slices is not None and slices < 1:
        raise InputError(f"--slices needs 1 or more, but got {slices}")
    names = [name for text in algorithm or ["all"] for name in text.split(",")]
    check_algorithms(names, "all", "auto", *BASELINE_NAMES)
    if buckets is not None:
        if used := [
            name
            for name, value in (
                ("--payload", payload),
                ("--save-trace", save_trace),
                ("-o", output),
            )
            if value is not None
        ]:
            raise InputError(f"--buckets does not go with {used[0]}; leave one of them out")
        _simulate_buckets(broken, machine, buckets, names, slices, as_json=as_json)
        return
    payloads = parse_payloads(payload or "100MB")
    if save_trace is not None and len(payloads) > 1:
        raise InputError("--save-trace needs one payload, but got a sweep")
    check_suffix(output, ".svg")
    check_writable(save_trace, output)
    announce_compilation()
    from meshmend.draw.sweep_picture import sweep_svg
    from meshmend.planning.comparison import compared
    from meshmend.planning.progress import ProgressShares

    results = []
    with progress(quiet=as_json) as bar:
        for size, part in zip(payloads, ProgressShares(bar, len(payloads)).in_turn(), strict=True):
            result = compared(
                broken, machine, size, names, slices=slices, cache_dir=cache_dir(), progress=part
            )
            results.append(result)
            if not as_json:
                with bar.aside():
                    _print_comparison(result, first=size == payloads[0])
    if save_trace is not None:
        _save_trace(results[0], save_trace)
    if output is not None:
        write_text(output, sweep_svg(results) if len(results) > 1 else _heat_map(results[0]))
    if as_json:
        print_json(_document(results))
    for path in (each for each in (save_trace, output) if each is not None and not as_json):
        print(f"written      {path}")


def _simulate_buckets(
    mesh: "Mesh",
    fabric: "Fabric",
    text: str,
    names: list[str],
    slices: int | None,
    *,
    as_json: bool,
) -> None:
    """Say what several sums in flight cost, next to one sum of the whole."""
    from meshmend.units import parse_buckets

    n_buckets, size_bytes = parse_buckets(text)
    announce_compilation()
    from meshmend.planning.bucket_comparison import Buckets, compared_buckets

    with progress(quiet=as_json) as bar:
        result = compared_buckets(
            mesh,
            fabric,
            Buckets(n_buckets, size_bytes),
            names,
            slices=slices,
            cache_dir=cache_dir(),
            progress=bar,
        )
    if as_json:
        print_json({"fabric": asdict(fabric), **result.summary()})
    else:
        _print_buckets(result)


def _print_buckets(result: "BucketComparison") -> None:
    from meshmend.units import format_bytes, format_time

    buckets, whole = result.buckets, result.whole
    print(f"mesh         {whole.mesh}")
    print(f"fabric       {whole.fabric}")
    for name, reason in whole.refused.items():
        note(f"meshmend: {name} left out: {reason}")
    sizes = f"{buckets.n} x {format_bytes(buckets.size_bytes)}"
    print(f"\n{sizes}, in all {format_bytes(buckets.total_bytes)}: {whole.limit.describe()}")
    head = ("algorithm", "one sum", "one at a time", "of one sum", "in flight", "of one sum")
    print("{:<12} {:>10} {:>14} {:>11} {:>10} {:>11}  slices".format(*head))
    for price in result.prices:
        in_turn_s, in_flight_s = price.one_at_a_time_s, price.together.time_s
        print(
            f"{price.name:<12} {format_time(price.whole.time_s):>10} "
            f"{format_time(in_turn_s):>14} {price.ratio(in_turn_s):>10.3f}x "
            f"{format_time(in_flight_s):>10} {price.ratio(in_flight_s):>10.3f}x "
            f"{price.together.slices:>7}"
        )


def _document(results: "list[Comparison]") -> dict[str, Any]:
    fabric = asdict(results[0].fabric)
    if len(results) == 1:
        return {"fabric": fabric, **results[0].summary()}
    return {"fabric": fabric, "sweep": [result.summary() for result in results]}


def _print_comparison(result: "Comparison", *, first: bool) -> None:
    from meshmend.units import format_bytes, format_time

    if first:
        print(f"mesh         {result.mesh}")
        print(f"fabric       {result.fabric}")
        for name, reason in result.refused.items():
            note(f"meshmend: {name} left out: {reason}")
    limit = result.limit
    print(f"\n{format_bytes(result.payload_bytes)}: {limit.describe()}")
    alone = f"hops alone {format_time(limit.latency_s)}"
    print(f"bandwidth limit {format_time(limit.bandwidth_s)}, {alone}")
    head = ("algorithm", "time", "of limit", "slices", "busiest link", "chips")
    print("{:<12} {:>10} {:>9} {:>7} {:>13} {:>6}".format(*head))
    for price in result.prices:
        figures = price.figures
        line = (
            f"{price.name:<12} {format_time(price.time_s):>10} "
            f"{result.ratio(price):>8.3f}x {figures.slices:>7} "
            f"{figures.max_link_utilisation:>12.1%} {price.n_chips:>6}  {price.detail}"
        )
        print(line.rstrip())


def _save_trace(result: "Comparison", path: Path) -> None:
    from meshmend.simulator.trace import save_trace

    try:
        save_trace(result.traced(), result.part, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _heat_map(result: "Comparison") -> str:
    from meshmend.draw.load_picture import link_load_svg
    from meshmend.units import format_bytes

    best = result.prices[0].simulation
    return link_load_svg(
        result.part,
        best.channel_busy_s / best.time_s,
        unit="of the time",
        title=f"Busy links of {result.prices[0].name} on {result.mesh}",
        caption="The share of the time for which each directed link is busy: "
        f"{format_bytes(result.payload_bytes)} on {result.fabric.name}.",
    )
