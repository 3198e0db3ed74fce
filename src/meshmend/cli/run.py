"""`meshmend run`: runs a training script on every live chip of a mesh, on this machine."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import compile_for_workers
from meshmend.cli.elastic import ElasticOption, RunDirOption, run_elastic_script
from meshmend.cli.live_page import AllowFaultsOption, ExploreOption, page_request
from meshmend.cli.options import (
    SCRIPT_LAST,
    FailOption,
    HeartbeatTimeoutOption,
    HolderTimeoutOption,
    LinkTimeoutOption,
    MeshOption,
    StragglerTimeoutOption,
    WrapOption,
    check_algorithms,
    mesh_of,
)
from meshmend.cli.train import InjectOption
from meshmend.errors import InputError
from meshmend.variables import TRANSPORT

if TYPE_CHECKING:
    from meshmend.launch.static_job import StaticJob

CONTEXT = SCRIPT_LAST


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
    elastic: ElasticOption = False,
    inject: InjectOption = None,
    run_dir: RunDirOption = None,
    heartbeat_timeout: HeartbeatTimeoutOption = 2.0,
    straggler_timeout: StragglerTimeoutOption = 600.0,
    link_timeout: LinkTimeoutOption = 2.0,
    holder_timeout: HolderTimeoutOption = 60.0,
    explore: ExploreOption = False,
    allow_faults: AllowFaultsOption = False,
) -> int:
    """Run a training script with one worker per live chip, like torchrun for one machine.

    The script calls init_process_group("meshmend") and is otherwise unchanged; its lines are
    printed with the chip they came from. The exit code is that of the first worker that failed.

    With --elastic the script loops over a meshmend.train.Job or JaxJob instead, or keeps its own
    loop over a process group that meshmend.torch.reconfigure mends; chips may die and come back,
    and the exit code is 0 if the others finish. It is 2 if the script is refused before its first
    step.

    **Examples**

    - meshmend run --mesh 4x4 --fail 2x2@0,2 train.py --epochs 3

    - meshmend run --mesh 4x4 --preload transformers train.py

    - meshmend run --mesh 2x2 --algorithm ring-1d -m mypackage.train

    - meshmend run --elastic --mesh 4x4 --inject "kill 2x2@0,2 at 30" examples/train/mended_loop.py

    - meshmend run --elastic --mesh 2x2 --inject "kill 0,1 at 20" examples/torch/elastic_ddp.py
    """
    from meshmend.membership.faults.fault import parse_fault
    from meshmend.units import parse_bandwidth

    begin = mesh_of(mesh, wrap, fail)
    check_algorithms([algorithm], "auto")
    if not elastic and (inject or run_dir is not None):
        raise InputError(
            "--inject and --run-dir need --elastic: without it a lost chip ends the job"
        )
    if not elastic and (explore or allow_faults):
        raise InputError("--explore and --allow-faults need --elastic: the page follows such a job")
    if elastic and slices:
        raise InputError("--slices cannot be used with --elastic, which chooses them by size")
    faults = tuple(parse_fault(text, begin) for text in inject or ())
    page = page_request(explore, allow_faults)
    bandwidth = None if testbed is None else parse_bandwidth(testbed)
    if not is_module and not Path(script).is_file():
        raise InputError(f"meshmend run needs a script, but there is no file {script}")
    if not elastic:
        from meshmend.launch.static_job import check_torch_installed

        check_torch_installed()
    compile_for_workers()
    from meshmend.launch.one_thread import compute_in_one_thread

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    n_threads = compute_in_one_thread()  # before torch is imported, below
    from meshmend.launch.forked_worker import Script
    from meshmend.planning.environment import sums_payloads_in
    from meshmend.planning.settings import TRANSPORTS, Settings

    what = Script(script, tuple(arguments or ()), is_module)
    settings = Settings(
        begin,
        algorithm=algorithm,
        n_slices=slices,
        transport=TRANSPORT.value_in(os.environ) or TRANSPORTS[0],
        sums_payloads=sums_payloads_in(os.environ),
    )
    modules = tuple(preload or ())
    if elastic:
        from meshmend.launch.elastic_script import ElasticScript
        from meshmend.membership.timing import Timing

        run = ElasticScript(
            settings,
            what,
            run_dir=run_dir,
            preload=modules,
            faults=faults,
            timing=Timing(
                heartbeat_timeout_s=heartbeat_timeout,
                straggler_timeout_s=straggler_timeout,
                link_timeout_s=link_timeout,
                holder_timeout_s=holder_timeout,
            ),
            testbed_bytes_per_s=bandwidth,
            n_threads=n_threads,
            page=page,
        )
        return run_elastic_script(run)
    from meshmend.launch.static_job import StaticJob

    return _run_once(StaticJob(settings, what, preload=modules, n_threads=n_threads), bandwidth)


def _run_once(job: "StaticJob", bandwidth: float | None) -> int:
    from meshmend.lab.testbed.bed import Testbed
    from meshmend.launch.static_job import run_job

    if bandwidth is None:
        return run_job(job)
    with Testbed.up(job.settings.mesh, link_bandwidth=bandwidth) as bed:
        networked = {"GLOO_SOCKET_IFNAME": "chip"}
        return run_job(replace(job, enter=bed.enter, address_of=bed.address, environment=networked))
