"""Trains a small network on a Ray cluster, or on this machine if there is none.

    python examples/ray/train.py

Kill any process of a worker or of a host while it runs: training goes on, and the chip comes back.
"""

import ray
import torch
from sklearn.datasets import load_digits
from torch.utils import data

from meshmend.launch.ray import train
from meshmend.train import Job

N_STEPS = 300


def loop() -> None:
    """Train on one chip: every worker calls this."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    dataset = data.TensorDataset(images, torch.tensor(digits.target))
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    job = Job(model, optimizer, dataset, batch=64, steps=N_STEPS)
    for inputs, labels in job:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if job.step(loss) and job.is_leader and job.step_number % 50 == 0:
            print(f"step {job.step_number} loss {job.loss:.6f}")


def main() -> None:
    try:
        ray.init(address="auto", log_to_driver=True)
    except ConnectionError:
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80 * 2**20)
    # On a cluster, leave `is_strict` out: then every host has a node of its own.
    train("2x2", loop, hosts="1x2", is_strict=False)
    print("trained")


if __name__ == "__main__":
    main()
