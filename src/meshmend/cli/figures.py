"""`meshmend figures`."""

from pathlib import Path
from typing import Annotated

import typer

from meshmend.cli.console import print_json, write_text
from meshmend.cli.options import JsonOption


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
    from meshmend.lab.paper.paper_figures import paper_figures
    from meshmend.lab.paper.update_figure import update_figure

    written = []
    for name, svg in (paper_figures() | {"figure-11-sharded-update": update_figure()}).items():
        path = output / f"{name}.svg"
        write_text(path, svg)
        written.append(str(path))
        if not as_json:
            print(path)
    if as_json:
        print_json({"figures": written})
