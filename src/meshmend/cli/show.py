"""`meshmend show`: shows a mesh, its rings, its routes and its link load."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshmend.cli.console import (
    announce_compilation,
    check_suffix,
    check_writable,
    print_json,
    write_text,
)
from meshmend.cli.options import (
    FailOption,
    JsonOption,
    MeshOption,
    WrapOption,
    check_algorithms,
    mesh_of,
)
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.topology.mesh import Mesh

RouteOption = Annotated[
    list[str] | None,
    typer.Option("--route", metavar="A-B", help="Draw the route between two chips: 0,0-7,7."),
]


def show_command(
    mesh: MeshOption,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    algorithm: Annotated[
        str | None, typer.Option("--algorithm", metavar="NAME", help="Draw its rings.")
    ] = None,
    route: RouteOption = None,
    load: Annotated[
        bool, typer.Option("--load", help="Draw the load per directed link of --algorithm.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the picture to this SVG file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a mesh: in the terminal, or with -o as an SVG picture.

    Alone it draws the mesh with its holes; with --algorithm its rings; with --algorithm and
    --load how busy each link is; with --route the way that messages take around the holes.

    **Examples**

    - meshmend show --mesh 8x8 --fail 2x2@2,2

    - meshmend show --mesh 8x8 --fail 2x2@2,2 --algorithm ft-two-d -o rings.svg

    - meshmend show --mesh 8x8 --fail 2x2@2,2 --algorithm ft-two-d --load -o load.svg

    - meshmend show --mesh 8x8 --fail 2x2@2,2 --route 3,0-3,7 -o route.svg
    """
    broken = mesh_of(mesh, wrap, fail)
    if load and algorithm is None:
        raise InputError(
            "--load needs --algorithm NAME: the load is what its transfers put on links"
        )
    if algorithm is not None and output is None:
        raise InputError("--algorithm needs -o FILE.svg: its rings are drawn into a picture")
    if algorithm is not None:
        check_algorithms([algorithm], *(["auto"] if load else []))
    check_suffix(output, ".svg")
    check_writable(output)
    announce_compilation()
    facts = _facts(broken)
    routes = [_route(broken, text) for text in route or ()]
    if output is not None:
        write_text(output, _picture(broken, algorithm, routes, load=load))
        facts["picture"] = str(output)
    if as_json:
        print_json(facts | {"routes": [[list(chip) for chip in path] for path in routes]})
        return
    _print_facts(broken, facts)
    for path in routes:
        print(f"route        {' '.join(','.join(map(str, chip)) for chip in path)}")
    if output is not None:
        print(f"written      {output}")


def _facts(mesh: "Mesh") -> dict[str, Any]:
    from meshmend.planning.plan import mesh_summary
    from meshmend.routing.stretch import table_stretch
    from meshmend.routing.virtual_channels import all_pairs_tables
    from meshmend.topology.figures import mesh_figures
    from meshmend.topology.graph import components, largest_part

    parts = components(mesh)
    part = largest_part(mesh)
    facts = mesh_summary(mesh, sorted(chip for other in parts[1:] for chip in other))
    facts |= {"components": [len(each) for each in parts], "diameter": mesh_figures(part).diameter}
    if part.n_live <= 1500:  # all pairs: the square of the chips
        tables = all_pairs_tables(part)
        stretch = table_stretch(part, tables)
        facts["all_pairs"] = {
            "virtual_channels": tables.n_virtual_channels,
            "mean_stretch": stretch.mean,
            "max_stretch": stretch.max,
        }
    return facts


def _print_facts(mesh: "Mesh", facts: dict[str, Any]) -> None:
    from meshmend.draw.mesh_text import mesh_text

    print(mesh_text(mesh))
    print(f"mesh         {mesh}")
    print(
        f"chips        {facts['live']} live, {facts['failed']} failed, "
        f"{len(facts['stranded'])} cut off"
    )
    print(f"links        {facts['links']} live; diameter {facts['diameter']} hops")
    if "all_pairs" in facts:
        pairs = facts["all_pairs"]
        print(
            f"routes       all pairs free of deadlock with {pairs['virtual_channels']} virtual "
            f"channel(s), stretch {pairs['mean_stretch']:.3f} mean, {pairs['max_stretch']:.3g} most"
        )


def _route(mesh: "Mesh", text: str) -> tuple[tuple[int, ...], ...]:
    import numpy as np

    from meshmend.routing.routes import routes_for
    from meshmend.topology.failures import Link, parse_failure
    from meshmend.topology.graph import largest_part

    part = largest_part(mesh)
    ends = text.split("-")
    if len(ends) != 2:
        raise InputError(f"--route needs two chips such as 0,0-7,7, but got {text!r}")
    chips = []
    for end in ends:
        place = parse_failure(end)
        if isinstance(place, Link) or "@" in end or place.origin not in part.rank_of:
            raise InputError(f"--route needs two live chips of {mesh}, but got {end!r}")
        chips.append(place.origin)
    source, goal = (part.rank_of[chip] for chip in chips)
    if source == goal:
        raise InputError(f"--route needs two different chips, but got {text!r}")
    return routes_for(part, np.array([source]), np.array([goal])).path(part, source, goal)


def _picture(
    mesh: "Mesh",
    algorithm: str | None,
    routes: list[tuple[tuple[int, ...], ...]],
    *,
    load: bool,
) -> str:
    from meshmend.draw.algorithm_picture import algorithm_svg
    from meshmend.draw.load_picture import link_load_svg
    from meshmend.draw.mesh_picture import mesh_svg
    from meshmend.draw.overlays import routes_svg
    from meshmend.planning.plan import plan
    from meshmend.topology.graph import largest_part

    part = largest_part(mesh)
    if load and algorithm is not None:
        planned = plan(mesh, algorithm)
        return link_load_svg(
            part,
            planned.channel_loads,
            title=f"Link load of {planned.schedule.algorithm} on {mesh}",
        )
    if algorithm is not None:
        return algorithm_svg(part, algorithm)
    return routes_svg(mesh, routes) if routes else mesh_svg(mesh)
