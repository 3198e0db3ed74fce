"""The command line: arguments in, exit code out.

0: done. 2: bad input, one line on standard error. 1: anything else, a wrong plan included.
Only the wanted command is imported, and it imports what it needs when it runs.
"""

import errno
import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.exceptions import TyperException

from meshmend import __version__
from meshmend.cli.console import finish_json_log, note, start_json_log
from meshmend.cli.options import context_of
from meshmend.config import COMMANDS, LEAVES, warn_of_unknown
from meshmend.errors import InputError, MeshmendError

# Each command: its name, its module in `meshmend.cli`, and its function there, or its Typer of
# further commands.
_COMMANDS: Final = (
    ("train", "train", "train_command"),
    ("plan", "plan", "plan_command"),
    ("verify", "plan", "verify_command"),
    ("export", "exchange_formats", "export_command"),
    ("import", "exchange_formats", "import_command"),
    ("algorithms", "plan", "algorithms_command"),
    ("simulate", "simulate", "simulate_command"),
    ("forecast", "forecast", "forecast_command"),
    ("fabrics", "plan", "fabrics_command"),
    ("show", "show", "show_command"),
    ("explore", "explore", "explore_command"),
    ("figures", "paper", "figures_command"),
    ("reproduce", "paper", "reproduce_command"),
    ("run", "run", "run_command"),
    ("coordinator", "processes", "coordinator_command"),
    ("worker", "processes", "worker_command"),
    ("agent", "processes", "agent_command"),
    ("status", "status", "status_command"),
    ("checkpoint", "checkpoint", "app"),
    ("bench", "bench", "bench_command"),
    ("testbed", "testbed", "app"),
    ("submit", "submit", "app"),
    ("wormhole", "wormhole", "app"),
    ("doctor", "doctor", "doctor_command"),
    ("slurm-job", "submit", "slurm_job_command"),
)
_INTERRUPTED: Final = 130  # the exit code, by convention
_READER_GONE: Final = 141  # as of a process that SIGPIPE ended
_HIDDEN: Final = frozenset({"slurm-job"})  # users do not type it


def _first_command() -> str:
    """Return a command that works with the packages that are installed here."""
    if all(map(find_spec, ("torch", "sklearn"))):
        return "Start with: meshmend train --inject 'kill 2x2@0,2 at 30'"
    return (
        "Start with: meshmend explore --fail board:2,2 --export page.html, and open page.html. "
        "To train, pip install 'meshmend[train]'; meshmend doctor says what else works here."
    )


@cache
def _commands(wanted: str) -> Any:
    """Return, as Typer holds it, the command line with one command, or with all if `wanted` is "".

    Importing all commands takes longer than some of them run. Typer has no public type for it.
    """
    app = typer.Typer(
        name="meshmend",
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        help="Keep data-parallel training running on mesh-connected chips when chips fail.",
        epilog=_first_command(),
    )
    app.callback()(_root)
    for name, module_name, what in _COMMANDS:
        if wanted not in (name, ""):
            continue
        module = import_module(f"meshmend.cli.{module_name}")
        command = getattr(module, what)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            context = context_of(command)
            app.command(name, hidden=name in _HIDDEN, context_settings=context)(command)
    return typer.main.get_command(app)


def commands_by_name() -> dict[str, Any]:
    """Return each command that users type by its name, such as `meshmend testbed up`.

    Each has `help` and `params`.
    """
    found: dict[str, Any] = {}

    def add(name: str, command: Any) -> None:
        below: Mapping[str, Any] | None = getattr(command, "commands", None)  # a group has some
        if below is None and not command.hidden:
            found[name] = command
        for each, inner in (below or {}).items():
            add(f"{name} {each}", inner)

    add("meshmend", _commands(""))
    return found


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"meshmend {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def run_line(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    if "--log-json" not in arguments:  # else the option that chooses the log does this
        warn_of_unknown(os.environ)
    try:
        names = {name for name, _, _ in _COMMANDS}
        app = _commands(arguments[0] if arguments and arguments[0] in names else "")
        result = app(args=arguments or ["--help"], prog_name="meshmend", standalone_mode=False)
        sys.stdout.flush()
        if result == _INTERRUPTED:  # so typer tells of a KeyboardInterrupt
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except TyperException as error:
        if "--log-json" in arguments:  # it may not have come to this option
            start_json_log()
        path = _command_path(arguments)
        advice = _settings_like(getattr(error, "option_name", ""), path) or f"see {path} --help"
        return _failed(f"{error.format_message()} ({advice})", 2)
    except InputError as error:
        return _failed(str(error), 2)
    except MeshmendError as error:
        return _failed(str(error), 1)
    except (BrokenPipeError, SystemExit) as error:
        # The reader has closed, as `head` does: discard the rest. Typer exits then by itself.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    except OSError as error:  # a full disk, a closed terminal
        if error.errno == errno.ENAMETOOLONG:
            return _failed(f"{error.strerror}: {str(error.filename)[:60]}...", 2)
        if error.errno == errno.ENOSPC and error.filename is None:
            return _failed(f"cannot write all of the output: {error.strerror}", 1)
        return _failed(str(error), 1)
    except MemoryError as error:
        return _failed(f"this needs more memory than there is: {error}; take a smaller mesh", 2)
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted", _INTERRUPTED)
    finally:
        finish_json_log()


def _command_path(arguments: list[str]) -> str:
    """Return the command that a line names, as far as it names one: `meshmend testbed up`."""
    path = ["meshmend"]
    names = {name: module for name, module, _ in _COMMANDS}
    if arguments and arguments[0] in names:
        path.append(arguments[0])
        module = import_module(f"meshmend.cli.{names[arguments[0]]}")
        group = getattr(module, "app", None)
        if isinstance(group, typer.Typer) and len(arguments) > 1:
            path += [each.name for each in group.registered_commands if each.name == arguments[1]]
    return " ".join(path)


def _settings_like(option: str, path: str) -> str:
    """Return how to set what somebody takes for an option; empty if no setting has that name."""
    command = path.removeprefix("meshmend ")
    if command == "forecast":
        from meshmend.cli.forecast import advice_on

        return advice_on(option)
    reader = COMMANDS.get(command)
    name = option.lstrip("-").replace("-", "_")
    keys = [key for key in LEAVES if key.partition(".")[2] == name]
    found = [key for key in keys if reader is not None and reader.is_read(key)]
    return f"it is a setting: --set {found[0]}=VALUE" if found else ""


def _failed(message: str, code: int) -> int:
    note(f"meshmend: {' '.join(message.split())}", level="error")
    return code


def main() -> None:
    """Run the command line of this process."""
    _open_missing_streams()
    sys.exit(run_line(sys.argv[1:]))


def _open_missing_streams() -> None:
    """Open the null device in the place of each standard stream that is closed.

    Else the next file or socket would take its number, and get what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode)  # noqa: SIM115  # stays open
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
