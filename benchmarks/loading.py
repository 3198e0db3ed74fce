"""How much of the time to load samples a step hides: the step against the larger of both times.

    python benchmarks/loading.py

Each sample sleeps 5 ms, as one that is read from a disk does; each step computes for 50 ms, which
is slept too, so that the cores are free. 16 samples a step and chip, two loader workers a chip:
40 ms a step, if they share the work. Prints the median step of each mesh, and its ratio to 50 ms;
then the same for samples that take no time, and without loader workers, where both times add up.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from record import parser_of, record

SAMPLE_S, COMPUTE_S, PER_CHIP, N_WORKERS = 0.005, 0.050, 16, 2
SCRIPT = """
import json, sys, time

import torch
from torch.utils.data import DataLoader, Dataset
from meshmend.train import Job

sample_s, compute_s, batch, n_workers, steps = json.loads(sys.argv[1])


class Slow(Dataset):
    def __len__(self):
        return 10000

    def __getitem__(self, index):
        time.sleep(sample_s)
        return torch.zeros(8)


model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = Job(model, optimizer, DataLoader(Slow(), batch, num_workers=n_workers), steps=steps)
ends = []
for inputs in job:
    time.sleep(compute_s)
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    job.step(loss)
    ends.append(time.monotonic())
if job.is_leader:
    print("ENDS", json.dumps(ends))
"""


def step_s(mesh: str, n_chips: int, *, n_workers: int, sample_s: float, steps: int) -> float:
    """Return the median step of a job whose script loads samples; the first steps do not count."""
    settings = [sample_s, COMPUTE_S, PER_CHIP * n_chips, n_workers, steps]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "loading.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "meshmend", "run", "--elastic", "--mesh", mesh]
        command += [str(script), json.dumps(settings)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.partition("ENDS ")[2] for line in done.stdout.splitlines() if "ENDS " in line]
    if done.returncode or not lines:
        raise SystemExit(done.stderr[-2000:])
    ends: list[float] = json.loads(lines[0])[5:]
    return statistics.median(after - before for before, after in pairwise(ends))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    larger_s = max(COMPUTE_S, PER_CHIP * SAMPLE_S / N_WORKERS)
    cases: list[dict[str, Any]] = []
    for mesh, n_chips in (("1x1", 1), ("2x2", 4)):
        for n_workers, sample_s in ((N_WORKERS, SAMPLE_S), (N_WORKERS, 0.0), (0, SAMPLE_S)):
            options = {"loader_workers": n_workers, "sample_s": sample_s}
            median_s = step_s(
                mesh, n_chips, n_workers=n_workers, sample_s=sample_s, steps=arguments.steps
            )
            ratio = median_s / larger_s
            words = f"{mesh}, {n_workers} loader workers, {sample_s * 1e3:.0f} ms a sample"
            print(f"{words}: {median_s * 1e3:.1f} ms, {ratio:.3f} of the larger time")
            cases.append({"mesh": mesh, **options, "step_s": median_s, "ratio": ratio})
    if not arguments.no_write:
        record("loading", {"steps": arguments.steps, "larger_s": larger_s, "cases": cases})


if __name__ == "__main__":
    main()
