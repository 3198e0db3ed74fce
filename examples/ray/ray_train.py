"""Ray Train with our backend: DDP on 2x2 workers, whose sums run on the schedules of the mesh.

    python examples/ray/ray_train.py [--kill-at STEP]

With --kill-at one worker dies there, once. Ray Train then starts all workers again, which go on
from the last checkpoint that it has heard of: that is its way. In `examples/ray/train.py` the other
workers go on at once, and need no checkpoint.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from sklearn.datasets import load_digits

N_STEPS, SAVE_EVERY, BATCH = 30, 10, 16


def loop(config: dict[str, Any]) -> None:
    """Train on one chip: every worker calls this."""
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    model = prepare_model(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first = 1
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            model.module.load_state_dict(torch.load(Path(folder, "model.pt")))
            first = int(Path(folder, "step").read_text()) + 1
    for step in range(first, N_STEPS + 1):
        mine = torch.arange(BATCH) + BATCH * (dist.get_world_size() * step + rank)
        loss = torch.nn.functional.cross_entropy(
            model(images[mine % len(images)]), labels[mine % len(images)]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (
            step == config["kill_at"]
            and rank == 1
            and not (marker := Path(config["marker"])).exists()
        ):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if step % SAVE_EVERY:
            continue
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.module.state_dict(), Path(folder, "model.pt"))
            Path(folder, "step").write_text(str(step))
            checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report(
                {
                    "loss": loss.item(),
                    "step": step,
                    "first": first,
                    "backend": dist.get_backend(),
                },
                checkpoint=checkpoint,
            )


def set_up() -> None:
    """Register the backend in each worker, before Ray Train makes the group."""
    import meshmend.torch  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP")
    arguments = parser.parse_args()
    workers = {"env_vars": {"MESHMEND_MESH": "2x2"}, "worker_process_setup_hook": set_up}
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        ray.init("local", num_cpus=4, include_dashboard=False, runtime_env=workers)
    else:
        ray.init(runtime_env=workers)
    with tempfile.TemporaryDirectory() as folder:
        result = TorchTrainer(
            loop,
            train_loop_config={"kill_at": arguments.kill_at, "marker": f"{folder}/killed"},
            torch_config=TorchConfig(backend="meshmend"),
            scaling_config=ray.train.ScalingConfig(num_workers=4),
            run_config=ray.train.RunConfig(
                storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=1)
            ),
        ).fit()
    metrics = result.metrics or {}
    print(
        f"backend {metrics['backend']}: steps {metrics['first']} to {metrics['step']}, loss "
        f"{metrics['loss']:.3f}"
    )


if __name__ == "__main__":
    main()
