"""How long a kill and a repair hold a job up, and what memory they take, by the size of the state.

    python benchmarks/state_size.py [--sizes 1MB,16MB,256MB] [--mesh 2x2] [--optimizer adamw]
    python benchmarks/state_size.py --testbed 200Mbit --sizes 4MB,16MB

A real job: `meshmend run --elastic`, one process per chip. A board, or the last chip of a small
mesh, is killed and later repaired. Before and after it, one process sends as many bytes to another
over a plain TCP connection, so that each figure stands next to what the machine copies just then.

- `step_s`: the median step of all chips before the kill
- `recovery_s`: from the kill until all others have finished a step
- `repair_s`: from the coordinator's word to begin a generation with the newcomers until all chips
  begin its first step: they have connected, agreed on plans, moved the state and taken its digest
- `transfer_s`: of that, what a newcomer takes from its first word with holders until it has loaded
  the state
- `copy_s`: how long the plain copy of the state takes; on a testbed also `packed_s`: state over
  what the links into the newcomer carry
- `over_copy`, `over_packed`: `repair_s` over these; `transfer_over_...`: `transfer_s` over these
- `slowdown`: a step while newcomers start and import, over a step before the repair
- `newcomer_peak`: the most memory that a newcomer has had when it has its state, less what it had
  before it joined, but for its weights, over the state
- `holder_peak`: 1, and how much more memory a holder has had in the repair than in any step before
  it, over the state

A state is that of parameters and optimizer; with `--optimizer frozen` nearly all of it is weights
that are not trained, so that steps stay short. Sixteen processes of 1 GB do not fit into 24 GiB:
take 2x2 for large states.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from meshmend.errors import BenchmarkError, UnitError
from meshmend.topology.text import parse_mesh
from meshmend.units import parse_bandwidth, parse_bytes
from record import parser_of, record

KILL_AT, REPAIR_AT = 8, 14
STEP_S: Final = 0.1  # a step also sleeps so long, as a host does while its accelerator computes
STEPS_AFTER: Final = 4  # the repair
_MOST_STEPS: Final = 2000
LAYER_BYTES: Final = 16 << 20
STATES_PER_WEIGHT: Final = {"adamw": 3, "sgd": 1, "frozen": 1}
_BLOCK: Final = 1 << 20
_RUN_S: Final = 900.0

Figures = dict[str, Any]
Mark = dict[str, float]  # of one chip at the begin of a step


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", default="1MB,16MB,64MB,256MB", help="bytes of state, by commas")
    parser.add_argument("--mesh", default="2x2")
    parser.add_argument("--board", default="", help="what is killed (default: the last chip)")
    parser.add_argument("--optimizer", choices=tuple(STATES_PER_WEIGHT), default="adamw")
    parser.add_argument("--testbed", default="", help="bandwidth of each link, such as 200Mbit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    try:
        sizes = [parse_bytes(size) for size in arguments.sizes.split(",")]
    except UnitError as error:
        parser.error(str(error))
    rows = []
    for size in sizes:
        rows.append(measured(size, arguments))
        if not arguments.json:
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    figures = {
        "mesh": arguments.mesh,
        "optimizer": arguments.optimizer,
        "testbed": arguments.testbed,
        "sizes": rows,
    }
    if arguments.json:
        print(json.dumps(figures))
    if not arguments.no_write:
        record("state_size" + ("-testbed" if arguments.testbed else ""), figures)


def measured(n_bytes: int, arguments: argparse.Namespace) -> Figures:
    """Return the figures of one job with a state of about so many bytes."""
    mesh = parse_mesh(arguments.mesh)
    board = arguments.board or ",".join(map(str, mesh.live[-1]))
    copies_s = [plain_copy_s(n_bytes)]
    with tempfile.TemporaryDirectory(prefix="state-size-") as folder:
        marks, events = run_job(n_bytes, board, arguments, Path(folder))
    copies_s.append(plain_copy_s(n_bytes))
    copy_s = sum(copies_s) / len(copies_s)
    ends = {event["t"]: event["step"] for event in events if event["event"] == "step"}
    faults = {event["kind"]: event["t"] for event in events if event["event"] == "fault"}
    recovered = {event["kind"]: event for event in events if event["event"] == "recovered"}
    begun = [event["t"] for event in events if event["event"] == "generation"]
    formed = faults["repair"] + recovered["repair"]["detected_s"]
    pauses = [(after, after - before) for before, after in pairwise(sorted(ends))]
    step_s = median(pause for at, pause in pauses if at < faults["kill"])
    fewer_s = median(
        pause for at, pause in pauses if ends[at] > KILL_AT + 2 and at <= faults["repair"]
    )
    starting = [pause for at, pause in pauses if faults["repair"] < at <= formed]
    first = [own[first_of_all(own, mesh.n_live)] for own in marks.values()]
    joined = max(each["at"] for each in first)
    transfer_s = max(own[0]["taking"] for own in marks.values() if own[0]["step"] > 0)
    repair_s = joined - (min(t for t in begun if t > formed) + clock_of(marks, ends))
    found: Figures = {
        "state_bytes": n_bytes,
        "step_s": step_s,
        "recovery_s": recovered["kill"]["recovered_s"],
        "repair_s": repair_s,
        "transfer_s": transfer_s,
        "copy_s": copy_s,
        "over_copy": repair_s / copy_s,
        "transfer_over_copy": transfer_s / copy_s,
    }
    if arguments.testbed:
        newcomer = mesh.live[-1]
        found["packed_s"] = n_bytes / parse_bandwidth(arguments.testbed)
        found["packed_s"] /= len(list(mesh.neighbors(newcomer)))
        found["over_packed"] = repair_s / found["packed_s"]
        found["transfer_over_packed"] = transfer_s / found["packed_s"]
    if starting:  # else the newcomers were there before the next step had ended
        found["slowdown"] = max(starting) / fewer_s
    found |= peaks(marks, n_bytes, mesh.n_live)
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def first_of_all(own: list[Mark], n_chips: int) -> int:
    """Return the number of a chip's first mark with the newcomers, if it was there before them."""
    is_newcomer = own[0]["step"] > 0
    n_before = (
        0 if is_newcomer else next(at for at, each in enumerate(own) if each["chips"] < n_chips)
    )
    return next(at for at, each in enumerate(own) if at >= n_before and each["chips"] == n_chips)


def clock_of(marks: dict[str, list[Mark]], ends: dict[float, int]) -> float:
    """Return the time of the marks at which the clock of the events began.

    A chip marks the begin of a step as soon as it has ended the one before, if it waits for nobody.
    """
    t_of = {step: t for t, step in ends.items()}
    return min(
        each["at"] - t_of[int(each["step"])]
        for own in marks.values()
        for each in own
        if int(each["step"]) in t_of
    )


def peaks(marks: dict[str, list[Mark]], n_bytes: int, n_chips: int) -> Figures:
    """Return the memory of newcomers and holders over the state; see the top of this module."""
    newcomer, holder = list[float](), list[float]()
    for own in marks.values():
        after = first_of_all(own, n_chips)
        if after == 0:
            newcomer.append((own[0]["peak"] - own[0]["before"]) / n_bytes)
        else:
            usual = max(each["peak"] for each in own[2:after])
            holder.append(1 + (own[after]["peak"] - usual) / n_bytes)
    return {"newcomer_peak": max(newcomer), "holder_peak": max(holder)}


def run_job(
    n_bytes: int, board: str, arguments: argparse.Namespace, folder: Path
) -> tuple[dict[str, list[Mark]], list[Figures]]:
    """Run the job; return what each process noted, and the job's events."""
    run = folder / "run"
    options: Figures = {"bytes": n_bytes, "optimizer": arguments.optimizer, "marks": str(folder)}
    options["chips"] = parse_mesh(arguments.mesh).n_live
    command = [sys.executable, "-m", "meshmend", "run", "--elastic", "--mesh", arguments.mesh]
    command += ["--run-dir", str(run), "--inject", f"kill {board} at {KILL_AT}"]
    command += ["--inject", f"repair {board} at {REPAIR_AT}"]
    command += ["--testbed", arguments.testbed] if arguments.testbed else []
    command += [__file__, "worker", json.dumps(options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_RUN_S, check=False, env=environment
    )
    if done.returncode:
        raise BenchmarkError(f"the job failed: {(done.stdout + done.stderr)[-3000:]}")
    marks = {path.name: list(lines_of(path)) for path in folder.glob("*.marks")}
    lasting = {name: own for name, own in marks.items() if own[-1]["step"] > REPAIR_AT}
    return lasting, list(lines_of(run / "events.jsonl"))


def lines_of(path: Path) -> Iterator[Figures]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def plain_copy_s(n_bytes: int) -> float:
    """Return how long a plain TCP connection takes to bring the bytes into memory in use."""
    source, target = np.ones(n_bytes, dtype=np.uint8), np.ones(n_bytes, dtype=np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if child == 0:
            with socket.create_connection(server.getsockname()) as connection:
                connection.recv(1)
                connection.sendall(source.data)
            os._exit(0)
        connection, _ = server.accept()
        with connection:
            began_at, n_read = time.monotonic(), 0
            connection.sendall(b"\0")
            while n_read < n_bytes:
                n_read += connection.recv_into(target[n_read : n_read + _BLOCK].data)
            took_s = time.monotonic() - began_at
        os.waitpid(child, 0)
    return took_s


# The worker: what `meshmend run` starts for each chip.


def memory(key: str) -> int:
    """Return a figure of this process's memory in bytes: VmRSS, or VmHWM, its peak."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    raise BenchmarkError(f"/proc/self/status has no {key}")


def work(options: Figures) -> None:
    import torch

    from meshmend.train import Job

    torch.set_num_threads(1)
    n_weights = options["bytes"] // 4 // STATES_PER_WEIGHT[options["optimizer"]]
    n_layers = -(-n_weights * 4 // LAYER_BYTES)
    model = torch.nn.ParameterList(torch.ones(n_weights // n_layers) for _ in range(n_layers))
    if options["optimizer"] == "frozen":
        model.requires_grad_(False).append(torch.ones(1000))
    made = torch.optim.AdamW if options["optimizer"] == "adamw" else torch.optim.SGD
    trained = [each for each in model if each.requires_grad]
    optimizer = made(trained, lr=1e-3)
    job = Job(model, optimizer, torch.rand(4096, 1), batch=64, steps=_MOST_STEPS)
    before = memory("VmRSS") - 4 * n_weights
    loop: Any = job._core._loop
    catch_up, taking = loop._catch_up, [0.0]

    def timed(*arguments: Any) -> None:
        began_at = time.monotonic()
        catch_up(*arguments)
        taking[0] = time.monotonic() - began_at

    loop._catch_up = timed
    path = Path(options["marks"]) / f"{os.getpid()}.marks"
    n_after = 0
    with path.open("w", encoding="utf-8", buffering=1) as stream:
        for inputs in job:
            mark = {"at": time.monotonic(), "step": job.step_number, "chips": job.world_size}
            mark |= {"before": before, "peak": memory("VmHWM"), "taking": taking[0]}
            stream.write(json.dumps(mark) + "\n")
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak
            loss = inputs.mean() * sum(each.square().mean() for each in trained)
            optimizer.zero_grad()
            loss.backward()
            time.sleep(STEP_S)
            n_after += job.step_number > REPAIR_AT and job.world_size == options["chips"]
            if n_after == STEPS_AFTER:
                job.stop()
            job.step(loss)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
