"""What a shared optimizer costs and saves: its bytes on each chip, and the time of a step.

    python benchmarks/shared_update.py                       # 4x4 chips on loopback
    python benchmarks/shared_update.py --testbed 50Mbit      # each chip in a network of its own

AdamW on a model of one million parameters, with and without `shard_optimizer`. The bytes are those
of the tensors that each chip holds between two steps. The step "without mirrors" updates only what
a chip owns, so the difference is what mirrors cost; such a job would not survive. What `meshmend
plan --collective sharded-update` says of mirrors stands below what was measured.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from meshmend.topology.text import parse_mesh
from meshmend.train.sharding.update_shares import mirror_cost
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
    from meshmend.train.sharding import update_shares
    update_shares.UpdateShares.mirrored = lambda shares, rank: ()
began = time.monotonic()
for features, targets in job:
    loss = torch.nn.functional.mse_loss(model(features), targets)
    loss.backward()
    if job.step(loss) and job.is_leader:
        print(f"step {time.monotonic() - began:.6f}")
        began = time.monotonic()
    # Now, because connections that are closed are not counted to their end.
    sent = sum(job._core._exchange.sent_bytes().values())
print(f"bytes {job.optimizer_bytes}")
print(f"sent {sent}")
"""
N_WEIGHT_BYTES = 4 * 4 * (512 * 512 + 512)
KINDS = ("whole", "without mirrors", "shared")


@dataclass(frozen=True)
class Measured:
    """The most bytes of state on a chip, the bytes that all chips sent, and the median step."""

    state_bytes: int
    sent_bytes: int
    step_s: float


def measured(script: Path, options: argparse.Namespace, kind: str) -> Measured:
    """Return what a job of one kind took."""
    command = [sys.executable, "-m", "meshmend", "run", "--elastic", "--mesh", options.mesh]
    if options.testbed:
        command += ["--testbed", options.testbed]
    done = subprocess.run(
        [*command, str(script), kind], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    sizes, sent = (
        [int(found) for found in re.findall(rf"{name} (\d+)", done.stdout)]
        for name in ("bytes", "sent")
    )
    steps = [float(found) for found in re.findall(r"step ([\d.]+)", done.stdout)]
    return Measured(max(sizes), sum(sent), statistics.median(steps[5:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="4x4")
    parser.add_argument("--testbed", metavar="BANDWIDTH")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        found = {kind: measured(script, options, kind) for kind in KINDS}
    mesh = parse_mesh(options.mesh)
    whole = found["whole"].state_bytes
    print(f"{'':16}  bytes per chip  x n / whole    bytes sent  median step")
    for kind, each in found.items():
        print(
            f"{kind:16}  {each.state_bytes:14,}  {each.state_bytes * mesh.n_live / whole:11.2f}"
            f"  {each.sent_bytes:12,}  {each.step_s * 1e3:8.1f} ms"
        )
    alone, shared = found["without mirrors"], found["shared"]
    cost = shared.step_s / alone.step_s - 1
    more = shared.sent_bytes / alone.sent_bytes - 1
    predicted = mirror_cost(mesh, N_WEIGHT_BYTES)
    print(f"mirrors add {cost:.1%} to a step (target: 5 %) and {more:.2%} to the bytes sent")
    print(
        f"plan predicts {predicted.state_and_mirror_bytes:,} bytes per chip, "
        f"{predicted.state_bytes:,} without mirrors, and {predicted.sent_bytes_per_step} bytes sent"
    )
    rows = {kind: asdict(each) for kind, each in found.items()}
    document = {"mesh": options.mesh, "rows": rows, "predicted": asdict(predicted)}
    print(f"written {record('shared_update', document)}")


if __name__ == "__main__":
    main()
