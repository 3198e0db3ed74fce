"""`meshmend explore`: a local page on which one breaks a mesh and sees what it costs."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import (
    announce_compilation,
    cache_dir,
    check_suffix,
    check_writable,
    progress,
    write_text,
)
from meshmend.cli.options import (
    FabricOption,
    FailOption,
    PayloadOption,
    SecretOption,
    SlowOption,
    TileOption,
    WrapOption,
    mesh_of,
    need_web_server,
)
from meshmend.errors import InputError
from meshmend.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from meshmend.pages.explore.explorer_question import ExplorerQuestion
    from meshmend.pages.explore.page_server import PageServer
    from meshmend.planning.target import Target
    from meshmend.topology.mesh import Mesh

_LIVE_NICENESS = 14  # planners of a live page give way to the workers


def explore_command(
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="RxC", help="The mesh to begin with.", show_default="8x8"),
    ] = None,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    slow: SlowOption = None,
    collective: Annotated[
        str,
        typer.Option("--collective", metavar="KIND", help="allreduce (a sum) or all-to-all."),
    ] = "allreduce",
    tile: TileOption = None,
    payload: PayloadOption = "100MB",
    fabric: FabricOption = "reference",
    algorithm: Annotated[
        str, typer.Option("--algorithm", metavar="NAME", help="auto, or an algorithm's name.")
    ] = "auto",
    coordinator: Annotated[
        str | None,
        typer.Option(
            "--coordinator", metavar="HOST:PORT", help="Follow the job of this coordinator."
        ),
    ] = None,
    secret_file: SecretOption = None,
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="N", min=0, max=65535, help="Where to listen; 0: any free port."
        ),
    ] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="FILE.html",
            help="Write the page into one file that works offline, and serve nothing.",
        ),
    ] = None,
    most: Annotated[
        str,
        typer.Option(
            "--export-size", metavar="SIZE", help="The most bytes that the file may take."
        ),
    ] = "8MB",
    search: Annotated[
        bool,
        typer.Option(
            "--search/--no-search",
            help="With --export: search for every plan, which takes minutes.",
        ),
    ] = False,
    faults: Annotated[bool, typer.Option("--faults", hidden=True)] = False,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
) -> None:
    """Serve a page on which you click chips, boards and links dead, and see plan and price at once.

    The page shows the rings or trees of the plan, the load of every link, the schedule as it runs,
    and each algorithm's time next to the limit. A click can also make a link slow, and the page
    can show an all-to-all, or the sums of replicas of several chips (tiles).

    It is served to this machine alone, at an address with a token that only you see, until you
    press Ctrl-C. It needs no network.

    With --coordinator it shows a running job instead: the mesh as it is now, steps, loss,
    recoveries as they happen, and who waits for whom. It needs the job's secret.

    With --export it writes one file to send or to show in a talk, with a proved plan for each
    board, host, chip and link that one can click. It needs no server and no network, and neither
    does writing it: the core of meshmend is enough.

    **Examples**

    - meshmend explore

    - meshmend explore --mesh 32x32 --fail board:10,14 --payload 25MB

    - meshmend explore --mesh 16x16x16 --wrap all --fabric tpu-v4 --browser

    - meshmend explore --mesh 8x8 --fail 1,1 --tile 2x2

    - meshmend explore --mesh 16x16 --fail board:2,2 --export page.html

    - meshmend explore --coordinator 10.0.0.1:7000 --secret-file job.secret
    """
    if parent is not None:
        from meshmend.processes import die_with_parent

        die_with_parent(parent)
    from meshmend.planning.target import Target

    target = Target().with_(payload, fabric)
    if export is not None and coordinator is not None:
        raise InputError("--export keeps plans, not a job; leave --coordinator out")
    if export is None and search:
        raise InputError("--search is for --export; a served page searches by itself")
    if coordinator is not None:
        if mesh is not None or fail or slow or tile or collective != "allreduce":
            raise InputError(
                "--coordinator shows the mesh of a job; leave --mesh, --fail, --slow, --tile and "
                "--collective out"
            )
        need_web_server("meshmend explore")
        server = _live_server(coordinator, secret_file, wrap, target, may_inject=faults)
    else:
        broken = mesh_of(mesh or "8x8", wrap, fail, slow)
        question = _question(broken, target, algorithm, collective, tile)
        if export is not None:
            _export(export, question, most, search)
            return
        need_web_server("meshmend explore")
        server = _server(question)

    def ready(address: str) -> None:
        print(f"explorer     {address}", flush=True)
        if browser:
            import webbrowser

            webbrowser.open(address)

    with suppress(KeyboardInterrupt):  # Ctrl-C is how one ends it
        server.run(port, ready)


def _question(
    broken: "Mesh", target: "Target", algorithm: str, collective: str, tile: str | None
) -> "ExplorerQuestion":
    from meshmend.pages.explore.explorer_question import ExplorerQuestion
    from meshmend.planning.target import collective_named

    question = ExplorerQuestion(broken, target, algorithm, collective_named(collective), tile or "")
    if tile:
        broken.tiles(tile)  # refuses one that does not fit
    return question


def _export(path: Path, question: "ExplorerQuestion", most: str, search: bool) -> None:
    check_suffix(path, ".html", "--export")
    check_writable(path)
    most_bytes = parse_bytes(most)
    announce_compilation()
    from meshmend.pages.explore.kept_page import kept_page

    with progress(or_line=True) as bar:
        made = kept_page(
            question,
            most_bytes=most_bytes,
            search=search,
            cache_dir=cache_dir(),
            progress=bar,
        )
    write_text(path, made.text)
    print(f"page         {path}, {format_bytes(len(made.text))}")
    print(f"clickable    {_counted(made.holes) or 'nothing'}, one at a time")
    if made.left_out:
        print(f"left out     {_counted(made.left_out)}: no room in {most}; see --export-size")


def _counted(units: dict[str, int]) -> str:
    words = {"slow": "slow link"}
    return ", ".join(
        f"{n} {words.get(unit, unit)}{'' if n == 1 else 's'}" for unit, n in units.items() if n
    )


def _server(question: "ExplorerQuestion") -> "PageServer":
    from meshmend.pages.explore.explorer_question import page_start
    from meshmend.pages.explore.page_server import PageServer

    return PageServer(page_start(question), cache_dir())


def _live_server(
    coordinator: str,
    secret_file: Path | None,
    wrap: str,
    target: "Target",
    *,
    may_inject: bool,
) -> "PageServer":
    from meshmend.launch.hosts import secret_from
    from meshmend.membership.status_client import StatusQuestion, ask_job
    from meshmend.topology.failures import format_shape
    from meshmend.transport.listener import parse_address

    endpoint = parse_address(coordinator, "--coordinator")
    secret = secret_from(os.environ, secret_file).encode()
    question = StatusQuestion(endpoint, (), secret)
    status = ask_job(question)
    mesh = mesh_of(format_shape(status.shape), wrap, None)
    from meshmend.pages.explore.explorer_question import ExplorerQuestion, page_start
    from meshmend.pages.explore.live_feed import LiveFeed
    from meshmend.pages.explore.page_server import PageServer

    return PageServer(
        page_start(ExplorerQuestion(mesh, target), is_live=True, may_inject=may_inject),
        cache_dir(),
        LiveFeed(question, _print_fault if may_inject else None),
        niceness=_LIVE_NICENESS,
    )


def _print_fault(words: str) -> None:
    """Pass the words of a fault on to the launcher, which reads what this process prints."""
    try:
        print(f"fault {words}", flush=True)
    except OSError:
        raise InputError("the launcher of this job has ended; nothing takes faults") from None
