"""A plain PyTorch training loop: handwritten digits and a small network.

python examples/train/plain_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch.utils import data


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
    loader = data.DataLoader(dataset, 64, sampler=data.RandomSampler(dataset, num_samples=64 * 100))
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
