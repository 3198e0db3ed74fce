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
    print_json,
    progress,
    write_text,
)
from meshmend.cli.options import (
    ChipBandwidthOption,
    CollectiveOption,
    FabricOption,
    FailOption,
    HopLatencyOption,
    JsonOption,
    LinkBandwidthOption,
    MeshOption,
    MessageOverheadOption,
    UpdateRateOption,
    WrapOption,
    check_algorithms,
    fabric_of,
    mesh_of,
    with_update_rate,
)
from meshmend.cli.simulate_tables import print_buckets, print_comparison, print_head, print_sweep
from meshmend.cli.trace_file import trace_filter, write_trace
from meshmend.errors import InputError

if TYPE_CHECKING:
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
    collective: CollectiveOption = "allreduce",
    fabric: FabricOption = "reference",
    link_bandwidth: LinkBandwidthOption = None,
    hop_latency: HopLatencyOption = None,
    message_overhead: MessageOverheadOption = None,
    chip_bandwidth: ChipBandwidthOption = None,
    update_rate: UpdateRateOption = None,
    slices: Annotated[
        int | None, typer.Option("--slices", help="Slices of the payload; the best if not given.")
    ] = None,
    save_trace: Annotated[
        Path | None,
        typer.Option(
            "--save-trace",
            metavar="FILE",
            help="Write the fastest algorithm's trace for Perfetto: trace.json.gz.",
        ),
    ] = None,
    trace_slices: Annotated[
        str | None,
        typer.Option(
            "--trace-slices",
            metavar="WHICH",
            help="Slices of the trace: 0..9, 0,50,100, or all; else as many as fit into 50 MB.",
        ),
    ] = None,
    trace_chips: Annotated[
        list[str] | None,
        typer.Option(
            "--trace-chips",
            metavar="WHICH",
            help="Only links that leave these chips: 3,4 or 2x2@2,2; repeat for more.",
        ),
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

    - meshmend simulate --mesh 8x8 --fail 2x2@2,2 --algorithm auto --save-trace trace.json.gz

    - meshmend simulate --mesh 8x8 --fail 4x2@2,2 --collective sharded-update --update-rate 500GB/s
    """
    from meshmend.planning.target import collective_named
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
    kind = collective_named(collective)
    machine = with_update_rate(machine, update_rate, kind)
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
        ] or (kind != "allreduce" and ["--collective " + kind]):
            raise InputError(f"--buckets does not go with {used[0]}; leave one of them out")
        _simulate_buckets(broken, machine, buckets, names, slices, as_json=as_json)
        return
    payloads = parse_payloads(payload or "100MB")
    wanted = trace_filter(save_trace, trace_slices, trace_chips, payloads, broken)
    check_suffix(output, ".svg")
    check_writable(save_trace, output)
    announce_compilation()
    from meshmend.pages.draw.sweep_picture import sweep_svg
    from meshmend.planning.comparison import compared
    from meshmend.planning.progress import ProgressShares

    results = []
    with progress(quiet=as_json) as bar:
        for size, part in zip(payloads, ProgressShares(bar, len(payloads)).in_turn(), strict=True):
            result = compared(
                broken,
                machine,
                size,
                names,
                collective=kind,
                slices=slices,
                cache_dir=cache_dir(),
                progress=part,
            )
            results.append(result)
    if as_json:
        print_json(_document(results))
    else:
        print_head(results[0])
        if len(results) > 1:
            print_sweep(results)
        else:
            print_comparison(results[0])
    if save_trace is not None:
        write_trace(results[0], save_trace, wanted)
    if output is not None:
        write_text(output, sweep_svg(results) if len(results) > 1 else _heat_map(results[0]))
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
        print_buckets(result)


def _document(results: "list[Comparison]") -> dict[str, Any]:
    from meshmend.planning.crossovers import crossovers

    fabric = asdict(results[0].fabric)
    if len(results) == 1:
        return {"fabric": fabric, **results[0].summary()}
    return {
        "fabric": fabric,
        "sweep": [result.summary() for result in results],
        "crossovers": [asdict(each) for each in crossovers(results)],
    }


def _heat_map(result: "Comparison") -> str:
    from meshmend.pages.draw.load_picture import link_load_svg
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
