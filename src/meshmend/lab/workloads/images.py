"""Images with labels: scikit-learn's digits, or a user's folder with one folder per class.

Every source is split into training samples and held-out samples, the same in every process. The
samples are NumPy's arrays, so that every framework can train on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError

if TYPE_CHECKING:  # only a folder of images needs Pillow
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg")
HELD_OUT = 0.2  # of all samples

Labelled = tuple[NDArray[np.float32], np.int64]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images in memory, as (samples, channels, rows, columns) in 0..1, each with its class."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Labelled:
        return self.images[index], self.labels[index]


@dataclass(frozen=True)
class PictureFiles:
    """Image files, read on access: three channels in 0..1, `side` by `side` pixels."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    side: int

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Labelled:
        with _opened(self.files[index]) as image:
            try:
                pixels = np.asarray(image.convert("RGB").resize((self.side, self.side)))
            except (OSError, SyntaxError) as error:  # Pillow raises either for an incomplete file
                raise _unreadable(self.files[index], error) from None
        values = (pixels.astype(np.float32) / 255).transpose(2, 0, 1)
        return np.ascontiguousarray(values), np.int64(self.labels[index])


@dataclass(frozen=True)
class ImageSource:
    """Labelled images for training, and held-out ones for evaluation."""

    name: str
    train: Pictures | PictureFiles
    held_out: Pictures | PictureFiles
    n_classes: int


def digits(*, side: int = 8, n_channels: int = 1) -> ImageSource:
    """Return scikit-learn's 1797 handwritten digits of 8x8 pixels, resized to `side`."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = pixels.astype(np.float32).reshape(-1, 1, 8, 8) / 16
    if side != 8:
        images = _resized(images, side)
    images = images.repeat(n_channels, axis=1)
    classes = labels.astype(np.int64)
    train, held_out = split(len(classes))
    return ImageSource(
        "scikit-learn digits",
        Pictures(images[train], classes[train]),
        Pictures(images[held_out], classes[held_out]),
        n_classes=10,
    )


def image_folder(folder: Path, *, side: int) -> ImageSource:
    """Return the images of a folder that has one folder per class; classes sort by name.

    Raises:
        InputError: the folder does not exist, fewer than two classes have images, or a file is
            not an image.
    """
    if not folder.is_dir():
        raise InputError(f"--data needs a folder of images, but {folder} is not a folder")
    found = {
        path: images
        for path in sorted(folder.iterdir())
        if path.is_dir() and (images := _images_in(path))
    }
    if len(found) < 2:
        raise InputError(
            f"--data needs two or more folders with {', '.join(SUFFIXES)} files, one "
            f"per class, but {folder} has {len(found)}; put the images in {folder}/CLASS/"
        )
    files = [file for images in found.values() for file in images]
    labels = [label for label, images in enumerate(found.values()) for _ in images]
    for file in files:
        _opened(file).close()  # reads the header only
    train, held_out = split(len(files))
    parts = (
        PictureFiles(tuple(files[at] for at in part), tuple(labels[at] for at in part), side)
        for part in (train, held_out)
    )
    return ImageSource(str(folder), next(parts), next(parts), n_classes=len(found))


def _resized(images: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    """Return images (samples, channels, rows, columns) with `side` rows and columns, bilinear."""
    from scipy.ndimage import zoom

    factor = side / images.shape[-1]
    resized: NDArray[np.float32] = zoom(
        images, (1, 1, factor, factor), order=1, mode="nearest", grid_mode=True
    )
    return resized


def split(n_samples: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the indices for training and those held out: random, but always the same."""
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
    reason = (isinstance(error, OSError) and error.strerror) or "it is damaged or not an image"
    return InputError(f"cannot read the image {file}: {reason}; replace or remove it")
