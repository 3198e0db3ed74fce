"""`meshmend show`: shows a mesh, its rings, its routes and its link load."""

import itertools
import math
import string
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshmend.cli.console import (
    announce_compilation,
    check_readable,
    check_suffix,
    check_writable,
    print_json,
    progress,
    write_text,
)
from meshmend.cli.options import (
    FabricOption,
    FailOption,
    JsonOption,
    PayloadOption,
    SlowOption,
    TileOption,
    WrapOption,
    algorithm_names,
    check_algorithms,
    mesh_of,
    setting_option,
)
from meshmend.cli.plan import named_plan
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.planning.plan import Plan
    from meshmend.planning.progress import ProgressCallback
    from meshmend.planning.target import Target
    from meshmend.topology.failures import Chip
    from meshmend.topology.mesh import Mesh
    from meshmend.topology.tiles import Tiling

RouteOption = Annotated[
    list[str] | None,
    typer.Option("--route", metavar="A-B", help="Draw the route between two chips: 0,0-7,7."),
]


PlanArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[PLAN]", help="A plan file, instead of --mesh: draw this plan."),
]


def show_command(
    plan_file: PlanArgument = None,
    mesh: Annotated[str | None, setting_option("mesh.shape")] = None,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    slow: SlowOption = None,
    tile: TileOption = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            "--algorithm",
            metavar="NAME",
            help="Draw its rings or trees; auto: the best.",
            autocompletion=algorithm_names,
        ),
    ] = None,
    payload: PayloadOption = "100MB",
    fabric: FabricOption = "reference",
    route: RouteOption = None,
    load: Annotated[
        bool, typer.Option("--load", help="Draw the load per directed link of the plan.")
    ] = False,
    darkest: Annotated[
        float | None,
        typer.Option(
            "--darkest",
            metavar="LOAD",
            help="With --load: the load of the darkest colour, the same in pictures to compare.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the picture to this SVG file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a mesh or a plan: in the terminal, or with -o as an SVG picture.

    Alone it draws the mesh with its holes; with --algorithm the plan that 'meshmend plan' makes
    for the payload; with --load how much of the payload each link carries; with --route the way
    that messages take around the holes. With a plan file it draws that plan. With --tile it shows
    the tiles, a letter each, and draws the load of the plan that sums their colours.

    **Examples**

    - meshmend show --mesh 8x8 --fail 2x2@2,2

    - meshmend show --mesh 8x8 --fail 2x2@2,2 --algorithm trees --payload 1MB -o trees.svg

    - meshmend show --mesh 8x8 --fail 2x2@2,2 --algorithm ft-two-d --load -o load.svg

    - meshmend show --mesh 8x8 --fail 2x2@2,2 --route 3,0-3,7 -o route.svg

    - meshmend show plan.json -o plan.svg

    - meshmend show --mesh 8x8 --fail 1,1 --tile 2x2
    """
    from meshmend.planning.target import Target

    has_failures = bool(fail or slow) or wrap != "none"
    if tile is not None:
        _check_tile_choices(plan_file, algorithm)
        algorithm = None if output is None else "auto"
    _check_choices(plan_file, mesh, algorithm, output, has_failures=has_failures, load=load)
    if darkest is not None and not (load and 0 < darkest < math.inf):
        raise InputError(f"--darkest needs --load and a number above 0, but got {darkest}")
    check_suffix(output, ".svg")
    target = Target().with_(payload, fabric)
    if plan_file is not None:
        check_readable(plan_file, "the plan")
    broken = None if mesh is None else mesh_of(mesh, wrap, fail, slow)
    check_writable(output)
    announce_compilation()
    with progress(quiet=as_json) as bar:
        shown = _plan(plan_file, broken, tile, algorithm, target, bar)
    if broken is None:
        assert shown is not None, "there is a mesh or a plan file"
        broken = shown.mesh
    from meshmend.planning.plan import tiling_summary
    from meshmend.topology.failures import format_chip

    facts, tiling = _facts(broken), None if shown is None else shown.tiling
    if tile is not None and tiling is None:
        tiling = broken.tiles(tile)
    if tiling is not None:
        facts["tiling"] = tiling_summary(tiling)
    if shown is not None:
        facts["plan"] = {"algorithm": shown.schedule.algorithm, "chunks": shown.schedule.n_chunks}
    routes = [_route(broken, text) for text in route or ()]
    if output is not None:
        write_text(output, _picture(broken, shown, routes, load=load, darkest=darkest))
        facts["picture"] = str(output)
    if as_json:
        print_json(facts | {"routes": [[list(chip) for chip in path] for path in routes]})
        return
    _print_facts(broken, facts, tiling)
    for path in routes:
        print(f"route        {' '.join(format_chip(chip) for chip in path)}")
    if output is not None:
        print(f"written      {output}")


def _check_choices(
    plan_file: Path | None,
    mesh: str | None,
    algorithm: str | None,
    output: Path | None,
    *,
    has_failures: bool,
    load: bool,
) -> None:
    """Raise InputError for options that do not go together."""
    if (plan_file is None) == (mesh is None):
        got = "neither" if mesh is None else "both"
        raise InputError(f"meshmend show needs --mesh RxC or a plan file, but got {got}")
    if plan_file is not None and algorithm is not None:
        raise InputError(f"{plan_file} has its own algorithm; leave out --algorithm {algorithm}")
    if mesh is None and has_failures:
        raise InputError("--fail, --slow and --wrap need --mesh: a plan file has its own mesh")
    if load and algorithm is None and plan_file is None:
        raise InputError(
            "--load needs --algorithm NAME or a plan file: the load is what transfers put on links"
        )
    if (algorithm is not None or load) and output is None:
        what = "--load" if algorithm is None else "--algorithm"
        raise InputError(f"{what} needs -o FILE.svg: the plan is drawn into a picture")
    if algorithm is not None:
        check_algorithms([algorithm], "auto")


def _plan(
    plan_file: Path | None,
    mesh: "Mesh | None",
    tile: str | None,
    algorithm: str | None,
    target: "Target",
    bar: "ProgressCallback",
) -> "Plan | None":
    """Return the plan of the file, or the one that `meshmend plan` makes; None without either."""
    from meshmend.planning.plan import load_plan
    from meshmend.schedule.table import Collective

    if plan_file is not None:
        return load_plan(plan_file, progress=bar)
    if mesh is None or algorithm is None:
        return None
    return named_plan(mesh, algorithm, Collective.ALLREDUCE, target, bar, tile=tile)


def _facts(mesh: "Mesh") -> dict[str, Any]:
    from meshmend.planning.plan import mesh_summary
    from meshmend.topology.figures import mesh_figures
    from meshmend.topology.graph import components, largest_part
    from meshmend.topology.routes import table_stretch
    from meshmend.topology.tables import all_pairs_tables

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


def _print_facts(mesh: "Mesh", facts: dict[str, Any], tiling: "Tiling | None") -> None:
    from meshmend.pages.draw.mesh_picture import mesh_text
    from meshmend.units import counted

    print(mesh_text(mesh, {} if tiling is None else _letters(tiling)))
    print(f"mesh         {mesh}")
    if tiling is not None:
        most = "no tiling has more" if tiling.is_most else "the most that were found"
        print(f"tiles        {tiling} (+); {most}")
    print(
        f"chips        {facts['live']} live, {facts['failed']} failed, "
        f"{len(facts['stranded'])} cut off"
    )
    print(f"links        {facts['links']} live; diameter {facts['diameter']} hops")
    if "all_pairs" in facts:
        pairs = facts["all_pairs"]
        channels = counted(pairs["virtual_channels"], "virtual channel")
        print(f"routes       all pairs free of deadlock with {channels}")
        mean, most = pairs["mean_stretch"], pairs["max_stretch"]
        print(f"stretch      {mean:.3f} mean, {most:.3g} most: hops over the fewest possible")


def _letters(tiling: "Tiling") -> "dict[Chip, str]":
    """Return a letter for each tile's chips, and a plus for spares."""
    letters = itertools.cycle(string.ascii_lowercase + string.ascii_uppercase)
    of_tile = {chip: letter for tile in tiling.tiles for letter in [next(letters)] for chip in tile}
    return dict.fromkeys(tiling.spares, "+") | of_tile


def _check_tile_choices(plan_file: Path | None, algorithm: str | None) -> None:
    """Raise InputError for what does not go with tiles."""
    if plan_file is not None:
        raise InputError(f"{plan_file} has its own tiles, if any; leave out --tile")
    if algorithm not in {None, "auto"}:
        raise InputError(f"--tile has a plan of its own; leave out --algorithm {algorithm}")


def _route(mesh: "Mesh", text: str) -> tuple[tuple[int, ...], ...]:
    import numpy as np

    from meshmend.topology.failures import Link, parse_failure
    from meshmend.topology.graph import largest_part
    from meshmend.topology.routes import routes_for

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
    plan: "Plan | None",
    routes: list[tuple[tuple[int, ...], ...]],
    *,
    load: bool,
    darkest: float | None,
) -> str:
    from meshmend.pages.draw.algorithm_picture import plan_load_svg, plan_svg
    from meshmend.pages.draw.mesh_picture import mesh_svg
    from meshmend.pages.draw.overlays import routes_svg

    if plan is not None and not routes:
        return plan_load_svg(plan, darkest=darkest) if load else plan_svg(plan)
    return routes_svg(mesh, routes) if routes else mesh_svg(mesh)
