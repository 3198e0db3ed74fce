"""How soon `meshmend status` answers, and what being looked at costs a job.

    python benchmarks/look_inside.py [--no-write] [--mesh 4x4] [--runs 7] [--pairs 10] [--span 5]

The job is a real coordinator and one real connection per chip, without torch: workers that say
they step. `meshmend status` runs in a process of its own, with the coordinator alive and dead. Its
processor time stands beside the time on the clock, because a busy machine stretches only the
latter. A scrape and what a worker adds to each step are measured in processor time. No step waits
for the coordinator, so a scrape every second costs a step at most its share of one core. What it
costs the steps of a real job is measured too (`scrape_cost`).
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, closing
from dataclasses import replace

from meshmend.config import Timing
from meshmend.membership.client import WorkerIdentity
from meshmend.membership.coordinator_client import CoordinatorClient
from meshmend.membership.coordinator_server import CoordinatorServer
from meshmend.membership.job import JobFingerprint, JobSpec
from meshmend.membership.messages import Status
from meshmend.membership.status_responder import StatusResponder
from meshmend.pages.report.metrics_text import CONTENT_TYPE, metrics_text
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.transport.listener import Address, listening
from meshmend.transport.metrics_server import MetricsServer
from meshmend.transport.peer_connections import PeerConnections
from record import parser_of, record
from scrape_cost import scrape_cost

SECRET = "a secret for this benchmark alone"
FINGERPRINT = JobFingerprint("0", 1000, 64, 0, "constant", "a model", "SGD(lr)", 500, "ab")
N_SCRAPES, N_STEPS = 100, 20_000
PATIENT = Timing(heartbeat_timeout_s=600.0)


class Workers:
    """One connection to the coordinator, and one listener, per chip of a mesh."""

    def __init__(self, mesh: Mesh, coordinator: Address, stack: ExitStack) -> None:
        stop_fd = os.eventfd(0, os.EFD_NONBLOCK)
        labels = [f"chip {chip}" for chip in mesh.live]
        self.clients = []
        for seat, chip in enumerate(mesh.live):
            client = CoordinatorClient(
                WorkerIdentity("job", mesh.shape, chip, seat, coordinator, SECRET.encode())
            )
            client.set_fingerprint(FINGERPRINT)
            peers = stack.enter_context(
                closing(
                    PeerConnections(
                        seat, labels, SECRET.encode(), bind="127.0.0.1", stop_fd=stop_fd
                    )
                )
            )
            peers.on_asker = StatusResponder(client.answer).take
            neighbors = dict.fromkeys(mesh.neighbors(chip), 1_000_000)
            client.set_traffic(lambda sent=neighbors: sent)  # type: ignore[misc]  # a default
            client.join(peers.address, Status(), on_change=_nothing, on_sever=_nothing)
            self.clients.append(client)

    def train(self) -> None:
        """Bring all workers into the first generation, and up to date there."""
        for client in self.clients:
            news = client.await_news(lambda news: news.generation is not None)
            assert news.generation is not None
            client.tell(Status(news.generation.number, ready=True))
        for client in self.clients:
            client.await_news(lambda news: news.go is not None)
            client.tell(replace(client.status, state_version=client.status.generation, step=1))


def _nothing(*_: object) -> None:
    pass


def answer_s(coordinator: Address, n_runs: int, cache: str) -> dict[str, float]:
    """Return the medians of what `meshmend status` takes of the clock and of processors."""
    environment = {**os.environ, "MESHMEND_SECRET": SECRET, "XDG_CACHE_HOME": cache}
    host, port = coordinator
    line = [sys.executable, "-m", "meshmend", "status", "--coordinator", f"{host}:{port}"]
    clock_s, worked_s = [], []
    for _ in range(n_runs):
        began, before = time.perf_counter(), os.times()
        subprocess.run(line, env=environment, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        clock_s.append(time.perf_counter() - began)
        worked_s.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
    return {"clock_s": statistics.median(clock_s), "processor_s": statistics.median(worked_s)}


def scrape_s(server: CoordinatorServer) -> float:
    """Return the processor time of one scrape, its caller's included."""

    def read() -> str:
        snapshot = server.snapshot()
        return metrics_text(snapshot.status, snapshot.traffic)

    listener = listening("127.0.0.1")
    host, port = listener.getsockname()[:2]
    with closing(MetricsServer(listener, read, CONTENT_TYPE)):
        began = time.process_time()
        for _ in range(N_SCRAPES):
            urllib.request.urlopen(f"http://{host}:{port}/metrics").read()
        return (time.process_time() - began) / N_SCRAPES


def step_s(client: CoordinatorClient) -> float:
    """Return the processor time that a worker adds to each step to know its own status."""
    statuses = [replace(client.status, step=step) for step in range(2, N_STEPS)]
    began = time.process_time()
    for status in statuses:
        client.mark(status.generation, status.step)
        client.note(status)
    return (time.process_time() - began) / N_STEPS


def measured(mesh: Mesh, n_runs: int) -> dict[str, object]:
    """Return all figures for one mesh."""
    listener = listening("127.0.0.1")
    address: Address = listener.getsockname()[:2]
    board = (1,) * len(mesh.shape)
    server = CoordinatorServer(listener, SECRET.encode(), JobSpec("job", mesh, board, PATIENT))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    with ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        workers = Workers(mesh, address, stack)
        workers.train()
        alive = answer_s(address, n_runs, cache)
        figures = {"scrape_processor_s": scrape_s(server), "step_s": step_s(workers.clients[0])}
        server.stop()
        thread.join()
        server.close()
        return {"alive": alive, "dead": answer_s(address, n_runs, cache), **figures}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mesh", default="4x4")
    parser.add_argument("--runs", type=int, default=7, help="of each command")
    parser.add_argument("--pairs", type=int, default=10, help="times with and without scrapes")
    parser.add_argument("--span", type=float, default=5.0, help="seconds of each such time")
    arguments = parser.parse_args()
    if arguments.pairs < 2 or arguments.span < 1:
        parser.error("a spread needs two --pairs or more, of one second or more")
    figures = measured(parse_mesh(arguments.mesh), arguments.runs)
    for name, value in figures.items():
        print(f"{name:20} {value}")
    cost = scrape_cost(arguments.pairs, arguments.span)
    figures["scrapes"] = cost
    print(
        f"a scrape a second    a step takes {cost['mean_ratio']:.4f} +- "
        f"{cost['standard_error']:.4f} times as long (mean of {arguments.pairs} pairs); medians "
        f"{cost['ratio_of_medians']:.4f}; {1e3 * cost['median_step_s']:.2f} ms a step, "
        f"{cost['n_steps'][0]} and {cost['n_steps'][1]} steps"
    )
    if not arguments.no_write:
        record("look_inside", {"mesh": arguments.mesh, **figures})


if __name__ == "__main__":
    main()
