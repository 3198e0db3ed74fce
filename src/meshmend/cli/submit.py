"""`meshmend submit`: prints what a scheduler needs to run a job, or submits it."""

import typer

from meshmend.cli import submit_kubernetes, submit_slurm
from meshmend.cli.options import SCRIPT_LAST

app = typer.Typer(
    rich_markup_mode="markdown",
    help="Print what a scheduler needs to run a job that survives lost hosts, or submit it.",
    epilog="Start with: meshmend submit slurm --mesh 4x4 --hosts 2x2 train.py",
)


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command("slurm", context_settings=SCRIPT_LAST)(submit_slurm.slurm_command)
submit_kubernetes.register(app)
