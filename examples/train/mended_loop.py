"""The same loop, mended: it goes on when chips die, and takes them back. Five lines differ.

meshmend run --elastic --mesh 2x2 examples/train/mended_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch.utils import data

from meshmend.train import Job


def main() -> None:
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
    job = Job(model, optimizer, dataset, batch=64, steps=100)
    for inputs, labels in job:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if job.step(loss) and job.is_leader:
            print(f"step {job.step_number} loss {job.loss:.6f}")


if __name__ == "__main__":
    main()
