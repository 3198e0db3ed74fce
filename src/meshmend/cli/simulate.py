"""`meshmend simulate`: what algorithms cost on a mesh, next to the physical limit."""

import math
from collections.abc import Callable, Sequence
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
    CollectiveOption,
    FabricOption,
    FailOption,
    JsonOption,
    MeshOption,
    SlowOption,
    TileOption,
    UpdateRateOption,
    WrapOption,
    check_algorithms,
    mesh_of,
    with_update_rate,
)
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.planning.bucket_comparison import BucketComparison
    from meshmend.planning.comparison import Comparison
    from meshmend.planning.pricing import Price
    from meshmend.topology.fabric import Fabric
    from meshmend.topology.mesh import Mesh


_PAYLOADS_ABREAST = 7


def simulate_command(
    mesh: MeshOption,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    slow: SlowOption = None,
    tile: TileOption = None,
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
    link_bandwidth: Annotated[
        str | None,
        typer.Option(
            "--link-bandwidth", metavar="70GB/s", help="One way, instead of the fabric's."
        ),
    ] = None,
    hop_latency: Annotated[
        str | None, typer.Option("--hop-latency", metavar="0.5us", help="Instead of the fabric's.")
    ] = None,
    message_overhead: Annotated[
        str | None,
        typer.Option("--message-overhead", metavar="50ns", help="Instead of the fabric's."),
    ] = None,
    chip_bandwidth: Annotated[
        str | None,
        typer.Option(
            "--chip-bandwidth", metavar="1TB/s", help="How fast a chip adds; else unlimited."
        ),
    ] = None,
    update_rate: UpdateRateOption = None,
    slices: Annotated[
        int | None,
        typer.Option("--slices", metavar="N", help="Slices of the payload; the best if not given."),
    ] = None,
    save_trace: Annotated[
        Path | None,
        typer.Option(
            "--save-trace",
            metavar="FILE",
            help="Write the fastest algorithm's trace for Perfetto, at most about 50 MB of it: "
            "trace.json.gz.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Write an SVG: a sweep's curve, or busy links."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what each algorithm costs on a mesh, and how far that is from what physics allows.

    Simulates messages on links, with contention and latency. For comparison
    it adds what people do instead on a broken mesh: sub-mesh (the largest intact box), drop-lines
    (without the rows or columns that hold failures) and rank-ring (a ring that ignores the mesh).

    With --buckets it says what several sums of one size cost: one at a time, all in flight at once
    (the older first on each link), and next to them one sum of the whole.

    With --tile it says what the sums of all colours of a tiling cost: by one plan for all, by a
    plan for each that knows nothing of the others, and by one sum over all chips.

    **Examples**

    - meshmend simulate --mesh 8x8 --fail 2x2@2,2 --payload 10MB

    - meshmend simulate --mesh 16x32 --fail 4x2@6,14 --fabric tpu-v3 --algorithm trees,ft-two-d

    - meshmend simulate --mesh 8x8 --fail 2x2@2,2 --payload 1KB..1GB -o curve.svg

    - meshmend simulate --mesh 8x8 --fail 2x2@2,2 --buckets 4x25MB --algorithm auto

    - meshmend simulate --mesh 8x8 --fail 2x2@2,2 --algorithm auto --save-trace trace.json.gz

    - meshmend simulate --mesh 8x8 --fail 4x2@2,2 --collective sharded-update --update-rate 500GB/s

    - meshmend simulate --mesh 8x8 --fail 2x2@2,2 --tile 2x2
    """
    from meshmend.planning.target import collective_named
    from meshmend.schedule.algorithm_names import BASELINE_NAMES
    from meshmend.topology.fabric import fabric as fabric_named
    from meshmend.topology.text import parse_tile
    from meshmend.units import parse_bandwidth, parse_payloads, parse_time

    broken = mesh_of(mesh, wrap, fail, slow)
    machine = fabric_named(fabric).with_(
        link_bandwidth_bytes_per_s=_figure(link_bandwidth, parse_bandwidth),
        hop_latency_s=_figure(hop_latency, parse_time),
        message_overhead_s=_figure(message_overhead, parse_time),
        chip_bandwidth_bytes_per_s=_figure(chip_bandwidth, parse_bandwidth),
    )
    kind = collective_named(collective)
    machine = with_update_rate(machine, update_rate, kind)
    if slices is not None and slices < 1:
        raise InputError(f"--slices needs 1 or more, but got {slices}")
    names = [name for text in algorithm or ["all"] for name in text.split(",")]
    check_algorithms(names, "all", "auto", *BASELINE_NAMES)
    if tile is not None and math.prod(parse_tile(tile)) == 1:
        tile = None  # then it is a sum over all chips
    if tile is not None and (algorithm or slices or buckets or kind != "allreduce"):
        raise InputError(
            "--tile compares its own plans of an allreduce; leave out --algorithm, --slices, "
            "--buckets and --collective"
        )
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
    _check_trace(save_trace, payloads)
    check_suffix(output, ".svg")
    check_writable(save_trace, output)
    announce_compilation()
    from meshmend.pages.draw.load_picture import sweep_svg
    from meshmend.planning.colour_comparison import compared_colours
    from meshmend.planning.comparison import compared
    from meshmend.planning.progress import ProgressShares

    results = []
    with progress(quiet=as_json) as bar:
        for size, part in zip(payloads, ProgressShares(bar, len(payloads)).in_turn(), strict=True):
            if tile is not None:
                result = compared_colours(
                    broken, tile, machine, size, cache_dir=cache_dir(), progress=part
                )
                results.append(result)
                continue
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
    intact = None
    if len(results) == 1 and names in (["all"], ["auto"]) and tile is None and slices is None:
        intact = _on_whole_mesh(results[0])
    if as_json:
        print_json(_document(results, intact))
    else:
        _print_head(results[0])
        if len(results) > 1:
            _print_sweep(results)
        else:
            _print_comparison(results[0])
            _print_cost(results[0], intact)
        _note_refused(results[0])
    if save_trace is not None:
        _write_trace(results[0], save_trace)
    if output is not None:
        write_text(output, sweep_svg(results) if len(results) > 1 else _heat_map(results[0]))
    for path in (each for each in (save_trace, output) if each is not None and not as_json):
        print(f"written      {path}")


def _figure(text: str | None, parse: Callable[[str], float]) -> float | None:
    return None if text is None else parse(text)


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
        print_json({"fabric": fabric.summary(), **result.summary()})
    else:
        _print_buckets(result)


def _on_whole_mesh(result: "Comparison") -> "Price | None":
    """Return what the sum took before anything failed or got slow; None if nothing has."""
    from meshmend.planning.comparison import compared
    from meshmend.topology.mesh import Mesh

    whole = Mesh(result.mesh.shape, result.mesh.wrap)
    if whole == result.mesh or result.limit.collective != "allreduce":
        return None  # the payload of others depends on the number of chips
    found = compared(whole, result.fabric, result.payload_bytes, ["auto"], cache_dir=cache_dir())
    return found.winner


def _document(results: "list[Comparison]", intact: "Price | None") -> dict[str, Any]:
    from meshmend.planning.comparison import crossovers

    fabric = results[0].fabric.summary()
    if len(results) == 1:
        before = {} if intact is None else {"whole_mesh_time_s": intact.time_s}
        return {"fabric": fabric, **results[0].summary(), **before}
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


def _print_head(result: "Comparison") -> None:
    """Print the mesh, the fabric and the collective."""
    print(f"mesh         {result.mesh}")
    print(f"fabric       {result.fabric}")
    if result.limit.collective != "allreduce":
        print(f"collective   {result.limit.collective}")


def _note_refused(result: "Comparison") -> None:
    """Say in one line which algorithms were left out, and how to learn why."""
    if result.refused:
        names = ", ".join(result.refused)
        note(
            f"meshmend: left out, because they do not support this mesh: {names}; name one with "
            "--algorithm to see why"
        )


def _print_comparison(result: "Comparison") -> None:
    """Print what each algorithm costs for one payload; a star marks the best on all chips."""
    from meshmend.units import format_bytes, format_time

    limit, best = result.limit, result.winner
    print(f"\n{format_bytes(result.payload_bytes)}: {limit.describe()}")
    alone = f"hops alone {format_time(limit.latency_s)}"
    print(f"bandwidth limit {format_time(limit.bandwidth_s)}, {alone}")
    head = ("algorithm", "time", "of limit", "slices", "busiest", "chips")
    print("  {:<11} {:>9} {:>9} {:>7} {:>8} {:>6}".format(*head))
    for price in result.prices:
        figures = price.figures
        print(
            f"{'*' if price is best else ' '} {price.name:<11} {format_time(price.time_s):>9} "
            f"{result.ratio(price):>8.3f}x {figures.slices:>7} "
            f"{figures.max_link_utilisation:>8.1%} {price.n_chips:>6}"
        )
    print("busiest: the share of the time for which the busiest link is busy")
    for price in result.prices:
        if price.detail:
            print(f"{price.name}: {price.detail}")


def _print_cost(result: "Comparison", intact: "Price | None") -> None:
    """Print what the failures cost, next to the sum on the whole mesh."""
    from meshmend.units import format_time

    if intact is None:
        return
    now_s, before_s = result.winner.time_s, intact.time_s
    change = f"{abs(now_s - before_s) / before_s:.1%} {'longer' if now_s >= before_s else 'less'}"
    print(
        f"\nwhole mesh   {format_time(before_s)} on {'x'.join(map(str, result.mesh.shape))}; with "
        f"what has failed {result.winner.name} takes {format_time(now_s)}, {change}"
    )


def _print_sweep(results: "Sequence[Comparison]") -> None:
    """Print times over the limit, an algorithm a row, and where the fastest one changes."""
    from meshmend.planning.comparison import crossovers
    from meshmend.units import format_bytes

    names = list(dict.fromkeys(price.name for result in results for price in result.prices))
    names.sort(key=lambda name: min(_ratios(results, name)))
    print("\ntime over the limit; a star marks the fastest on all chips")
    for start in range(0, len(results), _PAYLOADS_ABREAST):
        _print_block(results[start : start + _PAYLOADS_ABREAST], names)
        print()
    for each in crossovers(results):
        print(f"from about {format_bytes(each.payload_bytes)} on {each.after} beats {each.before}")


def _print_block(results: "Sequence[Comparison]", names: list[str]) -> None:
    from meshmend.units import format_bytes, format_time

    best = [result.winner.name for result in results]
    sizes = "".join(f"{format_bytes(result.payload_bytes):>7}" for result in results)
    print(f"{'payload':<11}{sizes}")
    for name in names:
        cells = []
        for result, fastest in zip(results, best, strict=True):
            price = next((price for price in result.prices if price.name == name), None)
            star = "*" if name == fastest else " "
            cells.append("" if price is None else f"{_short(result.ratio(price))}{star}")
        print((f"{name:<11}" + "".join(f"{cell:>7}" for cell in cells)).rstrip())
    limits = "".join(f"{format_time(each.limit.time_s).replace(' ', ''):>7}" for each in results)
    print(f"{'limit':<11}{limits}")


def _short(ratio: float) -> str:
    """Return a ratio in at most six characters."""
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 1000 else f"{ratio:.0f}"


def _ratios(results: "Sequence[Comparison]", name: str) -> list[float]:
    return [
        result.ratio(price) for result in results for price in result.prices if price.name == name
    ]


def _print_buckets(result: "BucketComparison") -> None:
    """Print what several sums cost: one at a time, in flight together, and as one sum."""
    from meshmend.units import format_bytes, format_time

    buckets, whole = result.buckets, result.whole
    _print_head(whole)
    sizes = f"{buckets.n} x {format_bytes(buckets.size_bytes)}"
    print(f"\n{sizes}, in all {format_bytes(buckets.total_bytes)}: {whole.limit.describe()}")
    print(f"{'':<11} {'one sum':>9} {'one at a time':>18} {'all in flight':>18}")
    head = ("algorithm", "time", "time", "of one", "time", "of one")
    print("{:<11} {:>9} {:>9} {:>8} {:>9} {:>8}".format(*head))
    for price in result.prices:
        in_turn_s, in_flight_s = price.one_at_a_time_s, price.together.time_s
        print(
            f"{price.name:<11} {format_time(price.whole.time_s):>9} "
            f"{format_time(in_turn_s):>9} {price.ratio(in_turn_s):>7.3f}x "
            f"{format_time(in_flight_s):>9} {price.ratio(in_flight_s):>7.3f}x"
        )
    _note_refused(whole)


def _check_trace(path: Path | None, payloads: Sequence[int]) -> None:
    """Raise InputError if there is no one trace to write, or its file has another ending."""
    if path is not None and len(payloads) > 1:
        raise InputError("--save-trace needs one payload, but got a sweep")
    if path is not None and path.suffix not in {".json", ".gz"}:
        raise InputError(
            f"--save-trace writes JSON, compressed or not, so it needs a name such as "
            f"trace.json.gz or trace.json, but got {path.name}"
        )


def _write_trace(result: "Comparison", path: Path) -> None:
    """Write the trace of the fastest algorithm; before that, say what is left out and its size."""
    from meshmend.simulator.trace import USUAL_BYTES, bars_that_fit, save_trace
    from meshmend.units import format_bytes

    traced = result.traced()
    chosen = bars_that_fit(traced, result.part)
    size = chosen.size_bytes(compressed=path.suffix == ".gz")
    words = f"{len(chosen.bars):,} bars, about {format_bytes(size)}"
    if chosen.n_slices < traced.slices:
        words = f"{chosen.n_slices} of {traced.slices} slices, {words}"
    if chosen.n_slices < traced.slices or size > USUAL_BYTES:
        note(f"meshmend: the trace of {result.prices[0].name} has {words}")
    try:
        save_trace(traced, result.part, path, chosen)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
