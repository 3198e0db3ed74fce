"""`meshmend train`: trains a real model on a mesh that loses chips and gets them back."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import compile_for_workers, note, print_json, progress
from meshmend.cli.options import (
    AllowFaultsOption,
    ExploreOption,
    JsonOption,
    job_command,
    local_job,
    page_request,
)
from meshmend.errors import InputError, TerminatedError, check_choice
from meshmend.packages import need
from meshmend.processes import without_garbage

if TYPE_CHECKING:
    from meshmend.config import JobConfig, ShardingConfig, TrainingConfig
    from meshmend.lab.workloads.trainable import Trainable
    from meshmend.membership.events import TimedEvent
    from meshmend.membership.faults.fault import Fault
    from meshmend.topology.mesh import Mesh

_NAMES = {"torch": "PyTorch", "jax": "JAX"}
_FRAMEWORK_NEEDS = {"torch": (("torch",), "train"), "jax": (("jax", "optax"), "jax,train")}


@job_command("train", defaults={"mesh.shape": "4x4"})
def train_command(
    config: "JobConfig",
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="What to train: resnet, bert or gpt.")
    ] = "resnet",
    *,
    explore: ExploreOption = False,
    allow_faults: AllowFaultsOption = False,
    json: JsonOption = False,
) -> int:
    """Train a real model on a mesh of processes; chips die and come back, training goes on.

    Each chip is one process. When chips fail, the others plan a new sum around the hole, repeat
    the step, and go on with the same global batch: no sample is lost or used twice. A board that
    comes back takes its state from its neighbours.

    **Examples**

    - meshmend train --inject "kill 2x2@0,2 at 30" --inject "repair 2x2@0,2 at 60"

    - meshmend train bert --steps 50 --inject "hang 1,1 at 20"

    - meshmend train --shard-optimizer --optimizer adamw --inject "kill 2x2@0,2 at 30"

    - meshmend train gpt --tile 2x2 --inject "kill 1,1 at 30" --inject "repair 1,1 at 60"

    - meshmend train --framework jax --mesh 2x2 --inject "kill 0,1 at 20"

    - meshmend train --testbed 50Mbit --inject "cut link:0,1-0,2 at 20"

    - meshmend train --steps 1000 --explore --allow-faults

    - meshmend train --steps 200 --run-dir runs/one --resume auto

    - meshmend train --config job.toml --set timing.heartbeat_timeout=5
    """
    from meshmend.lab.workloads.model_names import (
        check_framework,
        check_model_names,
        check_optimizer,
        default_norm,
    )
    from meshmend.train.data.samples import POLICIES

    what, has_shards = config.training, config.sharding.optimizer
    norm = what.norm or default_norm(what.framework)
    check_model_names(model, what.size, norm)
    check_framework(what.framework, model, what.size, norm)
    check_optimizer(
        what.framework,
        what.optimizer or None,
        is_sharded=has_shards,
        has_masters=what.master_weights,
    )
    if what.lr is not None and not what.lr > 0:
        raise InputError(f"--lr needs a number above 0, but got {what.lr:g}")
    if what.data and not Path(what.data).is_dir():
        raise InputError(f"--data needs a folder, but {what.data} is none")
    begin, faults = local_job(config)
    check_choice("a batch policy", what.batch_policy, POLICIES)
    if config.job.check_shares:
        from meshmend.train.core.share_checks import check_policy

        check_policy(config.job.check_shares, what.batch_policy)
    _check_moments(faults, what.steps, is_sharded=has_shards)
    if what.tile:
        _check_tile(model, config, begin, faults)
    _check_mirrors(config.sharding, begin)
    checkpoints = _checkpoints(config)
    page = page_request(explore, allow_faults)
    packages, extra = _FRAMEWORK_NEEDS[what.framework]
    need(f"--framework {what.framework}", *packages, extra=extra)
    compile_for_workers()
    from meshmend.launch.worker import compute_in_one_thread

    compute_in_one_thread()  # before torch is imported, below
    from meshmend.launch.termination import TERMINATED, terminable
    from meshmend.launch.training import finished_step, new_run_dir, train
    from meshmend.launch.worker import BAD_INPUT
    from meshmend.pages.report.training_summary import train_summary

    with progress(or_line=True) as bar:
        bar(f"loading {_NAMES[what.framework]} and the data of {model}, which takes seconds")
        workload = _workload(model, what, norm)
    folder = Path(config.job.run_dir or new_run_dir(Path("runs"))).absolute()
    config = config.with_({"job.run_dir": str(folder), "saving.resume": checkpoints})
    if (done := finished_step(workload, config)) is not None:
        if json:
            print_json({"steps": done, "finished": True, "run_dir": str(folder)})
        else:
            print(
                f"finished: {done} of {what.steps} steps; nothing is left to do; ask for more with "
                "--steps"
            )
        return 0
    try:
        with _shown(what.steps, begin) as show, terminable():
            result = train(workload, config, show, page=page)
    except TerminatedError:
        return TERMINATED
    if json:
        print_json(result.summary)
    else:
        print(train_summary(result.run))
        print(f"report   {result.summary['report'] or 'not written'}")
    if result.failure:
        note(f"meshmend: {result.failure}")
    if result.is_refused:
        return BAD_INPUT
    return 1 if result.failure else 0


def _check_tile(model: str, config: "JobConfig", mesh: "Mesh", faults: "tuple[Fault, ...]") -> None:
    """Raise InputError unless a job can have such tiles."""
    from meshmend.membership.faults.fault import Moment
    from meshmend.topology.text import parse_tile
    from meshmend.topology.tiles import box_tiling

    what, tile = config.training, config.training.tile
    box_tiling(mesh, parse_tile(tile))
    if model != "gpt":
        raise InputError(
            f"--tile needs the model gpt, but got {model}; write: meshmend train gpt --tile {tile}"
        )
    refused = {
        f"got --framework {what.framework}": what.framework != "torch",
        "got sharding.mirror_domain": bool(config.sharding.mirror_domain),
        "got --master-weights": what.master_weights,
        f"got --shares {config.job.shares}": config.job.shares != "equal",
        f"got training.batch_policy {what.batch_policy}": what.batch_policy != "constant",
    }
    for why in (why for why, is_so in refused.items() if is_so):
        raise InputError(
            f"--tile needs a gpt of PyTorch that every step trains on the same batch, without "
            f"further options of the state, but {why}; leave it out"
        )
    if what.batch < mesh.n_live:
        raise InputError(
            f"--tile needs a sample for each chip, but got --batch {what.batch} for {mesh.n_live}"
        )
    known = (None, Moment.FORWARD, Moment.UPDATE, Moment.RECOVERY)
    for fault in faults:
        if fault.moment not in known:
            raise InputError(f"--inject cannot hit 'in {fault.moment}' in a job with tiles")


def _check_moments(faults: "tuple[Fault, ...]", n_steps: int, *, is_sharded: bool) -> None:
    """Raise InputError if a fault waits for a step, or a part of one, that this job does not have.

    What comes after the last step finds a job that is over.
    """
    from meshmend.membership.faults.fault import Moment, Part

    for fault in faults:
        if fault.at_step is not None and fault.at_step >= n_steps:
            raise InputError(
                f"--inject {fault.words!r} needs more than {fault.at_step} steps, but the job has "
                f"{n_steps}; take an earlier step, or more with --steps"
            )
        if fault.part is Part.STATE and is_sharded:
            raise InputError(
                f"--inject {fault.words!r} needs the optimizer's state on each chip, but with "
                "--shard-optimizer no chip has all of it; flip weights instead"
            )
        if fault.moment in (Moment.GATHER, Moment.REFILL) and not is_sharded:
            raise InputError(
                f"--inject cannot hit 'in {fault.moment}' in this job; only jobs with "
                "--shard-optimizer have that part"
            )


def _check_mirrors(sharding: "ShardingConfig", mesh: "Mesh") -> None:
    """Raise InputError if the domains of mirrors are unknown, or no mirrors can be placed so."""
    from meshmend.topology.failures import board_shape
    from meshmend.train.sharding.update_shares import DEFAULT_DOMAINS, check_domains

    if sharding.mirror_domain and not sharding.optimizer:
        raise InputError(
            "sharding.mirror_domain needs --shard-optimizer: other jobs have no mirrors"
        )
    domains = sharding.mirror_domain or DEFAULT_DOMAINS
    check_domains(domains, mesh, board_shape(len(mesh.shape)))


@without_garbage()
def _workload(model: str, what: "TrainingConfig", norm: str) -> "Trainable":
    data = Path(what.data) if what.data else None
    if what.framework == "jax":
        from meshmend.lab.workloads.jax_models import jax_workload

        return jax_workload(model, data=data, seed=what.seed)
    from meshmend.lab.workloads.registry import workload

    return workload(
        model,
        what.size,
        data=data,
        norm=norm,
        seed=what.seed,
        optimizer=what.optimizer or None,
        in_bfloat16=what.master_weights,
    )


def _checkpoints(config: "JobConfig") -> str:
    """Return `saving.resume`, with the folder of checkpoints if it names the run that has them.

    Raises:
        InputError: there is no complete checkpoint, or "auto" could never find one.
    """
    resume = config.saving.resume
    if not resume:
        return ""
    if resume == "auto":
        if not config.job.run_dir:
            raise InputError(
                "--resume auto needs the folder to start in or to go on in; name it with --run-dir"
            )
        if not config.saving.every:
            raise InputError("--resume auto needs checkpoints; set --save-every above 0")
        return "auto"
    run = Path(resume)
    from meshmend.train.state.checkpoint import complete_steps

    if not run.is_dir():
        raise InputError(f"--resume needs a run with a complete checkpoint, but {run} is no folder")
    inside = (run / "checkpoints").absolute()
    folder = inside if inside.is_dir() else run.absolute()
    if not complete_steps(folder):
        raise InputError(f"--resume needs a run with a complete checkpoint, but {folder} has none")
    return str(folder)


@contextmanager
def _shown(steps: int, mesh: "Mesh") -> Iterator[Callable[["TimedEvent"], None]]:
    """Yield a function that shows an event: in a live picture on a terminal, else as a line."""
    from meshmend.cli.training_display import TrainingDisplay, plain_line

    if sys.stderr.isatty():
        with TrainingDisplay(mesh, steps) as display:
            yield display.feed
        return

    def show(timed: "TimedEvent") -> None:
        if line := plain_line(timed, steps):
            note(line)

    yield show
