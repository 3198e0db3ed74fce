"""Trains on a Ray cluster: one actor per host, the coordinator as a detached actor.

    from meshmend.launch.ray import train

    train("4x4", "train.py", ["--lr", "0.1"], hosts="2x2")

The workers of a host are processes of its actor. They notice the death of others by their own
connections, not by Ray's health check. Needs the extra `ray`.
"""

import re
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from meshmend.errors import InputError, JobFailedError

try:
    import ray
except ModuleNotFoundError:
    raise InputError(
        "meshmend.launch.ray needs Ray, but it is not installed; run: pip install 'meshmend[ray]'"
    ) from None

from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from meshmend.config import JobConfig, RunConfig, SumConfig, Timing, command_words
from meshmend.launch.host_blocks import host_blocks, live_chips_of
from meshmend.launch.hosts import board_from
from meshmend.launch.ray_coordinator import RayCoordinator, RayStatus
from meshmend.launch.ray_host import NAMESPACE, HostSettings
from meshmend.launch.ray_nodes import head_node
from meshmend.membership.job import JobSpec
from meshmend.planning.plan import AUTO
from meshmend.topology.failures import parse_shape
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_config, parse_mesh

Loop = str | Path | Callable[[], object]

_POLL_S: Final = 0.2
_JOIN_TIMEOUT_S: Final = 60.0  # Ray restarts a coordinator within a few seconds
_ONE_CPU: Final = {"CPU": 1.0}


@dataclass(frozen=True)
class RayJob:
    """A job for a Ray cluster: `loop`, a script or a function, runs on every live chip of a mesh.

    - `hosts` is the block of chips of one host, such as (4, 2); without it one host has all chips.
      Every host gets a node of its own, unless `is_strict` is False.
    - `resources` are those of one chip. Ray finds nodes that have them for all chips of a host.
    - `run_dir` keeps the ledgers and plans; all nodes must see it.
    - `port` is the coordinator's, on the head node; 0 takes any free one.

    Raises:
        InputError: the hosts do not tile the mesh, the script does not exist, or the name or the
            resources cannot be used.
    """

    mesh: Mesh
    loop: Loop
    arguments: tuple[str, ...] = ()
    hosts: tuple[int, ...] | None = None
    name: str = "job"
    run_dir: Path | None = None
    board: tuple[int, ...] | None = None
    algorithm: str = AUTO
    timing: Timing = field(default_factory=Timing)
    resources: Mapping[str, float] = field(default_factory=lambda: dict(_ONE_CPU))
    is_strict: bool = True
    port: int = 0

    def __post_init__(self) -> None:
        host_blocks(self.mesh, self.hosts or self.mesh.shape)
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise InputError(
                f"a job needs a name of letters, digits, '-', '_' and '.', but got {self.name!r}"
            )
        if not self.resources or min(self.resources.values()) <= 0:
            raise InputError(
                "a job needs resources of a chip such as {'CPU': 1}, each above 0, but got "
                f"{dict(self.resources)}"
            )
        if callable(self.loop) and self.arguments:
            raise InputError(
                "a function gets no arguments, but there are some; use functools.partial"
            )
        if not callable(self.loop) and not Path(self.loop).is_file():
            raise InputError(f"a job needs a script, but there is no file {self.loop}")


@dataclass(frozen=True)
class RayRun:
    """A job that runs on a Ray cluster, also if this process ends; `attach` finds it again."""

    name: str
    actor: Any = field(repr=False)

    def status(self) -> RayStatus:
        """Return how far the job is; waits while Ray restarts a coordinator that died."""
        status: RayStatus = ray.get(self.actor.status.remote())
        return status

    def wait(self) -> None:
        """Wait until the job has finished.

        Raises:
            JobFailedError: it failed, or was cancelled.
        """
        try:
            while (outcome := self.status().outcome) is None:
                time.sleep(_POLL_S)
            ray.get(self.actor.forget.remote())
            ray.kill(self.actor, no_restart=True)
        except RayActorError:
            outcome = "its coordinator is gone: the head node died, or another process waited too"
        if outcome:
            raise JobFailedError(f"job {self.name!r} did not finish: {outcome}")

    def cancel(self) -> None:
        """End the job and all its processes."""
        ray.get(self.actor.cancel.remote())
        try:
            self.wait()
        except JobFailedError:
            return


def train(
    mesh: Mesh | str,
    loop: Loop,
    arguments: Sequence[str] = (),
    *,
    hosts: tuple[int, ...] | str | None = None,
    **options: Any,
) -> None:
    """Train on a Ray cluster until the job has finished; `options` are further fields of RayJob.

    Ctrl-C, and any other exception in this process, cancels the job.

    Raises:
        InputError: the job cannot be started as described.
        JobFailedError: it failed, or was cancelled.
    """
    run = submit(
        RayJob(
            parse_mesh(mesh) if isinstance(mesh, str) else mesh,
            loop,
            tuple(arguments),
            hosts=_shape(hosts) if isinstance(hosts, str) else hosts,
            **options,
        )
    )
    try:
        run.wait()
    except JobFailedError:
        raise
    except BaseException:
        run.cancel()
        raise


def submit(job: RayJob) -> RayRun:
    """Start a job on the Ray cluster of this process and return at once.

    Raises:
        InputError: a job of this name runs already.
    """
    if not ray.is_initialized():
        ray.init()
    secret = secrets.token_hex(32)
    blocks = tuple(
        block
        for block in host_blocks(job.mesh, job.hosts or job.mesh.shape)
        if live_chips_of(block, job.mesh)
    )
    n_chips = max(len(live_chips_of(block, job.mesh)) for block in blocks)
    settings = HostSettings(
        name=job.name,
        blocks=blocks,
        options=_agent_options(job),
        script=() if callable(job.loop) else (_script_path(job.loop), *job.arguments),
        resources={kind: amount * n_chips for kind, amount in job.resources.items()},
        secret=secret,
        loop=ray.cloudpickle.dumps(job.loop) if callable(job.loop) else b"",
        is_strict=job.is_strict,
    )
    spec = JobSpec(job.name, job.mesh, job.board or board_from(None, job.mesh), job.timing)
    folder = Path(tempfile.gettempdir()) / f"meshmend-ray-{job.name}-{secrets.token_hex(8)}"
    try:
        actor = (
            ray.remote(RayCoordinator)
            .options(
                name=job.name,
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                max_task_retries=-1,
                num_cpus=0,
                # Workers know one address, so a new coordinator must be on the same node.
                scheduling_strategy=NodeAffinitySchedulingStrategy(head_node(), soft=False),
            )
            .remote(spec, settings, str(folder), job.port)
        )
    except ValueError:
        raise InputError(
            f"a job of the name {job.name!r} is on this Ray cluster already; wait for it with "
            f"attach({job.name!r}).wait(), cancel it, or use another name"
        ) from None
    return RayRun(job.name, actor)


def attach(name: str) -> RayRun:
    """Return a job that this or another process started.

    Raises:
        InputError: there is none of this name.
    """
    try:
        return RayRun(name, ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:
        raise InputError(f"no job of the name {name!r} is on this Ray cluster") from None


def _agent_options(job: RayJob) -> tuple[str, ...]:
    """Return the options of `meshmend agent` that all hosts have in common."""
    config = JobConfig(
        mesh=mesh_config(job.mesh, job.board),
        job=RunConfig(name=job.name, run_dir=str(job.run_dir.absolute()) if job.run_dir else ""),
        sums=SumConfig(algorithm=job.algorithm),
        timing=msgspec.structs.replace(job.timing, join_timeout_s=_JOIN_TIMEOUT_S),
    )
    return tuple(command_words("agent", config))


def _script_path(script: str | Path) -> str:
    """Return the script as its workers find it: in Ray's working directory, or by its full path."""
    has_folder = "working_dir" in ray.get_runtime_context().runtime_env
    return str(script if has_folder else Path(script).absolute())


def _shape(text: str) -> tuple[int, ...]:
    try:
        return parse_shape(text)
    except ValueError:
        raise InputError(f"hosts need a block of chips such as 2x2, but got {text!r}") from None
