"""Options that several commands share, so that shapes and failures are written the same everywhere.

This module is imported at start-up, so it imports only what argument parsing needs. Functions that
read an option import neither Numba nor torch. So a command that reads its options first reports a
mistake at once.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from meshmend.cli.console import note, start_json_log
from meshmend.config import COMMANDS, LEAVES, PREFIX, Leaf, job_config, warn_of_unknown
from meshmend.errors import InputError
from meshmend.packages import need

if TYPE_CHECKING:
    from meshmend.config import JobConfig
    from meshmend.launch.job_page import PageRequest
    from meshmend.membership.faults.fault import Fault
    from meshmend.topology.fabric import Fabric
    from meshmend.topology.mesh import Mesh


_LONGEST_S: Final = 1e6


def check_seconds(seconds: float) -> float:
    """Return an option in seconds; refuse what is no number or more than a clock can add.

    A range of typer lets `nan` pass.
    """
    if not seconds <= _LONGEST_S:
        raise typer.BadParameter(f"{seconds} is not in the range up to {_LONGEST_S:g} seconds")
    return seconds


def command_group(about: str, *, start_with: str) -> typer.Typer:
    """Return a command that has commands of its own; without one it prints its help."""
    epilog = f"Start with: meshmend {start_with}"
    app = typer.Typer(rich_markup_mode="markdown", help=about, epilog=epilog)

    @app.callback(invoke_without_command=True)
    def print_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    return app


def setting_option(key: str, **more: Any) -> Any:
    """Return the option of a setting for a command that runs no job: named and described once."""
    leaf = LEAVES[key]
    return typer.Option(leaf.option, metavar=leaf.metavar, help=_plain(leaf.words), **more)


def _plain(words: str) -> str:
    return words.replace("`", "")


MeshOption = Annotated[str, setting_option("mesh.shape")]
WrapOption = Annotated[str, setting_option("mesh.wrap")]
FailOption = Annotated[list[str] | None, setting_option("mesh.fail")]
SlowOption = Annotated[list[str] | None, setting_option("mesh.slow")]
SecretOption = Annotated[Path | None, setting_option("job.secret_file")]
CoordinatorOption = Annotated[
    str,
    typer.Option("--coordinator", metavar="HOST:PORT", help="The address of the coordinator."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")
]


def _choose_log(as_json: bool) -> bool:
    """Begin structured logs, if wanted, before any other option is looked at."""
    if as_json:
        start_json_log()
    warn_of_unknown(os.environ)
    return as_json


LogJsonOption = Annotated[
    bool,
    typer.Option(
        "--log-json",
        is_eager=True,
        callback=_choose_log,
        help="Write one JSON object per line on standard error, instead of plain lines.",
    ),
]

ScriptArgument = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="The script, or with -m a module.")
]
ScriptArguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")]
ModuleOption = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")]


def check_script(script: str, command: str, *, is_module: bool) -> None:
    """Raise InputError if a command is to run a file that is not there."""
    if not is_module and not Path(script).is_file():
        raise InputError(f"meshmend {command} needs a script, but there is no file {script}")


def check_module(name: str) -> None:
    """Raise InputError if there is no package of a module's name, here or installed.

    Looks for the first part of the name alone: to look for the rest would run the package.
    """
    package, here = name.partition(".")[0], str(Path.cwd())
    sys.path.insert(0, here)  # as workers do
    try:
        is_there = bool(package) and find_spec(package) is not None
    finally:
        sys.path.remove(here)
    if not is_there:
        raise InputError(
            f"meshmend run -m needs a module, but there is none named {name!r}; of a script, give "
            "its path without -m"
        )


def context_of(command: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the context settings of a command: all words after a script belong to the script."""
    has_script = "script" in inspect.signature(command).parameters
    return {"allow_interspersed_args": False} if has_script else None


def mesh_of(mesh: str, wrap: str, fail: list[str] | None, slow: list[str] | None = None) -> "Mesh":
    """Return the mesh that the shared options describe."""
    from meshmend.topology.text import parse_mesh

    return parse_mesh(mesh, wrap=wrap, fail=fail or (), slow=slow or ())


def check_algorithms(names: Iterable[str], *others: str) -> None:
    """Raise InputError unless each name is an algorithm or one of `others`."""
    from meshmend.schedule.algorithm_names import ALGORITHM_NAMES, check_algorithm_name

    for name in names:
        check_algorithm_name(name, (*ALGORITHM_NAMES, *others))


def local_job(config: "JobConfig") -> "tuple[Mesh, tuple[Fault, ...]]":
    """Return the mesh of a job on this machine, and the faults to inject.

    What cannot be used of its settings is refused here, before torch is imported.
    """
    from meshmend.launch.hosts import board_from
    from meshmend.membership.faults.fault import parse_fault
    from meshmend.schedule.algorithm_names import check_fabric
    from meshmend.topology.text import configured_mesh
    from meshmend.units import parse_bandwidth

    mesh = configured_mesh(config.mesh)
    check_algorithms([config.sums.algorithm], "auto")
    check_fabric(config.sums.fabric, config.sums.algorithm)
    faults = tuple(parse_fault(text, mesh) for text in config.local.inject)
    board_from(config.mesh.board, mesh)
    if config.local.testbed:
        parse_bandwidth(config.local.testbed)
    if mesh.has_failures:
        _check_connected(mesh)
    return mesh, faults


def _check_connected(mesh: "Mesh") -> None:
    from meshmend.topology.graph import stranded  # imports a compiler, which takes long

    if cut_off := stranded(mesh):
        rest = f" and {len(cut_off) - 1} more are" if len(cut_off) > 1 else " is"
        raise InputError(
            f"a job needs chips that reach each other, but of {mesh} {cut_off[0]}{rest} cut off; "
            "leave out with --fail what is cut off"
        )


def algorithm_names() -> list[str]:
    """Return what a shell completes an algorithm with."""
    from meshmend.schedule.algorithm_names import ALGORITHM_NAMES

    return ["auto", *ALGORITHM_NAMES]


def _fabric_names() -> list[str]:
    from meshmend.topology.fabric import FABRICS

    return list(FABRICS)


PayloadOption = Annotated[
    str,
    typer.Option("--payload", metavar="SIZE", help="Bytes to sum per chip: 102.4MB, 64KiB, 1e6."),
]
TileOption = Annotated[
    str | None,
    typer.Option(
        "--tile",
        metavar="RxC",
        help="Chips that hold a replica together, such as 2x2: chips of one colour are summed, "
        "and the payload is that of a tile.",
    ),
]
FabricOption = Annotated[
    str,
    typer.Option(
        "--fabric",
        metavar="FABRIC",
        help="The machine: 'meshmend fabrics' lists them. Or a link's bandwidth, a hop's latency "
        "and a message's overhead: 6.15MB/s,44us,12us.",
        autocompletion=_fabric_names,
    ),
]
UpdateRateOption = Annotated[
    str | None,
    typer.Option(
        "--update-rate",
        metavar="500GB/s",
        help="Of a sharded update: weights that a chip updates; else unlimited.",
    ),
]
MirrorDomainOption = Annotated[
    list[str] | None,
    typer.Option(
        "--mirror-domain",
        metavar="DOMAIN",
        help="Of a shared optimizer: what never holds a share and its mirror: board, host, row, "
        "column, or blocks such as 4x2; repeat for more, the most important first. Else board "
        "and host.",
    ),
]
CollectiveOption = Annotated[
    str,
    typer.Option(
        "--collective",
        metavar="KIND",
        help="allreduce, reduce-scatter, all-gather, all-to-all, or sharded-update: reduce to the "
        "owners, update, gather.",
    ),
]


def with_update_rate(machine: "Fabric", update_rate: str | None, collective: str) -> "Fabric":
    """Return a fabric with the rate at which its chips update weights, if that is given.

    Raises:
        InputError: a rate that cannot be read, or one for a collective that updates nothing.
    """
    from meshmend.units import parse_bandwidth

    if update_rate is None:
        return machine
    if collective != "sharded-update":
        raise InputError(
            f"--update-rate needs --collective sharded-update, but got {collective}, which updates "
            "nothing"
        )
    return machine.with_(update_bytes_per_s=parse_bandwidth(update_rate))


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
    need_web_server("--explore")
    from meshmend.launch.job_page import PageRequest

    return PageRequest(lambda address: note(f"meshmend: live page {address}"), allow_faults)


def need_web_server(who: str) -> None:
    """Raise InputError if the packages of the web server are not installed."""
    need(who, "starlette", "uvicorn", extra="explore")


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings in a TOML file; see docs/settings.md."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="GROUP.NAME=VALUE",
        help="Any setting, such as timing.link_timeout=5; repeat for more. An option counts more "
        f"than --set, then come --config, a {PREFIX}* variable, the default.",
    ),
]


def job_command(
    name: str, *, defaults: Mapping[str, Any] | None = None, needs: tuple[str, ...] = ()
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that calls a command with the settings of its job as first argument.

    The settings that are options are listed in `config.COMMANDS`; the function has only the other
    options. `defaults` are those of this command; `needs` are keys that have no default.
    """
    own_defaults = defaults or {}
    key_of = {key.replace(".", "_"): key for key in COMMANDS[name].options}

    def decorate(body: Callable[..., int]) -> Callable[..., int]:
        def command(config: Path | None, assignments: list[str] | None, **given: Any) -> int:
            options = {key: given.pop(parameter) for parameter, key in key_of.items()}
            settings = job_config(
                {key: value for key, value in options.items() if value not in (None, [], False)},
                assignments=assignments or (),
                file=config,
                environment=os.environ,
                defaults=own_defaults,
                command=name,
            )
            for leaf in (LEAVES[key] for key in needs if not settings.get(key)):
                raise InputError(
                    f"meshmend {name} needs {leaf.option} {leaf.metavar}, or {leaf.key} in --config"
                )
            return body(settings, **given)

        _, *own = inspect.signature(body).parameters.values()
        of_tree = [
            _parameter(parameter, _annotation(LEAVES[key], own_defaults.get(key), key in needs))
            for parameter, key in key_of.items()
        ]
        last = [_parameter("config", ConfigOption), _parameter("assignments", SetOption)]
        parameters = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for each in (*filter(_is_argument, own), *of_tree, *last)
        ]
        parameters += [each for each in own if not _is_argument(each)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__doc__, command.__name__ = body.__doc__, body.__name__
        return command

    return decorate


def _is_argument(parameter: inspect.Parameter) -> bool:
    """Whether a parameter is no option, but an argument or the context."""
    known = getattr(parameter.annotation, "__metadata__", ())
    return not any(isinstance(each, typer.models.OptionInfo) for each in known)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    default = False if annotation.__origin__ is bool else None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _annotation(leaf: Leaf, default: str | None, is_needed: bool) -> Any:
    """Return the type and the option of a setting, as Typer reads them."""
    shown = default or leaf.default_words
    is_plain = leaf.kind in (bool, tuple) or shown == "none"
    words = leaf.words if is_plain or is_needed else f"{leaf.words} Default: {shown}."
    option = typer.Option(
        leaf.option,
        metavar=leaf.metavar or None,
        help=_plain(words) + (" Required." if is_needed else ""),
        show_default=False,
    )
    kinds: dict[type, Any] = {bool: bool, tuple: list[str] | None}
    return Annotated[kinds.get(leaf.kind, str | None), option]
