"""`meshmend run`: runs a training script on every live chip of a mesh, on this machine."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshmend.cli.console import compile_for_workers
from meshmend.cli.elastic import ElasticOption, run_elastic_script
from meshmend.cli.live_page import AllowFaultsOption, ExploreOption, page_request
from meshmend.cli.options import (
    SCRIPT_LAST,
    ModuleOption,
    ScriptArgument,
    ScriptArguments,
    check_algorithms,
)
from meshmend.cli.settings import job_command
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.config import JobConfig
    from meshmend.launch.static_job import StaticJob

CONTEXT = SCRIPT_LAST


@job_command("run", needs=("mesh.shape",))
def run_command(
    config: "JobConfig",
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    is_module: ModuleOption = False,
    elastic: ElasticOption = False,
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
    from meshmend.launch.hosts import board_from
    from meshmend.membership.faults.fault import parse_fault
    from meshmend.topology.text import configured_mesh
    from meshmend.units import parse_bandwidth

    begin = configured_mesh(config.mesh)
    local = config.local
    check_algorithms([config.sums.algorithm], "auto")
    if not elastic and (local.inject or config.job.run_dir):
        raise InputError(
            "--inject and --run-dir need --elastic: without it a lost chip ends the job"
        )
    if not elastic and (explore or allow_faults):
        raise InputError("--explore and --allow-faults need --elastic: the page follows such a job")
    if elastic and config.sums.slices:
        raise InputError("sums.slices cannot be set with --elastic, which chooses them by size")
    faults = tuple(parse_fault(text, begin) for text in local.inject)
    board = board_from(config.mesh.board, begin)
    page = page_request(explore, allow_faults)
    bandwidth = parse_bandwidth(local.testbed) if local.testbed else None
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
    from meshmend.planning.settings import settings_of

    what = Script(script, tuple(arguments or ()), is_module)
    settings = settings_of(config.sums, begin)
    if elastic:
        from meshmend.launch.elastic_script import ElasticScript

        run = ElasticScript(
            settings,
            what,
            run_dir=Path(config.job.run_dir) if config.job.run_dir else None,
            preload=local.preload,
            faults=faults,
            timing=config.timing,
            board=board,
            checks=config.job.check_every_step,
            testbed_bytes_per_s=bandwidth,
            n_threads=n_threads,
            page=page,
        )
        return run_elastic_script(run)
    from meshmend.launch.static_job import StaticJob

    return _run_once(
        StaticJob(settings, what, preload=local.preload, n_threads=n_threads), bandwidth
    )


def _run_once(job: "StaticJob", bandwidth: float | None) -> int:
    from meshmend.lab.testbed.bed import Testbed
    from meshmend.launch.static_job import run_job

    if bandwidth is None:
        return run_job(job)
    with Testbed.up(job.settings.mesh, link_bandwidth=bandwidth) as bed:
        networked = {"GLOO_SOCKET_IFNAME": "chip"}
        return run_job(replace(job, enter=bed.enter, address_of=bed.address, environment=networked))
