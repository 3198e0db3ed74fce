"""Data to train on: the same samples in every process, and bad folders are named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from meshmend.errors import InputError
from meshmend.lab.workloads.images import Pictures, digits, image_folder, split
from meshmend.lab.workloads.texts import (
    CLS,
    MASK,
    N_SPECIAL,
    SEP,
    SentencePairs,
    library_text,
    text_folder,
    vocabulary,
)


def test_digits_are_pictures_of_eight_by_eight_in_zero_to_one() -> None:
    source = digits()
    image, label = source.train[0]

    assert (len(source.train), len(source.held_out), source.n_classes) == (1438, 359, 10)
    assert (image.shape, str(image.dtype), label.shape) == ((1, 8, 8), "float32", ())
    assert sorted({int(source.train[at][1]) for at in range(200)}) == list(range(10))
    assert isinstance(source.train, Pictures)
    assert [source.train.images.min(), source.train.images.max()] == [0, 1]


def test_digits_can_be_enlarged_and_coloured() -> None:
    image, _ = digits(side=16, n_channels=3).train[5]

    assert image.shape == (3, 16, 16)
    assert np.array_equal(image[0], image[2])


@given(st.integers(2, 500))
def test_split_gives_every_sample_to_one_part(n_samples: int) -> None:
    learn, judge = split(n_samples)

    assert sorted([*learn, *judge]) == list(range(n_samples))
    assert learn
    assert len(judge) == max(1, round(0.2 * n_samples))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Five red PNG files and five grey JPEG files of several sizes."""
    for at in range(5):
        for name, mode, colour in (("red.png", "RGB", (255, 0, 0)), ("grey.jpg", "L", 128)):
            folder = tmp_path / name[:3]
            folder.mkdir(exist_ok=True)
            Image.new(mode, (20 + at, 10), colour).save(folder / f"{at}-{name}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("no image")
    return tmp_path


def test_an_image_folder_is_read_with_one_class_per_folder(pictures: Path) -> None:
    source = image_folder(pictures, side=12)
    samples = [source.train[at] for at in range(len(source.train))]

    assert (len(source.train), len(source.held_out), source.n_classes) == (8, 2, 2)
    assert {(image.shape, int(label)) for image, label in samples} == {
        ((3, 12, 12), 0),
        ((3, 12, 12), 1),
    }
    red = next(image for image, label in samples if label == 1)
    assert red[:, 3, 3].tolist() == [1, 0, 0]


def read_all(folder: Path) -> None:
    source = image_folder(folder, side=8)
    for part in (source.train, source.held_out):
        for at in range(len(part)):
            part[at]


def cut_short(folder: Path) -> None:
    file = folder / "red" / "1-red.png"
    file.write_bytes(file.read_bytes()[:40])


def no_image(folder: Path) -> None:
    (folder / "red" / "1-red.png").write_text("not at all")


def one_class(folder: Path) -> None:
    for file in (folder / "red").iterdir():
        file.unlink()


def folder_gone(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, r"read the image .*/red/1-red.png: it is damaged or not an image; replace"),
        (no_image, r"read the image .*/red/1-red.png: it is damaged or not an image; replace"),
        (one_class, r"needs two or more folders with .png, .jpg, .jpeg files, .* has 1; put"),
        (folder_gone, r"needs a folder of images, but .* is not a folder"),
    ],
)
def test_images_that_cannot_be_used_are_named(
    pictures: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(pictures)

    with pytest.raises(InputError, match=message):
        read_all(pictures)


def test_the_vocabulary_is_the_most_frequent_words_ties_by_name() -> None:
    words = ["b", "a", "c", "c", "a", "d"]

    assert vocabulary(words, N_SPECIAL + 3) == {"a": 5, "c": 6, "b": 7}


@given(st.integers(0, 1000), st.integers(1, 8), st.integers(4, 40))
def test_a_sample_is_two_pieces_of_text_with_equally_many_hidden_tokens(
    seed: int, n_blocks: int, length: int
) -> None:
    blocks = np.random.default_rng(seed).integers(N_SPECIAL, 99, (n_blocks, length))
    pairs = SentencePairs(blocks, n_tokens=99, seed=seed)
    half = length // 2

    for at in range(n_blocks):
        tokens, segments, masked, originals, is_random_next = pairs[at]
        text = tokens.copy()
        text[masked] = originals
        assert len(masked) == len(set(masked.tolist())) == pairs.n_masked
        assert [text[0], text[half + 1], text[-1]] == [CLS, SEP, SEP]
        assert text[1 : half + 1].tolist() == blocks[at, :half].tolist()
        second = text[half + 2 : -1].tolist()
        assert second in blocks[:, half:].tolist()
        if not is_random_next:
            assert second == blocks[at, half:].tolist()
        assert segments.tolist() == [0] * (half + 2) + [1] * (length - half + 1)
        assert (tokens[tokens != text] >= MASK).all()


def test_a_sample_depends_on_the_seed_and_its_number_alone() -> None:
    def samples(seed: int) -> list[list[list[int]]]:
        source = library_text(length=16, max_tokens=500, seed=seed)
        return [[part.tolist() for part in source.train[at]] for at in (7, 3, 7)]

    np.random.seed(1)
    first = samples(0)
    np.random.seed(2)
    assert samples(0) == first
    assert first[0] == first[2] != first[1]
    assert samples(1) != first


def test_most_masked_tokens_become_mask_and_half_the_second_pieces_are_from_elsewhere() -> None:
    train = library_text(length=32, max_tokens=2000).train
    samples = [train[at] for at in range(500)]

    is_mask = np.stack([tokens[masked] == MASK for tokens, _, masked, _, _ in samples])
    kept = np.stack([tokens[masked] == originals for tokens, _, masked, originals, _ in samples])
    elsewhere = np.stack([sample[4] for sample in samples])
    assert is_mask.mean() == pytest.approx(0.8, abs=0.04)
    assert kept.mean() == pytest.approx(0.1, abs=0.03)
    assert elsewhere.mean() == pytest.approx(0.5, abs=0.07)


def test_a_text_folder_is_read_with_what_is_below_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "one.txt").write_text("to be or not to be, " * 40)
    (tmp_path / "deep" / "two.md").write_text("that is the question. " * 40)
    (tmp_path / "three.bin").write_bytes(b"\xff\xfe")

    source = text_folder(tmp_path, length=11, max_tokens=9)
    assert source.n_tokens == 9
    assert (len(source.train), len(source.held_out)) == (54, 6)
    assert source.train.blocks.max() == 8


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"needs .txt, .md, .rst, .py files, but .* has none of them"),
        ({"a.bin": b"words"}, r"needs .txt, .md, .rst, .py files, but .* has none of them"),
        ({"a.txt": b"few words"}, r"needs text of at least 16 words, but .* has 2; add text files"),
        ({"a.txt": b"w" + b"\xff"}, r"cannot read the text .*a.txt: byte 1 is not UTF-8; replace"),
    ],
)
def test_texts_that_cannot_be_used_are_named(
    tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)

    with pytest.raises(InputError, match=message):
        text_folder(tmp_path, length=11, max_tokens=100)


def test_a_missing_text_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs a folder of text files, but .*none is not"):
        text_folder(tmp_path / "none", length=11, max_tokens=100)
