"""One worker of `overlap.py`: steps of a made-up model, with `Job` or with DDP.

    meshmend run --elastic --mesh 2x2 benchmarks/overlap_worker.py job '{"steps": 20, ...}' FILE
    meshmend run --mesh 2x2 benchmarks/overlap_worker.py ddp '{"steps": 20, ...}' FILE

The model has layers of equal size. With `"compute": "sleep"` each sleeps in the forward pass, and
twice as long in the backward pass, as a host does while its accelerator computes; with `"cpu"` it
multiplies matrices. The first chip writes at which times its steps ended, on the clock and in
processor time.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

_SAMPLES = 4096

Ends = list[tuple[float, float]]  # of each step: on the clock, and in processor time


class _Pause(torch.autograd.Function):
    """Sleeps for a third of its time in the forward pass, and for two in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, pause_s: float) -> torch.Tensor:
        ctx.pause_s = pause_s
        time.sleep(pause_s / 3)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.pause_s / 3)
        return gradients[0], None


class Layers(torch.nn.Module):
    """Linear layers of equal size; the sizes and the time of all of them are given."""

    def __init__(self, n_bytes: int, n_layers: int, compute_s: float, *, sleeps: bool) -> None:
        super().__init__()
        width = round((n_bytes / n_layers / 4) ** 0.5)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False) for _ in range(n_layers)
        )
        self.width = width
        self._pause_s = compute_s / n_layers if sleeps else 0.0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self._pause_s:
                values = _Pause.apply(values, self._pause_s)  # type: ignore[no-untyped-call]  # torch's stubs
            values = torch.tanh(layer(values))
        return values.square().mean()


def main() -> None:
    kind, options, path = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sleeps = options["compute"] == "sleep"
    model = Layers(options["bytes"], options["layers"], options["compute_s"], sleeps=sleeps)
    # One sample a chip if the layers sleep; else as many as take the time.
    rows = 1 if sleeps else options["rows"]
    samples = torch.randn(_SAMPLES, model.width)
    ends = (_job if kind == "job" else _ddp)(model, samples, options, rows)
    if ends:
        path.write_text(json.dumps(ends), encoding="utf-8")


def _job(model: Layers, samples: torch.Tensor, options: Any, rows: int) -> Ends:
    from meshmend.train import Job

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ends: Ends = []
    batch = rows * options["chips"]
    job = Job(model, optimizer, samples, batch=batch, steps=options["steps"])
    for inputs in job:
        loss = model(inputs)
        optimizer.zero_grad()
        loss.backward()
        job.step(loss)
        ends.append((time.monotonic(), time.process_time()))
    return ends if job.is_leader else []


def _ddp(model: Layers, samples: torch.Tensor, options: Any, rows: int) -> Ends:
    import torch.distributed as dist

    dist.init_process_group("meshmend")
    replica = torch.nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=options["ddp_bucket_mb"]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ends: Ends = []
    rank = dist.get_rank()
    for step in range(options["steps"]):
        at = (step * options["chips"] + rank) * rows % (_SAMPLES - rows)
        loss = replica(samples[at : at + rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends.append((time.monotonic(), time.process_time()))
    dist.barrier()
    dist.destroy_process_group()
    return ends if rank == 0 else []


if __name__ == "__main__":
    main()
