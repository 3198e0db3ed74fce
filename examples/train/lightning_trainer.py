"""Training with Lightning's Trainer that survives: one import and one argument differ.

meshmend run --elastic --mesh 2x2 --preload lightning --inject "kill 0,1 at 10" \
    examples/train/lightning_trainer.py
"""

import argparse

import lightning
import torch
from torch.utils import data

from meshmend.train.lightning import MeshmendStrategy


class Digits(lightning.LightningModule):
    """A small network that tells noisy pictures of ten fixed patterns apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layers(images), labels)
        self.log("validation_loss", loss)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def images_of_digits(n_images: int) -> data.TensorDataset:
    """Return noisy 8x8 pictures of ten fixed patterns, and which pattern each one shows."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 64, generator=generator)
    labels = torch.randint(0, 10, (n_images,), generator=generator)
    return data.TensorDataset(
        patterns[labels] + torch.randn(n_images, 64, generator=generator), labels
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output", default="runs/lightning_trainer")
    options = parser.parse_args()

    torch.manual_seed(0)
    trainer = lightning.Trainer(
        strategy=MeshmendStrategy(),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        default_root_dir=options.output,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    images = images_of_digits(480)
    trainer.fit(
        Digits(),
        data.DataLoader(images, batch_size=8, shuffle=True),
        data.DataLoader(images, batch_size=64),
    )
    if trainer.is_global_zero:
        print(f"validation loss {trainer.callback_metrics['validation_loss']:.6f}")


if __name__ == "__main__":
    main()
