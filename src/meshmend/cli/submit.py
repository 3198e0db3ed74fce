"""`meshmend submit`: prints what a scheduler needs to run a job, or submits it."""

import typer

from meshmend.cli import submit_kubernetes, submit_slurm
from meshmend.cli.options import SCRIPT_LAST

app = typer.Typer(
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="Print what a scheduler needs to run a job that survives lost hosts, or submit it.",
    epilog="Start with: meshmend submit slurm --mesh 4x4 --hosts 2x2 train.py",
)
app.command("slurm", context_settings=SCRIPT_LAST)(submit_slurm.slurm_command)
submit_kubernetes.register(app)
