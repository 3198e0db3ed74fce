"""Pictures and what they show: scikit-learn's digits, or a folder of the user's with one per class.

Every source is cut in a part to learn from and a part held out, the same one in every process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from meshmend.errors import InputError

if TYPE_CHECKING:  # only a folder of images needs Pillow
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg")
HELD_OUT = 0.2

Labelled = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images in memory (samples, channels, rows, columns), in 0..1, each with its class."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Labelled:
        return self.images[index], self.labels[index]


@dataclass(frozen=True)
class PictureFiles:
    """Image files, read when asked for: three channels in 0..1, `side` by `side` pixels."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    side: int

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Labelled:
        with _opened(self.files[index]) as image:
            try:
                pixels = np.asarray(image.convert("RGB").resize((self.side, self.side)))
            except (OSError, SyntaxError) as error:  # Pillow has both for a file cut short
                raise _unreadable(self.files[index], error) from None
        values = torch.from_numpy(pixels.astype(np.float32) / 255).permute(2, 0, 1)
        return values.contiguous(), torch.tensor(self.labels[index])


@dataclass(frozen=True)
class ImageSource:
    """Labelled images to learn from and to be judged by."""

    name: str
    train: Pictures | PictureFiles
    held_out: Pictures | PictureFiles
    n_classes: int


def digits(*, side: int = 8, n_channels: int = 1) -> ImageSource:
    """Return scikit-learn's 1797 handwritten digits of 8x8 pixels, enlarged if `side` is more."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    if side != 8:
        images = torch.nn.functional.interpolate(images, size=(side, side), mode="bilinear")
    images = images.repeat(1, n_channels, 1, 1)
    classes = torch.tensor(labels, dtype=torch.int64)
    learn, judge = split(len(classes))
    return ImageSource(
        "scikit-learn digits",
        Pictures(images[learn], classes[learn]),
        Pictures(images[judge], classes[judge]),
        n_classes=10,
    )


def image_folder(folder: Path, *, side: int) -> ImageSource:
    """Return the images of a folder that has one folder per class, in the order of their names.

    Raises:
        InputError: no such folder, fewer than two classes with images, or a file that is no image.
    """
    if not folder.is_dir():
        raise InputError(f"image_folder needs a folder of images, but {folder} is not a folder")
    found = {
        path: images
        for path in sorted(folder.iterdir())
        if path.is_dir() and (images := _images_in(path))
    }
    if len(found) < 2:
        raise InputError(
            f"image_folder needs a folder per class with {', '.join(SUFFIXES)} files in it, but "
            f"{folder} has {len(found)} such; put the images in {folder}/CLASS/"
        )
    files = [file for images in found.values() for file in images]
    labels = [label for label, images in enumerate(found.values()) for _ in images]
    for file in files:
        _opened(file).close()  # reads the header only
    learn, judge = split(len(files))
    parts = (
        PictureFiles(tuple(files[at] for at in part), tuple(labels[at] for at in part), side)
        for part in (learn, judge)
    )
    return ImageSource(str(folder), next(parts), next(parts), n_classes=len(found))


def split(n_samples: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the samples to learn from and those held out: at random, but always the same."""
    order = np.random.default_rng(0).permutation(n_samples).tolist()
    n_held_out = max(1, round(HELD_OUT * n_samples))
    return sorted(order[n_held_out:]), sorted(order[:n_held_out])


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def _opened(file: Path) -> "Image":
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(file)
    except (OSError, UnidentifiedImageError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> InputError:
    reason = (isinstance(error, OSError) and error.strerror) or "it is damaged or no image"
    return InputError(f"cannot read the image {file}: {reason}; replace it or take it away")
