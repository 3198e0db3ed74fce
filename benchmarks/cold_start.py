"""How soon workers begin that start from nothing: no fork server, and no compiled loops.

    python benchmarks/cold_start.py [--mesh 1x2] [--runs 3]

Each worker is a `meshmend worker` process of its own, as on a host of a cluster. It imports torch
and, the first time, waits until one process of its host has compiled what all of them need. The
second case finds that compiled, as after `make install`. Prints the seconds from the start of the
workers to the first step, beside the processor time of all processes until the job's end.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meshmend.topology.text import parse_mesh
from meshmend.transport.listener import listening
from record import record

SCRIPT = Path(__file__).parents[1] / "examples/train/mended_loop.py"
PROMISED_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="1x2")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    cold, compiled = [], []
    for number in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(first_step_s(options.mesh, Path(folder)))
            compiled.append(first_step_s(options.mesh, Path(folder)))
        print(f"run {number + 1}: cold {cold[-1]}, compiled {compiled[-1]}", flush=True)
    figures = {
        name: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        for name, runs in (("cold", cold), ("compiled", compiled))
    }
    for name, each in figures.items():
        print(f"{name:9} first step {each['clock_s']} s, processors {each['processor_s']} s")
    print(f"written to {record('cold_start', {**vars(options), **figures})}")
    return 0 if figures["cold"]["clock_s"] <= PROMISED_S else 1


def first_step_s(mesh_text: str, cache: Path) -> dict[str, float]:
    """Return what passes until the first step of a new job, on the clock and of processors."""
    with listening("127.0.0.1") as free:
        address = "127.0.0.1:{1}".format(*free.getsockname())
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(cache),
        "MESHMEND_SECRET": "a secret for this benchmark alone",
    }
    meshmend = [sys.executable, "-m", "meshmend"]
    mesh = ["--mesh", mesh_text]
    before = _processor_s()
    coordinator = subprocess.Popen(
        [*meshmend, "coordinator", *mesh, "--listen", address],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    began = time.monotonic()
    workers = [
        subprocess.Popen(
            [*meshmend, "worker", "--coordinator", address, *mesh, *_chip(chip), str(SCRIPT)],
            env=environment | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for chip in parse_mesh(mesh_text).live
    ]
    leader = workers[0].stdout
    assert leader is not None
    line = next((text for text in leader if text.startswith("step ")), None)
    clock_s = time.monotonic() - began
    for worker in workers:
        worker.communicate()
    codes = [*(worker.wait() for worker in workers), coordinator.wait()]
    if line is None or any(codes):
        raise SystemExit(f"the job failed: exit codes {codes}")
    return {"clock_s": round(clock_s, 2), "processor_s": round(_processor_s() - before, 2)}


def _chip(chip: tuple[int, ...]) -> list[str]:
    return ["--chip", ",".join(map(str, chip))]


def _processor_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
