"""How soon the survivors of a loss have their next sum, next to Gloo's own reconfigure.

    python benchmarks/reconfigure.py [--rounds 5] [--no-write]

16 ranks on the mesh 4x4, on loopback; the four of one board die. The other 12 call
`dist._reconfigure` with the handles that are left, and sum 1 MB. Each time is from the first call
to the end of the slowest rank's sum. Gloo and meshmend take turns, with a store in a file as
`meshmend run` has it, and with one over TCP as torchrun has it. The plans for the mesh with its
hole are made within that time: nobody knew which board would die. Needs torch 2.14 or newer.
"""

import os
import socket
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import meshmend.torch.group_factory  # noqa: F401  # so that forked ranks need not import it
from meshmend.planning.catalogue import prepare
from meshmend.planning.compile_once import compile_once
from meshmend.topology.text import parse_mesh
from meshmend.torch.versions import HAS_PYTHON_BACKENDS
from record import parser_of, record

dist: Any = torch.distributed

MESH, LOST = "4x4", (2, 3, 6, 7)  # 2x2@0,2
N_RANKS, N_ELEMENTS = 16, 250_000
LEFT = [rank for rank in range(N_RANKS) if rank not in LOST]
TIMEOUT = timedelta(seconds=120)


def survive(backend: str, store: Any, rank: int) -> tuple[float, ...]:
    """Be one rank: sum with all; then die, or be made again with those that are left and sum again.

    Returns when the second time began and ended.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=N_RANKS,
        timeout=TIMEOUT,
        enable_reconfigure=True,
    )

    def exchanged(name: str, ranks: list[int]) -> list[str]:
        store.set(f"{name} {rank}", dist._get_reconfigure_handle())
        return [store.get(f"{name} {peer}").decode() for peer in ranks]

    dist._reconfigure(1, exchanged("all", list(range(N_RANKS)))).wait()
    check_sum(N_RANKS)
    exchanged("summed", list(range(N_RANKS)))  # nobody dies while another still sums
    if rank in LOST:
        return ()
    handles = exchanged("left", LEFT)
    exchanged("ready", LEFT)
    began = time.monotonic()
    dist._reconfigure(2, handles).wait()
    check_sum(len(LEFT))
    ended = time.monotonic()
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < len(LEFT):  # it serves the store
        time.sleep(0.01)
    return began, ended


def check_sum(n_ranks: int) -> None:
    x = torch.ones(N_ELEMENTS)
    dist.all_reduce(x)
    assert x[0] == x[-1] == n_ranks, (x, n_ranks)


def run_once(backend: str, kind: str) -> float:
    """Return the seconds from the first call of reconfigure to the end of the last sum."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank in range(N_RANKS):
            if not (pid := os.fork()):
                code = 1
                try:
                    both = survive(backend, store_of(kind, folder, port, rank), rank)
                    Path(folder, f"times-{rank}").write_text(" ".join(map(str, both)))
                    code = 0
                finally:
                    os._exit(code)
            workers.append(pid)
        codes = [os.waitpid(pid, 0)[1] for pid in workers]
        if any(codes):
            raise SystemExit(f"{backend}: ranks ended with {codes}")
        times = [Path(folder, f"times-{rank}").read_text().split() for rank in LEFT]
    return max(float(end) for _, end in times) - min(float(began) for began, _ in times)


def store_of(kind: str, folder: str, port: int, rank: int) -> Any:
    if kind == "file":
        return dist.FileStore(f"{folder}/store", -1)
    return dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each backend and store")
    arguments = parser.parse_args()
    if not HAS_PYTHON_BACKENDS:
        print(f"torch {torch.__version__} has no reconfigure; it needs torch 2.14 or newer")
        return 0
    os.environ["MESHMEND_MESH"] = MESH
    os.environ.pop("MESHMEND_CHIP", None)
    torch.set_num_threads(1)  # a process that is forked from one with more of them hangs
    compile_once()
    prepare(parse_mesh(MESH), "auto")
    figures: dict[str, Any] = {}
    for kind in ("file", "TCP"):
        times: dict[str, list[float]] = {"gloo": [], "meshmend": []}
        for _ in range(arguments.rounds):
            for backend, taken in times.items():
                taken.append(run_once(backend, kind))
        medians = {backend: statistics.median(taken) for backend, taken in times.items()}
        ratio = medians["meshmend"] / medians["gloo"]
        words = ", ".join(f"{backend} {1e3 * s:.0f} ms" for backend, s in medians.items())
        print(f"store: {kind}; {words}; ratio {ratio:.2f}", flush=True)
        figures[kind] = {"seconds": times, "ratio": ratio}
    if not arguments.no_write:
        print(record("reconfigure", {"torch": torch.__version__, **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
