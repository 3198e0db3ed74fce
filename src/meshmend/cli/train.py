"""`meshmend train`: trains a real model on a mesh that loses chips and gets them back."""

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import compile_for_workers, note, print_json, progress
from meshmend.cli.live_page import AllowFaultsOption, ExploreOption, page_request
from meshmend.cli.options import (
    FailOption,
    HeartbeatTimeoutOption,
    HolderTimeoutOption,
    JsonOption,
    LinkTimeoutOption,
    MeshOption,
    MirrorDomainOption,
    StragglerTimeoutOption,
    WrapOption,
    check_algorithms,
    mesh_of,
)
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.lab.workloads.trainable import Trainable
    from meshmend.launch.training import Training
    from meshmend.membership.events import TimedEvent
    from meshmend.membership.faults.fault import Fault
    from meshmend.topology.mesh import Mesh

InjectOption = Annotated[
    list[str] | None,
    typer.Option(
        "--inject",
        metavar="FAULT",
        help='A fault to inject; repeat for more: "kill 2x2@0,2 at 20" (a step), '
        '"hang 1,1 at 3.5s", "slow 1,1 at 30 for 5s", "cut link:0,1-0,2 at 30", '
        '"repair 2x2@0,2 at 60", "kill coordinator at 40", "freeze coordinator at 20 for 5s".',
    ),
]


ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="What to train: resnet or bert.")
]
FrameworkOption = Annotated[
    str, typer.Option("--framework", metavar="NAME", help="What to train with: torch or jax.")
]
SizeOption = Annotated[
    str, typer.Option("--size", metavar="SIZE", help="tiny, or full: ResNet-50, BERT-large.")
]
NormOption = Annotated[
    str | None,
    typer.Option(
        "--norm",
        metavar="KIND",
        help="The normalisation of ResNet: batch, or group (with SiLU for ReLU); else batch, and "
        "group in JAX.",
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FOLDER",
        help="Images in one folder per class, or text files; else data from Python packages.",
    ),
]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="How many steps to train.")]
BatchOption = Annotated[
    int, typer.Option("--batch", min=1, help="Samples of a step, over all chips.")
]
BatchPolicyOption = Annotated[
    str,
    typer.Option(
        "--batch-policy",
        metavar="POLICY",
        help="constant: always the same batch; shrink: a smaller batch while chips are missing.",
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option("--lr", metavar="RATE", help="The learning rate; else one that suits the model."),
]
OptimizerOption = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help="sgd, adam, adamw, adagrad, rmsprop, lars or lamb; else one that suits the model.",
    ),
]
ShardOptimizerOption = Annotated[
    bool,
    typer.Option(
        "--shard-optimizer",
        help="Keep the optimizer's state of each share of the parameters on two chips only.",
    ),
]
MasterWeightsOption = Annotated[
    bool,
    typer.Option(
        "--master-weights",
        help="Give the model weights in bfloat16; the optimizer steps on float32 copies of them.",
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", help="The seed of the model and of the order of samples.")
]
AlgorithmOption = Annotated[
    str, typer.Option("--algorithm", metavar="NAME", help="How to sum; auto by default.")
]
TestbedOption = Annotated[
    str | None,
    typer.Option(
        "--testbed",
        metavar="BANDWIDTH",
        help="Put each worker into its chip's network, with links of e.g. 50Mbit.",
    ),
]
RunDirOption = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", metavar="FOLDER", help="The folder of this run; else a new one in runs/."
    ),
]
SaveEveryOption = Annotated[
    int, typer.Option("--save-every", min=0, help="Steps between checkpoints; 0: none.")
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="FOLDER|auto",
        help="Go on from an earlier run's checkpoint; auto: from that in --run-dir, if it has one.",
    ),
]
CheckEveryStepOption = Annotated[
    bool,
    typer.Option("--check-every-step", help="Compare all replicas bit for bit, every step."),
]


_NAMES = {"torch": "PyTorch", "jax": "JAX"}


def train_command(
    model: ModelArgument = "resnet",
    *,
    mesh: MeshOption = "4x4",
    wrap: WrapOption = "none",
    fail: FailOption = None,
    framework: FrameworkOption = "torch",
    size: SizeOption = "tiny",
    norm: NormOption = None,
    data: DataOption = None,
    steps: StepsOption = 100,
    batch: BatchOption = 64,
    batch_policy: BatchPolicyOption = "constant",
    lr: RateOption = None,
    optimizer: OptimizerOption = None,
    shard_optimizer: ShardOptimizerOption = False,
    mirror_domain: MirrorDomainOption = None,
    master_weights: MasterWeightsOption = False,
    seed: SeedOption = 0,
    inject: InjectOption = None,
    algorithm: AlgorithmOption = "auto",
    testbed: TestbedOption = None,
    run_dir: RunDirOption = None,
    save_every: SaveEveryOption = 50,
    resume: ResumeOption = None,
    heartbeat_timeout: HeartbeatTimeoutOption = 2.0,
    straggler_timeout: StragglerTimeoutOption = 600.0,
    link_timeout: LinkTimeoutOption = 2.0,
    holder_timeout: HolderTimeoutOption = 60.0,
    check_every_step: CheckEveryStepOption = False,
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

    - meshmend train --shard-optimizer --mirror-domain board --mirror-domain row

    - meshmend train --framework jax --mesh 2x2 --inject "kill 0,1 at 20"

    - meshmend train --testbed 50Mbit --inject "cut link:0,1-0,2 at 20"

    - meshmend train --steps 1000 --explore --allow-faults

    - meshmend train --steps 200 --resume runs/train-20261115-120000

    - meshmend train --steps 200 --run-dir runs/one --resume auto
    """
    from meshmend.lab.workloads.model_names import (
        check_framework,
        check_model_names,
        check_optimizer,
        default_norm,
    )
    from meshmend.membership.faults.fault import parse_fault
    from meshmend.train.data.samples import batch_of
    from meshmend.units import parse_bandwidth

    norm = norm or default_norm(framework)
    check_model_names(model, size, norm)
    check_framework(framework, size, norm)
    check_optimizer(framework, optimizer, is_sharded=shard_optimizer, has_masters=master_weights)
    if lr is not None and not 0 < lr < math.inf:
        raise InputError(f"--lr needs a number above 0, but got {lr}")
    begin = mesh_of(mesh, wrap, fail)
    batch_of(batch_policy, batch, 1, 1)  # refuses an unknown policy
    check_algorithms([algorithm], "auto")
    faults = tuple(parse_fault(text, begin) for text in inject or ())
    _check_moments(faults, is_sharded=shard_optimizer)
    domains = _mirror_domains(mirror_domain, begin, is_sharded=shard_optimizer)
    bandwidth = parse_bandwidth(testbed) if testbed else None
    checkpoints = _checkpoints(resume, run_dir, save_every)
    page = page_request(explore, allow_faults)
    _check_installed(framework)
    compile_for_workers()
    from meshmend.launch.one_thread import compute_in_one_thread

    compute_in_one_thread()  # before torch is imported, below
    from meshmend.launch.forked_worker import BAD_INPUT
    from meshmend.launch.training import Training, finished_step, new_run_dir, train
    from meshmend.membership.timing import Timing
    from meshmend.pages.report.training_summary import train_summary
    from meshmend.planning.environment import sums_payloads_in
    from meshmend.planning.settings import Settings

    with progress(or_line=True) as bar:
        bar(f"loading {_NAMES[framework]} and the data of {model}, which takes seconds")
        workload = (
            _jax_workload(model, data, seed)
            if framework == "jax"
            else _torch_workload(model, size, data, norm, seed, optimizer, master_weights)
        )
    training = Training(
        workload=workload,
        settings=Settings(begin, algorithm=algorithm, sums_payloads=sums_payloads_in(os.environ)),
        run_dir=(run_dir or new_run_dir(Path("runs"))).absolute(),
        size=size,
        steps=steps,
        batch=batch,
        rate=lr,
        seed=seed,
        policy=batch_policy,
        faults=faults,
        save_every=save_every,
        resume=checkpoints,
        testbed_bytes_per_s=bandwidth,
        checks=check_every_step,
        page=page,
        shard_optimizer=shard_optimizer,
        mirror_domains=domains,
        master_weights=master_weights,
        timing=Timing(
            heartbeat_timeout_s=heartbeat_timeout,
            straggler_timeout_s=straggler_timeout,
            link_timeout_s=link_timeout,
            holder_timeout_s=holder_timeout,
        ),
    )
    if (done := finished_step(training)) is not None:
        words = f"finished: {done} of {steps} steps"
        if json:
            print_json({"steps": done, "finished": True, "run_dir": str(training.run_dir)})
        else:
            print(f"{words}; nothing is left to do; ask for more with --steps")
        return 0
    with _shown(training, begin) as show:
        result = train(training, show)
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


def _check_installed(framework: str) -> None:
    """Raise InputError if the framework is not installed."""
    from importlib.util import find_spec

    needs = {"torch": ("torch",), "jax": ("jax", "optax")}[framework]
    extra = {"torch": "train", "jax": "jax,train"}[framework]
    for name in needs:
        if find_spec(name) is None:
            raise InputError(
                f"--framework {framework} needs {name}, but it is not installed; install it with "
                f"pip install 'meshmend[{extra}]'"
            )


def _check_moments(faults: "tuple[Fault, ...]", *, is_sharded: bool) -> None:
    """Raise InputError if a fault waits for a part of a step that this job does not have."""
    from meshmend.membership.faults.fault import Moment

    for fault in faults:
        if fault.moment in (Moment.GATHER, Moment.REFILL) and not is_sharded:
            raise InputError(
                f"--inject cannot hit 'in {fault.moment}' in this job; only jobs with "
                "--shard-optimizer have that part"
            )


def _mirror_domains(names: list[str] | None, mesh: "Mesh", *, is_sharded: bool) -> tuple[str, ...]:
    """Return the domains that keep owners and mirrors apart.

    Raises:
        InputError: they are unknown, or no mirrors can be placed so.
    """
    from meshmend.topology.failures import board_shape
    from meshmend.train.sharding.update_shares import DEFAULT_DOMAINS, check_domains

    if names and not is_sharded:
        raise InputError("--mirror-domain needs --shard-optimizer: other jobs have no mirrors")
    domains = tuple(names or DEFAULT_DOMAINS)
    check_domains(domains, mesh, board_shape(len(mesh.shape)))
    return domains


def _torch_workload(
    model: str,
    size: str,
    data: Path | None,
    norm: str,
    seed: int,
    optimizer: str | None,
    in_bfloat16: bool,
) -> "Trainable":
    from meshmend.lab.workloads.registry import workload

    return workload(
        model,
        size,
        data=data,
        norm=norm,
        seed=seed,
        optimizer=optimizer,
        in_bfloat16=in_bfloat16,
    )


def _jax_workload(model: str, data: Path | None, seed: int) -> "Trainable":
    from meshmend.lab.workloads.jax_registry import jax_workload

    return jax_workload(model, data=data, seed=seed)


def _checkpoints(run: Path | None, run_dir: Path | None, save_every: int) -> Path | str | None:
    """Return the folder of checkpoints, given that folder or the run that contains it, or "auto".

    Raises:
        InputError: there is no complete checkpoint, or "auto" could never find one.
    """
    if run is None:
        return None
    if str(run) == "auto":
        if run_dir is None:
            raise InputError(
                "--resume auto needs the folder to start in or to go on in; name it with --run-dir"
            )
        if not save_every:
            raise InputError("--resume auto needs checkpoints; set --save-every above 0")
        return "auto"
    from meshmend.train.state.checkpoint import complete_steps

    if not run.is_dir():
        raise InputError(f"--resume needs a run with a complete checkpoint, but {run} is no folder")
    inside = (run / "checkpoints").absolute()
    folder = inside if inside.is_dir() else run.absolute()
    if not complete_steps(folder):
        raise InputError(f"--resume needs a run with a complete checkpoint, but {folder} has none")
    return folder


@contextmanager
def _shown(training: "Training", mesh: "Mesh") -> Iterator[Callable[["TimedEvent"], None]]:
    """Yield a function that shows an event: in a live picture on a terminal, else as a line."""
    from meshmend.cli.training_display import TrainingDisplay, plain_line

    if sys.stderr.isatty():
        with TrainingDisplay(mesh, training.steps) as display:
            yield display.feed
        return

    def show(timed: "TimedEvent") -> None:
        if line := plain_line(timed, training.steps):
            note(line)

    yield show
