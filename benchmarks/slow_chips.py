"""What one slow chip costs: steps of a job with equal shares, and with shares by speed.

    python benchmarks/slow_chips.py --mesh 4x4

Each sample takes a fixed time, in which the processor sleeps, as if an accelerator computed. From
step 10 on one chip takes three times as long. Prints the middle of the last steps' times, and what
they would be at best: with samples shared out by speed, in parts of samples too.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, BEGIN, LAST = 45, 10, 15
SAMPLE_S = 0.008
SLOW = 3.0


def train(per_chip: int) -> None:
    """Run the loop of one worker; the leader prints the time of its last steps, and all losses."""
    import torch

    from meshmend.train import Job

    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters())
    inputs, outputs = torch.randn(4096, 16), torch.randn(4096, 1)
    data = torch.utils.data.TensorDataset(inputs, outputs)
    n_chips = math.prod(map(int, os.environ["MESHMEND_MESH"].split("x")))
    job = Job(model, optimizer, data, batch=per_chip * n_chips, steps=STEPS)
    times, losses, at = [], [], time.perf_counter()
    for features, wanted in job:
        loss = torch.nn.functional.mse_loss(model(features), wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stubs
        time.sleep(SAMPLE_S * len(features))
        job.step(loss)
        before, at = at, time.perf_counter()
        times.append(at - before)
        losses.append(job.loss)
    if job.is_leader:
        found = {"step_s": statistics.median(times[-LAST:]), "losses": losses}
        Path(os.environ["SLOW_CHIPS_OUT"]).write_text(json.dumps(found))


def measured(mesh: str, per_chip: int, shares: str, faults: list[str]) -> tuple[float, list[float]]:
    """Return the seconds of a step and the losses of all steps."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = ["run", "--elastic", "--mesh", mesh, "--shares", shares]
        words += ["--run-dir", f"{folder}/run"]
        for fault in faults:
            words += ["--inject", fault]
        subprocess.run(
            [sys.executable, "-m", "meshmend", *words, __file__, "--per-chip", str(per_chip)],
            check=True,
            env=os.environ | {"SLOW_CHIPS_OUT": str(out)},
            stdout=subprocess.DEVNULL,
        )
        found = json.loads(out.read_text())
    return found["step_s"], found["losses"]


def main() -> None:
    """Measure the three jobs, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="4x4")
    parser.add_argument("--per-chip", type=int, default=64)
    options = parser.parse_args()
    if "MESHMEND_CHIP" in os.environ:
        train(options.per_chip)
        return
    mesh, per_chip = options.mesh, options.per_chip
    n_chips = math.prod(map(int, mesh.split("x")))
    fault = [f"throttle {','.join('0' for _ in mesh.split('x'))} from {BEGIN}"]
    calm_s, losses = measured(mesh, per_chip, "equal", [])
    ideal_s = calm_s * n_chips / (n_chips - 1 + 1 / SLOW)
    print(f"{'no chip is slow':<40} {calm_s:.3f} s a step")
    print(f"{'one is, at best':<40} {ideal_s:.3f} s")
    for shares in ("speed", "equal"):
        step_s, found = measured(mesh, per_chip, shares, fault)
        apart = max(abs(a - b) for a, b in zip(losses, found, strict=True))
        name = f"one is, --shares {shares}"
        print(
            f"{name:<40} {step_s:.3f} s, {step_s / ideal_s:.2f} of that; losses within {apart:.1g}"
        )


if __name__ == "__main__":
    main()
