"""What pinned buffers and a stream of their own save on a GPU: one job with them and one without.

    python benchmarks/gpu_overlap.py [--mesh 1x2] [--layers 12] [--width 2048] [--steps 60]

All chips of the mesh share the GPUs of this host. The job also survives a kill and a repair. Prints
the median step of each job, in turns, and their ratio.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from meshmend.train import Job
from meshmend.train.torch import buckets

layers, width, steps, is_pinned, folder = *map(int, sys.argv[1:5]), Path(sys.argv[5])
if not is_pinned:
    class Synchronous(buckets.Bucket):
        pass
    buckets.GpuBucket = Synchronous
torch.manual_seed(0)
made = [[torch.nn.Linear(width, width), torch.nn.ReLU()] for _ in range(layers)]
model = torch.nn.Sequential(*sum(made, [])).cuda()
data = torch.utils.data.TensorDataset(torch.randn(4096, width))
job = Job(model, torch.optim.SGD(model.parameters(), lr=1e-4), data, batch=512, steps=steps)
began, times = time.monotonic(), []
for (inputs,) in job:
    inputs = inputs.cuda(non_blocking=True)
    for _ in range(8):  # a backward pass that takes a while
        inputs = model(inputs)
    loss = inputs.square().mean()
    loss.backward()
    job.step(loss)
    now = time.monotonic()
    times.append(now - began)
    began = now
if job.rank == 0:
    (folder / "times").write_text(" ".join(map(str, times)))
"""


def main() -> None:
    """Run both jobs in turns and print their steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="1x2")
    parser.add_argument("--layers", default=12, type=int)
    parser.add_argument("--width", default=2048, type=int)
    parser.add_argument("--steps", default=60, type=int)
    parser.add_argument("--rounds", default=3, type=int)
    given = parser.parse_args()
    medians: dict[str, list[float]] = {"pinned": [], "synchronous": []}
    for _ in range(given.rounds):
        for kind in medians:
            medians[kind].append(median_step(given, kind == "pinned"))
    for kind, values in medians.items():
        print(f"{kind:12} {' '.join(f'{1e3 * each:.1f} ms' for each in values)}")
    ratio = statistics.median(medians["pinned"]) / statistics.median(medians["synchronous"])
    print(f"pinned / synchronous: {ratio:.3f}")


def median_step(given: argparse.Namespace, is_pinned: bool) -> float:
    """Run one job with a kill and a repair; return its median step in seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(SCRIPT)
        numbers = [given.layers, given.width, given.steps, int(is_pinned)]
        faults = ["kill 0,1 at 15", "repair 0,1 at 20"]
        command = [sys.executable, "-m", "meshmend", "run", "--elastic", "--mesh", given.mesh]
        command += [part for fault in faults for part in ("--inject", fault)]
        command += [str(script), *map(str, numbers), name]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(f"the job failed: {ended.stderr[-3000:]}")
        print(ended.stderr.strip().splitlines()[-1])
        times = [float(each) for each in (folder / "times").read_text().split()]
        return statistics.median(times[len(times) // 2 :])


if __name__ == "__main__":
    main()
