"""What a coordinator costs at a thousand chips: start, a board dies, it returns, a restart.

    python benchmarks/scale.py --chips 1024 [--json]

The coordinator is the real one, in a process of its own, with its record on disk. Each worker is a
real `CoordinatorClient` with real handshakes and heartbeats; it has nothing to train, and is ready
and up to date at once. Many of them share a process. The board that dies has a process of its own.

- `start_cpu_s`: processor time of the coordinator until all chips have begun the first generation
- `dies_cpu_s`, `dies_wall_s`: from the kill until all others are up to date in the next generation
- `returns_cpu_s`: until all are again, after the board was started anew
- `restart_members`: members of the generation with which a coordinator goes on that was killed and
  started again
- `tick_ms`: one tick of a coordinator that has all workers, between two heartbeats; no sockets
- `plan_s`: a proved plan for the mesh without the board, nothing made ahead
"""

import argparse
import json
import multiprocessing
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from meshmend.config import Timing
from meshmend.errors import InputError
from meshmend.membership import messages
from meshmend.membership.client import News, WorkerIdentity
from meshmend.membership.coordinator import Coordinator
from meshmend.membership.coordinator_client import CoordinatorClient
from meshmend.membership.coordinator_server import CoordinatorServer
from meshmend.membership.job import JobSpec
from meshmend.membership.job_status import JobPhase
from meshmend.membership.messages import FRESH, Hello, Message, Status
from meshmend.membership.status_client import StatusQuestion, ask_job
from meshmend.topology.failures import Chip, board_shape
from meshmend.topology.mesh import Mesh
from meshmend.transport.listener import Address, listening

SECRET: Final = b"a secret of this benchmark"
JOB: Final = "scale"
PER_PROCESS: Final = 128  # workers
POLL_S: Final = 0.01  # between two looks at the news of all workers of a process
PATIENCE_S: Final = 300.0
HEARTBEAT_TIMEOUT_S: Final = 60.0  # a thousand workers on a few busy cores do not speak often
N_TICKS: Final = 2000

_spawn = multiprocessing.get_context("spawn")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", type=int, default=64, help="a multiple of 8 (default: 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended first
    figures = measured(mesh_of(options.chips))
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:16} {value}")


def mesh_of(n_chips: int) -> Mesh:
    """Return a mesh of so many chips, as square as possible."""
    rows = max(rows for rows in range(1, n_chips + 1) if n_chips % rows == 0 and rows**2 <= n_chips)
    return Mesh((rows, n_chips // rows))


def spec_of(mesh: Mesh) -> JobSpec:
    timing = Timing(heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
    return JobSpec(JOB, mesh, board_shape(2), timing)


def measured(mesh: Mesh) -> dict[str, Any]:
    """Return the figures of one job that starts, loses a board, gets it back, and is restarted."""
    rows, columns = board_shape(2)
    board = [chip for chip in mesh.live if chip[0] < rows and chip[1] < columns]
    others = [chip for chip in mesh.live if chip not in set(board)]
    figures: dict[str, Any] = {"chips": mesh.n_chips}
    with tempfile.TemporaryDirectory() as folder:
        job = ScaledJob(mesh, Path(folder) / "coordinator.json")
        try:
            for at in range(0, len(others), PER_PROCESS):
                job.start(others[at : at + PER_PROCESS])
            victim = job.start(board)
            figures["start_cpu_s"], _ = job.until_all_begin(lambda: None)
            figures["dies_cpu_s"], figures["dies_wall_s"] = job.until_all_begin(
                lambda: job.kill(victim)
            )
            figures["returns_cpu_s"], _ = job.until_all_begin(lambda: job.start(board))
            job.restart_coordinator()
            figures["restart_members"] = job.members_of_next()
        finally:
            job.close()
    figures["tick_ms"] = tick_ms(spec_of(mesh))
    figures["plan_s"] = plan_s(mesh.without(f"board:{board[0][0]},{board[0][1]}"))
    order = (
        "chips", "dies_cpu_s", "returns_cpu_s", "start_cpu_s", "tick_ms", "restart_members",
        "dies_wall_s", "plan_s",
    )  # fmt: skip
    return {
        name: round(value, 4) if isinstance(value := figures[name], float) else value
        for name in order
    }


@dataclass
class Workers:
    """A process with some of the workers, and a pipe to ask how far they are."""

    process: Any
    pipe: Connection

    def reached(self) -> int:
        """Return the generation in which all workers of the process are up to date, else FRESH."""
        self.pipe.send(None)
        number: int = self.pipe.recv()
        return number


class ScaledJob:
    """A coordinator's process and those of its workers."""

    def __init__(self, mesh: Mesh, record: Path) -> None:
        self._mesh = mesh
        self._record = record
        self._port = 0
        self._workers: list[Workers] = []
        self._generation = 0
        self._coordinator = self._start_coordinator()

    def _start_coordinator(self) -> Any:
        ours, theirs = _spawn.Pipe()
        process = _spawn.Process(
            target=serve, args=(self._mesh, self._record, self._port, theirs), daemon=True
        )
        process.start()
        self._port = ours.recv()
        self._begun_s = processor_s(process.pid)
        return process

    def start(self, chips: list[Chip]) -> Workers:
        """Start the workers of some chips in one process; they join at once."""
        ours, theirs = _spawn.Pipe()
        process = _spawn.Process(
            target=work, args=(self._mesh, chips, self._port, theirs), daemon=True
        )
        process.start()
        self._workers.append(Workers(process, ours))
        return self._workers[-1]

    def kill(self, workers: Workers) -> None:
        """Kill a process; its workers leave without a word."""
        self._workers.remove(workers)
        workers.process.kill()

    def restart_coordinator(self) -> None:
        """Kill the coordinator and start another one with its record, at the same address."""
        self._coordinator.kill()
        self._coordinator.join()
        self._coordinator = self._start_coordinator()

    def until_all_begin(self, change: Callable[[], object]) -> tuple[float, float]:
        """Make a change; wait until all workers are up to date in one later generation.

        Return the coordinator's processor time and the wall time since then.
        """
        before_s = self._begun_s if not self._generation else processor_s(self._coordinator.pid)
        began_at = time.monotonic()
        change()
        while time.monotonic() - began_at < PATIENCE_S:
            reached = {each.reached() for each in self._workers}
            if len(reached) == 1 and (number := reached.pop()) > self._generation:
                self._generation = number
                spent_s = processor_s(self._coordinator.pid) - before_s
                return spent_s, time.monotonic() - began_at
            time.sleep(4 * POLL_S)
        raise SystemExit(f"no generation for {PATIENCE_S:g} s: the workers are in {reached}")

    def members_of_next(self) -> int:
        """Return how many members the first generation has that the coordinator trains with."""
        question = StatusQuestion(("127.0.0.1", self._port), (), SECRET)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with suppress(InputError):
                status = ask_job(question)
                if status.phase is JobPhase.TRAINING:
                    return len(status.members)
            time.sleep(0.1)
        raise SystemExit(f"the coordinator trains with nobody for {PATIENCE_S:g} s")

    def close(self) -> None:
        """End all processes."""
        for process in (*(each.process for each in self._workers), self._coordinator):
            process.kill()
            process.join()


def serve(mesh: Mesh, record: Path, port: int, pipe: Connection) -> None:
    """Serve as the coordinator; send the port first."""
    listener = listening("127.0.0.1", port)
    server = CoordinatorServer(listener, SECRET, spec_of(mesh), record_file=record)
    pipe.send(listener.getsockname()[1])
    server.serve()


@dataclass
class LightWorker:
    """A worker that has nothing to do: ready for every generation, and up to date at its go."""

    client: CoordinatorClient
    address: Address
    status: Status = field(default_factory=Status)

    def join(self) -> None:
        """Ask to be admitted, at first or after the coordinator has turned this worker away."""
        self.status = structs.replace(self.status, ready=False)
        self.client.join(
            self.address, self.status, on_change=lambda: None, on_sever=lambda peer: None
        )

    def turn(self) -> None:
        """Do what the news ask for."""
        news: News = self.client.news
        generation, go, status = news.generation, news.go, self.status
        if isinstance(
            news.end, messages.TurnedAway
        ):  # a busy machine: it did not speak for too long
            self.join()
            return
        if generation is None:
            return
        number = generation.number
        if status.generation != number or not status.ready:
            changed = Status(number, True, status.state_version, status.step, term=status.term)
        elif go is not None and go.generation == number != status.state_version:
            changed = Status(number, True, number, max(1, go.step), term=generation.term)
        else:
            return
        self.status = changed
        self.client.mark(number, changed.step)
        self.client.tell(changed)

    @property
    def reached(self) -> int:
        """The generation in which this worker is up to date, if that is the latest."""
        generation = self.client.news.generation
        is_latest = generation is not None and self.status.state_version == generation.number
        return self.status.state_version if is_latest else FRESH


def work(mesh: Mesh, chips: list[Chip], port: int, pipe: Connection) -> None:
    """Run the workers of some chips; answer over the pipe where they are."""
    workers = [LightWorker(client_of(mesh, chip, port), address_of(mesh, chip)) for chip in chips]
    for worker in workers:
        worker.join()

    def turn() -> None:
        while True:
            for worker in workers:
                worker.turn()
            time.sleep(POLL_S)

    threading.Thread(target=turn, daemon=True).start()
    while True:
        pipe.recv()
        reached = {worker.reached for worker in workers}
        pipe.send(reached.pop() if len(reached) == 1 else FRESH)


def client_of(mesh: Mesh, chip: Chip, port: int) -> CoordinatorClient:
    seat = mesh.rank_of[chip]
    return CoordinatorClient(
        WorkerIdentity(JOB, mesh.shape, chip, seat, ("127.0.0.1", port), SECRET)
    )


def address_of(mesh: Mesh, chip: Chip) -> Address:
    """Return where a worker would listen; nobody calls there."""
    return "127.0.0.1", 1024 + mesh.rank_of[chip]


def processor_s(pid: int | None) -> float:
    """Return the processor time of all threads of a process."""
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


class NoConnections:
    """Sends nothing."""

    def send(self, connection: int, message: Message) -> None:
        pass

    def hang_up(self, connection: int) -> None:
        pass


def tick_ms(spec: JobSpec) -> float:
    """Return how long a tick takes, in milliseconds, when one heartbeat has come since the last."""
    coordinator, chips = Coordinator(spec, NoConnections()), tuple(spec.mesh.live)
    now = 0.0
    for number, chip in enumerate(chips):
        coordinator.opened(number, "", now)
        hello = Hello(JOB, spec.mesh.shape, chip, address_of(spec.mesh, chip), Status())
        coordinator.received(number, hello, now)
    coordinator.tick(now)
    coordinator.tick(now := now + 1.0)
    for status in (Status(1, True), Status(1, True, 1, 1)):
        for number in range(len(chips)):
            coordinator.received(number, messages.StatusChanged(status), now)
        coordinator.tick(now)
    every_s = spec.timing.alive_every_s / len(chips)
    spent_s = 0.0
    for beat in range(N_TICKS):
        now += every_s
        number = beat % len(chips)
        coordinator.received(number, messages.Heartbeat(1, beat // len(chips) + 1, now), now)
        began = time.thread_time()
        coordinator.tick(now)
        spent_s += time.thread_time() - began
    return 1e3 * spent_s / N_TICKS


def plan_s(mesh: Mesh) -> float:
    """Return how long a worker takes to plan and prove a sum of 4 MB after a loss.

    Nothing was made ahead, so this is the quick plan; no other worker is asked. It is processor
    time, because the machine may be busy.
    """
    from meshmend.planning.catalogue import Catalogue, CollectiveCall
    from meshmend.planning.plan import AUTO
    from meshmend.train.core.plan_agreement import FolderPlans

    for each in (Mesh((4, 4)).without("board:0,0"), mesh):  # the first compiles
        began = time.thread_time()
        catalogue = Catalogue(each, AUTO, 0, 0)
        FolderPlans(None, each, AUTO, [(1 << 20, "float32")], catalogue)
        catalogue.task(CollectiveCall("allreduce"), 1 << 20, "float32")
    return time.thread_time() - began


if __name__ == "__main__":
    main()
