"""`meshmend explore`: a local page on which one breaks a mesh and sees what it costs."""

from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated

import typer

from meshmend.cli.console import cache_dir
from meshmend.cli.options import FabricOption, FailOption, PayloadOption, WrapOption, mesh_of
from meshmend.errors import InputError

_NEEDS = ("starlette", "uvicorn")


def explore_command(
    mesh: Annotated[
        str, typer.Option("--mesh", metavar="RxC", help="The mesh to begin with.")
    ] = "8x8",
    wrap: WrapOption = "none",
    fail: FailOption = None,
    payload: PayloadOption = "100MB",
    fabric: FabricOption = "reference",
    algorithm: Annotated[
        str, typer.Option("--algorithm", metavar="NAME", help="auto, or an algorithm's name.")
    ] = "auto",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Where to listen; 0: any free port.")
    ] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = False,
) -> None:
    """Serve a page on which you click chips, boards and links dead, and see plan and price at once.

    The page shows the rings or trees of the plan, the load of every link, the schedule as it runs,
    and each algorithm's time next to the limit. It is served to this machine alone, at an address
    with a token that only you see, until you press Ctrl-C. It needs no network.

    **Examples**

    - meshmend explore

    - meshmend explore --mesh 32x32 --fail board:10,14 --payload 25MB

    - meshmend explore --mesh 16x16x16 --wrap all --fabric tpu-v4 --browser
    """
    check_installed()
    from meshmend.planning.target import Target

    broken = mesh_of(mesh, wrap, fail)
    target = Target().with_(payload, fabric)
    from meshmend.explore.explorer_question import ExplorerQuestion
    from meshmend.explore.page_server import PageServer
    from meshmend.explore.page_start import page_start

    start = page_start(ExplorerQuestion(broken, target, algorithm))

    def ready(address: str) -> None:
        print(f"explorer     {address}", flush=True)
        if browser:
            import webbrowser

            webbrowser.open(address)

    with suppress(KeyboardInterrupt):  # Ctrl-C is how one ends it
        PageServer(start, cache_dir()).run(port, ready)


def check_installed() -> None:
    """Raise InputError if the packages of the web server are not installed."""
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        raise InputError(
            f"meshmend explore needs {' and '.join(missing)}; install with: "
            "pip install 'meshmend[explore]'"
        )
