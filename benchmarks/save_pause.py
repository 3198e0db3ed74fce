"""How long a step waits for a checkpoint of 200 MB, written in the background or between steps.

    python benchmarks/save_pause.py

One chip. A slow disk is simulated: each flush to disk (`fsync`) also sleeps as long as a disk of
`--rate` bytes a second needs for the file. "waiting" waits for each checkpoint between two steps,
as jobs did before they wrote in the background. Prints the median step without a save, how much
longer the longest step with a save takes, and the longest of all steps.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from meshmend.train import Job, Saving
from meshmend.units import parse_bytes
from record import parser_of, record

N_BYTES, STEP_S, EVERY = 200_000_000, 0.05, 60


def slow_disk(bytes_per_s: float) -> None:
    """Make each flush to disk take as long as a disk with this bandwidth needs."""
    flush = os.fsync

    def slow_flush(fd: Any) -> None:
        flush(fd)
        time.sleep(os.fstat(fd).st_size / bytes_per_s)

    os.fsync = slow_flush


def pauses(folder: Path, *, waits: bool) -> dict[str, float]:
    """Train one chip with three checkpoints; return how long steps take."""
    model = torch.nn.Linear(1, 1)
    also = torch.nn.Linear(1, N_BYTES // 4, bias=False)  # a state that needs no gradients
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    job = Job(
        model,
        optimizer,
        TensorDataset(torch.zeros(8, 1)),
        batch=1,
        steps=3 * EVERY + EVERY // 2,
        also=[also],
        saving=Saving(folder, every=EVERY, keep=1),
    )
    steps: dict[int, float] = {}
    began = time.monotonic()
    for (inputs,) in job:
        time.sleep(STEP_S)
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        job.step(loss)
        if waits:
            job._core._saving.wait()
        steps[job.step_number] = time.monotonic() - began
        if (job.step_number + 1) % EVERY == 0:  # the next one must not wait for the one before
            job._core._saving.wait()
        began = time.monotonic()
    median = statistics.median(steps[step] for step in steps if step < EVERY)
    at_save = max(steps[step] for step in steps if step % EVERY == 0)
    longest = max(steps[step] for step in steps if step >= EVERY)
    return {"median_s": median, "pause_s": at_save - median, "longest_s": longest}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rate", default="100MB", help="bytes a second that the disk writes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    slow_disk(parse_bytes(arguments.rate))
    cases = {}
    for name, waits in (("background", False), ("waiting", True)):
        with tempfile.TemporaryDirectory() as folder:
            cases[name] = found = pauses(Path(folder), waits=waits)
        words = ", ".join(f"{key} {seconds * 1e3:.1f} ms" for key, seconds in found.items())
        print(f"{name:10}  {words.replace('_s ', ' ')}")
    if not arguments.no_write:
        record("save_pause", {"rate": arguments.rate, "bytes": N_BYTES, "cases": cases})


if __name__ == "__main__":
    main()
