"""The command line: arguments in, exit code out.

0: done. 2: bad input, one line on standard error. 1: anything else, a wrong plan included.
Commands import what they need when they run, so that `--help` is fast.
"""

import os
import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from meshmend import __version__
from meshmend.cli import (
    agent,
    bench,
    coordinator,
    fabrics,
    figures,
    plan,
    reproduce,
    run,
    show,
    simulate,
    status,
    submit,
    submit_slurm,
    testbed,
    train,
    worker,
)
from meshmend.cli.console import note
from meshmend.cli.json_log import finish_json_log, start_json_log
from meshmend.cli.options import RENAMED_OPTIONS
from meshmend.errors import InputError, MeshmendError
from meshmend.variables import warn_of_unknown

app = typer.Typer(
    name="meshmend",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Keep data-parallel training running on mesh-connected chips when chips fail.",
    epilog="Start with: meshmend train --inject 'kill 2x2@0,2 at 30'",
)
app.command("train", context_settings=RENAMED_OPTIONS)(train.train_command)
app.command("plan")(plan.plan_command)
app.command("verify")(plan.verify_command)
app.command("algorithms")(plan.algorithms_command)
app.command("simulate")(simulate.simulate_command)
app.command("fabrics")(fabrics.fabrics_command)
app.command("show")(show.show_command)
app.command("figures")(figures.figures_command)
app.command("reproduce")(reproduce.reproduce_command)
app.command("run", context_settings=run.CONTEXT)(run.run_command)
app.command("coordinator", context_settings=RENAMED_OPTIONS)(coordinator.coordinator_command)
app.command("worker", context_settings=worker.CONTEXT)(worker.worker_command)
app.command("agent", context_settings=worker.CONTEXT)(agent.agent_command)
app.command("status")(status.status_command)
app.command("bench")(bench.bench_command)
app.add_typer(testbed.app, name="testbed")
app.add_typer(submit.app, name="submit")
app.command("slurm-job", hidden=True, context_settings=worker.CONTEXT)(
    submit_slurm.slurm_job_command
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"meshmend {__version__}")
        raise typer.Exit


@app.callback()
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
        result = app(args=arguments or ["--help"], prog_name="meshmend", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except TyperException as error:
        if "--log-json" in arguments:  # it may not have come to this option
            start_json_log()
        return _failed(f"{error.format_message()} (see meshmend --help)", 2)
    except InputError as error:
        return _failed(str(error), 2)
    except MeshmendError as error:
        return _failed(str(error), 1)
    except BrokenPipeError:  # the reader has closed, as `head` does: discard the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, a closed terminal
        return _failed(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted", 130)
    finally:
        finish_json_log()


def _failed(message: str, code: int) -> int:
    note(f"meshmend: {' '.join(message.split())}", level="error")
    return code


def main() -> None:
    """Run the command line of this process."""
    sys.exit(run_line(sys.argv[1:]))
