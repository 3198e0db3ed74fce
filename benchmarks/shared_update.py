"""What a shared optimizer costs and saves: its bytes on each chip, and the time of a step.

    python benchmarks/shared_update.py                       # 4x4 chips on loopback
    python benchmarks/shared_update.py --testbed 50Mbit      # each chip in a network of its own

AdamW on a model of one million parameters, with and without `shard_optimizer`. The bytes are those
of the tensors that each chip holds between two steps. The step "without mirrors" updates only what
a chip owns, so the difference is what mirrors cost; such a job would not survive.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import record

SCRIPT = """
import sys, time
import torch
from meshmend.train import Job

torch.set_num_threads(1)
torch.manual_seed(0)
kind = sys.argv[1]
inputs = torch.randn(512, 512)
dataset = torch.utils.data.TensorDataset(inputs, torch.randn(512, 512))
layers = [torch.nn.Linear(512, 512) for _ in range(4)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
job = Job(model, optimizer, dataset, batch=64, steps=40, shard_optimizer=kind != "whole")
if kind == "without mirrors":
    from meshmend.train import update_shares
    update_shares.UpdateShares.mirrored = lambda shares, rank: ()
began = time.monotonic()
for features, targets in job:
    loss = torch.nn.functional.mse_loss(model(features), targets)
    loss.backward()
    if job.step(loss) and job.is_leader:
        print(f"step {time.monotonic() - began:.6f}")
        began = time.monotonic()
print(f"bytes {job.optimizer_bytes}")
"""
KINDS = ("whole", "without mirrors", "shared")


def measured(script: Path, options: argparse.Namespace, kind: str) -> tuple[int, float]:
    """Return the most bytes on a chip, and the median step in seconds."""
    command = [sys.executable, "-m", "meshmend", "run", "--elastic", "--mesh", options.mesh]
    if options.testbed:
        command += ["--testbed", options.testbed]
    done = subprocess.run(
        [*command, str(script), kind], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    sizes = [int(found) for found in re.findall(r"bytes (\d+)", done.stdout)]
    steps = [float(found) for found in re.findall(r"step ([\d.]+)", done.stdout)]
    return max(sizes), statistics.median(steps[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="4x4")
    parser.add_argument("--testbed", metavar="BANDWIDTH")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        found = {kind: measured(script, options, kind) for kind in KINDS}
    n_chips = 1
    for extent in options.mesh.split("x"):
        n_chips *= int(extent)
    whole = found["whole"][0]
    print(f"{'':16}  bytes per chip  x n / whole  median step")
    for kind, (n_bytes, step_s) in found.items():
        print(
            f"{kind:16}  {n_bytes:14,}  {n_bytes * n_chips / whole:11.2f}  {step_s * 1e3:8.1f} ms"
        )
    cost = found["shared"][1] / found["without mirrors"][1] - 1
    print(f"mirrors add {cost:.1%} to a step (target: 5 %); 2.2 of n is the target of the bytes")
    rows = {kind: {"bytes": size, "step_s": step_s} for kind, (size, step_s) in found.items()}
    print(f"written {record('shared_update', {'mesh': options.mesh, 'rows': rows})}")


if __name__ == "__main__":
    main()
