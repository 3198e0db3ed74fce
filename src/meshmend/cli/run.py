"""`meshmend run`: a training script on every live chip of a mesh, on this machine."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import announce_compilation
from meshmend.cli.options import FailOption, MeshOption, WrapOption, mesh_of

if TYPE_CHECKING:
    from meshmend.launch.job import Job

# Everything after the script is the script's.
CONTEXT = {"allow_interspersed_args": False}


def run_command(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The script, or with -m a module.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")
    ] = None,
    *,
    mesh: MeshOption,
    wrap: WrapOption = "none",
    fail: FailOption = None,
    algorithm: Annotated[
        str, typer.Option("--algorithm", metavar="NAME", help="How to sum; auto by default.")
    ] = "auto",
    slices: Annotated[
        int, typer.Option("--slices", metavar="N", min=0, help="Slices of a payload; 0: by size.")
    ] = 0,
    preload: Annotated[
        list[str] | None,
        typer.Option(
            "--preload",
            metavar="MODULE",
            help="Import this once, before the workers start; repeat for more.",
        ),
    ] = None,
    testbed: Annotated[
        str | None,
        typer.Option(
            "--testbed",
            metavar="BANDWIDTH",
            help="Put each worker into its chip's network, with links of e.g. 50Mbit.",
        ),
    ] = None,
    is_module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")
    ] = False,
) -> int:
    """Run a training script with one worker per live chip, like torchrun for one machine.

    The script calls init_process_group("meshmend") and is otherwise unchanged; its lines are
    printed with the chip they came from. The exit code is that of the first worker that failed.

    **Examples**

    - meshmend run --mesh 4x4 --fail 2x2@0,2 train.py --epochs 3

    - meshmend run --mesh 4x4 --preload transformers train.py

    - meshmend run --mesh 2x2 --algorithm ring-1d -m mypackage.train
    """
    announce_compilation()
    # As torchrun does: many workers on one machine must not each start a thread per core. Both
    # are read when torch is imported, below.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from meshmend.launch.job import Job, run_job
    from meshmend.launch.worker import Script
    from meshmend.torch.settings import Settings

    settings = Settings(mesh_of(mesh, wrap, fail), algorithm=algorithm, n_slices=slices)
    job = Job(
        settings, Script(script, tuple(arguments or ()), is_module), preload=tuple(preload or ())
    )
    return run_job(job) if testbed is None else _run_in_testbed(job, testbed)


def _run_in_testbed(job: "Job", bandwidth: str) -> int:
    from meshmend.launch.job import run_job
    from meshmend.testbed.bed import Testbed
    from meshmend.units import parse_bandwidth

    mesh = job.settings.mesh
    with Testbed.up(mesh, link_bandwidth=parse_bandwidth(bandwidth)) as bed:
        networked = {"GLOO_SOCKET_IFNAME": "chip"}
        return run_job(replace(job, enter=bed.enter, address_of=bed.address, environment=networked))
