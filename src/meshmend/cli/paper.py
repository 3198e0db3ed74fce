"""What the paper shows: `meshmend reproduce` predicts its tables, `meshmend figures` draws it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import (
    announce_compilation,
    check_suffix,
    check_writable,
    print_json,
    progress,
    write_text,
)
from meshmend.cli.options import FabricOption, JsonOption

if TYPE_CHECKING:
    from meshmend.lab.paper.prediction import Cell, Prediction
    from meshmend.lab.paper.reproduction import Reproduction


def reproduce_command(
    fabric: FabricOption = "tpu-v3",
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the two tables, no other readings of the paper.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write a page: HTML, self-contained.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare tables 1 and 2 of the paper with what the simulator predicts.

    Calibrates the compute time of a step on the full-mesh columns alone, then predicts the
    fault-tolerant columns: with the paper's scheme, and with the best of ours. Takes two to
    three minutes, with --quick about one.

    **Examples**

    - meshmend reproduce

    - meshmend reproduce --quick --fabric reference

    - meshmend reproduce -o reproduction.html
    """
    from meshmend.topology.fabric import fabric as fabric_named

    machine = fabric_named(fabric)
    check_suffix(output, ".html")
    check_writable(output)
    announce_compilation()
    from meshmend.lab.paper.reproduction import reproduction
    from meshmend.lab.paper.reproduction_page import reproduction_page

    with progress(quiet=as_json) as bar:
        result = reproduction(machine, quick=quick, progress=bar)
    if output is not None:
        write_text(output, reproduction_page(result))
    if as_json:
        print_json(result.summary())
        return
    _print_calibration(result)
    _print_tables(result)
    _print_own_consistency(result)
    if result.readings:
        _print_readings(result)
    if output is not None:
        print(f"\nwritten      {output}")


def figures_command(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the pictures.")
    ] = Path("figures"),
    as_json: JsonOption = False,
) -> None:
    """Draw figures 1 to 10 of the paper as SVG files, and its way to a sharded update.

    **Examples**

    - meshmend figures

    - meshmend figures -o pictures
    """
    from meshmend.lab.paper.paper_figures import paper_figures, update_figure

    written = []
    for name, svg in (paper_figures() | {"figure-11-sharded-update": update_figure()}).items():
        path = output / f"{name}.svg"
        write_text(path, svg)
        written.append(str(path))
        if not as_json:
            print(path)
    if as_json:
        print_json({"figures": written})


def _print_calibration(result: "Reproduction") -> None:
    from meshmend.lab.paper.prediction import broken_mesh
    from meshmend.units import format_bytes, format_time

    setting = result.setting
    shapes = dict.fromkeys(row.row.shape for row in result.paper)
    print(f"fabric       {setting.fabric}")
    print(f"holes        {', '.join(str(broken_mesh(s, setting.place)) for s in shapes)}")
    print(f"kept equal   batch {setting.batch}, samples seen")
    print(f"\nCalibrated on the full-mesh columns, which run {setting.full_algorithm}")
    head = ("benchmark", "chips", "payload", "allreduce", "slices", "of a step", "so compute")
    print("{:<10} {:>6} {:>8} {:>10} {:>7} {:>10} {:>11}".format(*head))
    for row in result.paper:
        paper = row.row
        print(
            f"{paper.workload.name:<10} {paper.full_chips:>6} "
            f"{format_bytes(paper.workload.payload_bytes):>8} {format_time(row.full.time_s):>10} "
            f"{row.full.slices:>7} {paper.full_overhead:>10.1%} {format_time(row.compute_s):>11}"
        )


def _print_tables(result: "Reproduction") -> None:
    from meshmend.lab.paper.paper_tables import RUN_TO_RUN

    scheme = result.setting.broken_algorithm
    print("\nAllreduce on the fault-tolerant mesh, simulated")
    print(f"{'benchmark':<10} {'chips':>6} {scheme:>10} {'slices':>7} {'best of ours':>24}")
    for row, our in zip(result.paper, result.ours, strict=True):
        best = f"{our.broken.time_s * 1e3:.2f} ms {our.setting.broken_algorithm}"
        print(
            f"{row.row.workload.name:<10} {row.row.broken_chips:>6} "
            f"{row.broken.time_s * 1e3:>7.2f} ms {row.broken.slices:>7} {best:>24}"
        )
    for title, name, formats in (
        ("Table 2: allreduce, % of a step", "overhead", (100.0, ".1f", ".2f")),
        ("Table 1: minutes to train", "minutes", (1.0, ".2f", ".3f")),
        ("Table 1: relative efficiency", "efficiency", (1.0, ".3g", ".3f")),
    ):
        print(f"\n{title}")
        head = ("benchmark", "chips", "printed", scheme, "difference", "best of ours", "difference")
        print("{:<10} {:>6} {:>8} {:>10} {:>11} {:>13} {:>11}".format(*head))
        for row, our in zip(result.paper, result.ours, strict=True):
            print(_table_line(row, getattr(row, name), getattr(our, name), formats))
    within, cells = result.n_within_variance()
    print(
        f"\n{within} of {cells} cells of table 1 lie within the paper's {RUN_TO_RUN:.0%} variance"
    )


def _table_line(
    row: "Prediction", cell: "Cell", our: "Cell", formats: tuple[float, str, str]
) -> str:
    scale, printed, ours = formats

    def written(value: float, sign: str = "") -> str:
        return f"{scale * value:{sign}{ours}}"

    return (
        f"{row.row.workload.name:<10} {row.row.broken_chips:>6} "
        f"{scale * cell.printed:>8{printed}} "
        f"{written(cell.predicted):>10} {written(cell.difference, '+'):>11} "
        f"{written(our.predicted):>13} {written(our.difference, '+'):>11}"
    )


def _print_own_consistency(result: "Reproduction") -> None:
    print("\nRelative efficiency by the paper's own figures")
    head = ("benchmark", "chips", "printed", "by its times", "by table 2")
    print("{:<10} {:>6} {:>8} {:>13} {:>11}".format(*head))
    for row in (each.row for each in result.paper):
        print(
            f"{row.workload.name:<10} {row.broken_chips:>6} {row.relative_efficiency:>8.3g} "
            f"{row.efficiency_of_times:>13.3f} {row.efficiency_of_overheads:>11.3f}"
        )
    for row in (each.row for each in result.paper if each.row.note):
        print(f"note: {row.workload.name} on {row.full_chips}: {row.note}")


def _print_readings(result: "Reproduction") -> None:
    heads = [f"{row.row.workload.name} {row.row.broken_chips}" for row in result.paper]
    line = "{:<36}" + " {:>14}" * len(heads)
    readings = [("as above", result.paper), *((r.words, r.predictions) for r in result.readings)]
    for title, name, scale, in_print, ours in (
        ("Table 2, other readings: % of a step", "overhead", 100.0, ".1f", ".2f"),
        ("Table 1, other readings: efficiency", "efficiency", 1.0, ".3g", ".3f"),
    ):
        print("\n" + line.format(title, *heads))
        printed = [f"{scale * getattr(row, name).printed:{in_print}}" for row in result.paper]
        print(line.format("printed", *printed))
        for words, rows in readings:
            values = [f"{scale * getattr(row, name).predicted:{ours}}" for row in rows]
            print(line.format(words, *values))
    if (links := result.links) is not None:
        print(
            "\nFrom the smaller to the larger full mesh, allreduce of the first benchmark grows\n"
            f"by {links.printed:.3f} ({links.printed_low:.3f} to {links.printed_high:.3f} by "
            f"rounding) in table 2 if the global batch is the same, by {links.preset:.3f} on "
            f"{result.setting.fabric.name}."
        )
    costs = [
        f"{row.broken.time_s / full.time_s - 1:+.1%}"
        for row, full in zip(result.ours, result.full_ours, strict=True)
    ]
    print(f"What the hole costs our own allreduce: {', '.join(costs)}")
