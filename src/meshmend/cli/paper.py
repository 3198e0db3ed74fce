"""What the paper shows: `meshmend reproduce` predicts its tables, `meshmend figures` draws it."""

from pathlib import Path
from textwrap import wrap
from typing import Annotated, Final

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

_WIDE: Final = 90  # columns of a sentence


def reproduce_command(
    fabric: FabricOption = "tpu-v3",
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the two tables, no other readings of the paper.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write a page: HTML, self-contained."),
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
    from meshmend.lab.paper.prediction import broken_mesh
    from meshmend.lab.paper.reproduction import links_words, remarks, reproduction, tables
    from meshmend.lab.paper.reproduction_page import reproduction_page

    with progress(quiet=as_json) as bar:
        result = reproduction(machine, quick=quick, progress=bar)
    if output is not None:
        write_text(output, reproduction_page(result))
    if as_json:
        print_json(result.summary())
        return
    setting = result.setting
    holes = dict.fromkeys(broken_mesh(row.row.shape, setting.place) for row in result.paper)
    print(f"fabric       {setting.fabric}")
    print(f"holes        {', '.join(map(str, holes))}")
    print(f"kept equal   batch {setting.batch}, samples seen")
    for shown in tables(result):
        print(f"\n{shown.text()}")
    print()
    for words in filter(None, (*remarks(result), links_words(result))):
        print("\n".join(wrap(words, _WIDE)))
    if output is not None:
        print(f"\nwritten      {output}")


def figures_command(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder for the pictures.")
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
