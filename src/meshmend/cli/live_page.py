"""The options of commands that run a local job with a live page."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import note
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.launch.job_page import PageRequest

_NEEDS = ("starlette", "uvicorn")

ExploreOption = Annotated[
    bool,
    typer.Option("--explore", help="Serve a live page of the job; see explore."),
]
AllowFaultsOption = Annotated[
    bool,
    typer.Option(
        "--allow-faults", help="With --explore: clicks on the page kill, hang, cut and repair."
    ),
]


def page_request(explore: bool, allow_faults: bool) -> "PageRequest | None":
    """Return the live page that the options ask for, if any.

    Raises:
        InputError: faults are allowed without a page, or the web server is not installed.
    """
    if allow_faults and not explore:
        raise InputError("--allow-faults needs --explore: faults are clicked on its page")
    if not explore:
        return None
    check_installed("--explore")
    from meshmend.launch.job_page import PageRequest

    return PageRequest(lambda address: note(f"meshmend: live page {address}"), allow_faults)


def check_installed(who: str) -> None:
    """Raise InputError if the packages of the web server are not installed."""
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        raise InputError(
            f"{who} needs {' and '.join(missing)}; install with: pip install 'meshmend[explore]'"
        )
