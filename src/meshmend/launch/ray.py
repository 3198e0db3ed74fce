"""Trains on a Ray cluster: one actor per host, the coordinator as a detached actor.

    from meshmend.launch.ray import train

    train("4x4", "train.py", ["--lr", "0.1"], hosts="2x2")

The workers of a host are processes of its actor. They notice the death of others by their own
connections, not by Ray's health check. Needs the extra `ray`.

One thread of the coordinator's actor serves the job, another one keeps every host on a live node
(`ray_hosts`). If the actor's process dies, Ray starts it again: it listens on the same address,
reads from the disk of the head node what it must know, and finds the hosts, which have gone on
without it.
"""

import json
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from socket import socket
from typing import Any, Final

from msgspec.structs import replace

from meshmend.errors import InputError, JobFailedError, MeshmendError
from meshmend.packages import need

need("meshmend.launch.ray", "ray", extra="ray")

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from meshmend.config import JobConfig, command_words, job_config
from meshmend.files import write_whole
from meshmend.launch.hosts import (
    board_from,
    host_shape_from,
    live_chips_of,
    live_host_blocks,
    with_whole_paths,
)
from meshmend.launch.journal import Journal
from meshmend.launch.ray_hosts import (
    NAMESPACE,
    HostPlacement,
    HostSettings,
    HostSupervisor,
    end_hosts,
    head_node,
)
from meshmend.launch.ray_processes import start_watchdog
from meshmend.launch.supervisor import say
from meshmend.membership import events
from meshmend.membership.coordinator_server import CoordinatorServer
from meshmend.membership.job import JobSpec
from meshmend.pages.report.event_words import TROUBLE, event_words
from meshmend.topology.failures import Block, Chip
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import configured_mesh, mesh_words
from meshmend.transport.codec import Value, plain, value_of
from meshmend.transport.listener import Port, listening

Loop = str | Path | Callable[[], object]

_POLL_S: Final = 0.2
_JOIN_TIMEOUT_S: Final = 60.0  # Ray restarts a coordinator within a few seconds
_ONE_CPU: Final = {"CPU": 1.0}
_TICK_S: Final = 0.1
_RAY_PAUSE_S: Final = 5.0
_LISTEN_S: Final = 30.0  # the kernel frees the port of a dead coordinator well within this time
_SHOWN: Final = (events.GenerationForming, *TROUBLE)


@dataclass(frozen=True)
class RayJob:
    """A job for a Ray cluster: `loop`, a script or a function, runs on every live chip of a mesh.

    - `config` has the settings that every launcher knows (`docs/settings.md`). Without
      `hosts.block` one host has all chips; `job.run_dir` must be a folder that all nodes see.
    - `resources` are those of one chip. Ray finds nodes that have them for all chips of a host.
    - Every host gets a node of its own, unless `is_strict` is False.
    - `port` is the coordinator's, on the head node; 0 takes any free one.

    Raises:
        InputError: the hosts do not tile the mesh, the script does not exist, or the name or the
            resources cannot be used.
    """

    config: JobConfig
    loop: Loop
    arguments: tuple[str, ...] = ()
    resources: Mapping[str, float] = field(default_factory=lambda: dict(_ONE_CPU))
    is_strict: bool = True
    port: int = 0

    def __post_init__(self) -> None:
        _ = self.blocks, self.board  # refuses what does not fit the mesh
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

    @classmethod
    def on(
        cls,
        mesh: Mesh | str,
        loop: Loop,
        arguments: Sequence[str] = (),
        *,
        hosts: str = "",
        settings: Mapping[str, object] | None = None,
        file: Path | str | None = None,
        **options: Any,
    ) -> "RayJob":
        """Return a job on a mesh, such as `4x4`, with hosts of a block such as `2x2`.

        What else is to be set is in `settings`, such as `{"job.check_shares": 100}`, in a TOML
        `file`, or in this process's variables; the first of them that has it counts. `options` are
        further fields of RayJob.

        Raises:
            InputError: a setting cannot be used, or the job cannot be as described.
        """
        config = job_config(
            {**_mesh_settings(mesh), "hosts.block": hosts or None, **(settings or {})},
            file=Path(file) if file is not None else None,
            environment=os.environ,
            defaults={"timing.join_timeout": _JOIN_TIMEOUT_S},
            command="ray",
        )
        return cls(config, loop, tuple(arguments), **options)

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.config.job.name

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the job."""
        return configured_mesh(self.config.mesh)

    @cached_property
    def board(self) -> tuple[int, ...]:
        """The chips that fail and come back together."""
        return board_from(self.config.mesh.board, self.mesh)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the hosts that have a live chip."""
        block = self.config.hosts.block
        hosts = host_shape_from(block, self.mesh) if block else self.mesh.shape
        return live_host_blocks(self.mesh, hosts)

    def agent_options(self) -> tuple[str, ...]:
        """Return the options of `meshmend agent` that all hosts have in common."""
        config = with_whole_paths(self.config).with_({"hosts.block": ""})
        return tuple(command_words("agent", config))


def _mesh_settings(mesh: Mesh | str) -> dict[str, object]:
    if isinstance(mesh, str):
        return {"mesh.shape": mesh}
    return {f"mesh.{name}": value for name, value in mesh_words(mesh).items()}


@dataclass(frozen=True)
class RayStatus:
    """How far a job is; `outcome` is None while it runs, empty if it finished, else its failure."""

    coordinator: str
    step: int
    generation: int
    n_connected: int
    nodes: tuple[str | None, ...]
    outcome: str | None


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


def train(mesh: Mesh | str, loop: Loop, arguments: Sequence[str] = (), **options: Any) -> None:
    """Train on a Ray cluster until the job has finished; `options` are those of `RayJob.on`.

    Ctrl-C, and any other exception in this process, cancels the job.

    Raises:
        InputError: the job cannot be started as described.
        JobFailedError: it failed, or was cancelled.
    """
    run = submit(RayJob.on(mesh, loop, arguments, **options))
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
    n_chips = max(len(live_chips_of(block, job.mesh)) for block in job.blocks)
    settings = HostSettings(
        name=job.name,
        blocks=job.blocks,
        options=job.agent_options(),
        script=() if callable(job.loop) else (_script_path(job.loop), *job.arguments),
        resources={kind: amount * n_chips for kind, amount in job.resources.items()},
        secret=secret,
        loop=ray.cloudpickle.dumps(job.loop) if callable(job.loop) else b"",
        is_strict=job.is_strict,
    )
    spec = JobSpec(job.name, job.mesh, job.board, job.config.timing)
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
            .remote(spec, settings, str(folder), job.port, with_whole_paths(job.config).job.run_dir)
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


def _script_path(script: str | Path) -> str:
    """Return the script as its workers find it: in Ray's working directory, or by its full path."""
    has_folder = "working_dir" in ray.get_runtime_context().runtime_env
    return str(script if has_folder else Path(script).absolute())


class RayRecord(Value, frozen=True, tag_field="kind", tag="ray"):
    """What the next coordinator must know if this one dies, beside the state of the job.

    `outcome` is None while the job runs, empty when it has finished, else why it failed.
    """

    port: Port
    outcome: str | None = None
    placements: tuple[HostPlacement | None, ...] = ()


class RayCoordinator:
    """The actor; all its methods return at once."""

    def __init__(
        self, spec: JobSpec, settings: HostSettings, folder: str, port: int, run_dir: str
    ) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._settings = settings
        self._folder = Path(folder)
        self._address = ray.util.get_node_ip_address()
        self._record = self._load_record() or RayRecord(port)
        self._connected: frozenset[Chip] = frozenset()
        self._step = self._highest = self._generation = 0
        self._server: CoordinatorServer | None = None
        self._journal: Journal | None = None
        self._refusal = ""
        self._cancelled = threading.Event()
        self._is_over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def status(self) -> RayStatus:
        """Return how far the job is."""
        record = self._record
        return RayStatus(
            coordinator=f"{self._address}:{record.port}",
            step=self._step,
            generation=self._generation,
            n_connected=len(self._connected),
            nodes=tuple(each.node if each else None for each in record.placements),
            outcome=record.outcome if self._is_over.is_set() else None,
        )

    def cancel(self) -> None:
        """End the job soon, as failed."""
        self._cancelled.set()
        if self._server is not None:
            self._server.stop()

    def forget(self) -> None:
        """Delete what this job keeps on disk; call it when the outcome is known."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        if self._record.outcome is None:
            try:
                outcome = self._serve(self._listen())
            except MeshmendError as error:
                outcome = str(error)
            except Exception as error:  # this thread is the job: its failure is the job's
                outcome = repr(error)
            # Before the hosts end: a coordinator that is restarted in between must not begin again.
            self._save(replace(self._record, outcome=outcome))
        end_hosts(self._record.placements)
        self._is_over.set()

    def _listen(self) -> socket:
        """Return the listening socket: of the port that an earlier coordinator of the job had."""
        is_first = not self._file.exists()
        deadline = time.monotonic() + _LISTEN_S
        while True:
            try:
                listener = listening(self._address, self._record.port)
            except InputError:
                if is_first or time.monotonic() > deadline or self._cancelled.is_set():
                    raise
                time.sleep(_TICK_S)
            else:
                self._save(replace(self._record, port=listener.getsockname()[1]))
                return listener

    def _serve(self, listener: socket) -> str:
        """Serve until the job is over; return why it failed, or an empty text."""
        mesh, settings = self._spec.mesh, self._settings
        supervisor = HostSupervisor(
            settings,
            f"{self._address}:{self._record.port}",
            [frozenset(live_chips_of(block, mesh)) for block in settings.blocks],
            placements=self._record.placements,
            save=lambda placements: self._save(replace(self._record, placements=placements)),
        )
        if self._run_dir:
            self._journal = Journal(Path(self._run_dir), self._spec)
        server = CoordinatorServer(
            listener,
            settings.secret.encode(),
            self._spec,
            record_file=self._folder / "coordinator.json",
            on_event=self._take,
        )
        self._server = server
        serving = threading.Thread(target=server.serve, daemon=True)
        serving.start()
        watchdog = start_watchdog((self._address, self._record.port), settings.secret)
        try:
            while serving.is_alive() and not (self._cancelled.is_set() or supervisor.is_over):
                self._tick(supervisor)
                serving.join(_TICK_S)
        finally:
            watchdog.kill()
            watchdog.wait()
            server.stop()
            serving.join()
            if self._journal is not None:
                self._journal.end(is_over=server.is_over)
            server.close()
            supervisor.close()
        while not (server.failure or self._cancelled.is_set() or supervisor.is_over):
            supervisor.watch_end()  # a script may go on after its loop, to save its model say
            time.sleep(_TICK_S)
        return self._outcome(server.failure, supervisor.failure)

    def _tick(self, supervisor: HostSupervisor) -> None:
        """Keep the hosts on live nodes; if Ray does not answer, training goes on without."""
        try:
            supervisor.tick(self._connected, self._highest)
        except Exception as error:  # of Ray's many kinds, none may end a job that trains
            say(f"Ray does not answer ({error!r}); hosts that are lost are not replaced meanwhile")
            self._cancelled.wait(_RAY_PAUSE_S)

    def _outcome(self, server_failure: str, host_failure: str) -> str:
        if self._cancelled.is_set():
            return "it was cancelled"
        if host_failure and self._refusal:
            host_failure = f"{host_failure}; {self._refusal}"
        return server_failure or host_failure

    def _take(self, clock: float, event: events.Event) -> None:
        """Note what an event changes, and print it if it matters to people."""
        match event:
            case events.WorkerArrived():
                self._connected |= {event.chip}
            case events.WorkerLeft() | events.WorkerTurnedAway():
                self._connected -= {event.chip}
            case events.GenerationBegan():
                self._generation, self._step = event.number, event.step
            case events.WorkerStepped():
                self._step = max(self._step, event.step)
                self._highest = max(self._highest, event.step)
            case events.ConnectionRefused():
                self._refusal = event_words(event)
        if isinstance(event, _SHOWN):
            say(event_words(event))
        if self._journal is not None:
            self._journal.take(clock, event)

    @property
    def _file(self) -> Path:
        return self._folder / "ray.json"

    def _load_record(self) -> RayRecord | None:
        try:
            document = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        record: RayRecord = value_of(document, RayRecord, "the record of a Ray job")
        return record

    def _save(self, record: RayRecord) -> None:
        """Replace the record, here and on disk; a full disk must not stop a job that trains."""
        self._record = record
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._file, json.dumps(plain(record)))
        except OSError as error:
            say(f"the record of the job in {self._folder} cannot be written: {error.strerror}")
