"""The coordinator of a job on a Ray cluster: a detached actor on the head node.

One thread serves the coordinator, another one keeps every host on a live node. If the actor's
process dies, Ray starts it again: it listens on the same address, reads from the disk of the head
node what it must know, and finds the hosts, which have gone on without it.
"""

import json
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Final

import ray
from msgspec.structs import replace

from meshmend.errors import InputError, MeshmendError
from meshmend.files import write_whole
from meshmend.launch.host_blocks import live_chips_of
from meshmend.launch.output_lines import say
from meshmend.launch.ray_host import HostSettings
from meshmend.launch.ray_supervisor import HostPlacement, HostSupervisor, end_hosts
from meshmend.launch.ray_watchdog import start_watchdog
from meshmend.membership import events
from meshmend.membership.coordinator_server import CoordinatorServer
from meshmend.membership.job import JobSpec
from meshmend.pages.report.event_words import event_words
from meshmend.topology.failures import Chip
from meshmend.transport.codec import Value, plain, value_of
from meshmend.transport.listener import Port, listening

_TICK_S: Final = 0.1
_RAY_PAUSE_S: Final = 5.0
_LISTEN_S: Final = 30.0  # the kernel frees the port of a dead coordinator well within this time
_SHOWN: Final = (
    events.GenerationForming,
    events.ConnectionRefused,
    events.WorkerTurnedAway,
    events.ChipsWaiting,
    events.StateLost,
    events.StateRestored,
    events.HistoryDropped,
    events.CoordinatorSuperseded,
    events.JobFailed,
    events.WriteFailed,
    events.NonFiniteSum,
    events.StatesDiffer,
)


class RayRecord(Value, frozen=True, tag_field="kind", tag="ray"):
    """What the next coordinator must know if this one dies, beside the state of the job.

    `outcome` is None while the job runs, empty when it has finished, else why it failed.
    """

    port: Port
    outcome: str | None = None
    placements: tuple[HostPlacement | None, ...] = ()


@dataclass(frozen=True)
class RayStatus:
    """How far a job is; `outcome` is None while it runs, empty if it finished, else its failure."""

    coordinator: str
    step: int
    generation: int
    n_connected: int
    nodes: tuple[str | None, ...]
    outcome: str | None


class RayCoordinator:
    """The actor; all its methods return at once."""

    def __init__(self, spec: JobSpec, settings: HostSettings, folder: str, port: int) -> None:
        self._spec = spec
        self._settings = settings
        self._folder = Path(folder)
        self._address = ray.util.get_node_ip_address()
        self._record = self._load_record() or RayRecord(port)
        self._connected: frozenset[Chip] = frozenset()
        self._step = self._highest = self._generation = 0
        self._server: CoordinatorServer | None = None
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
