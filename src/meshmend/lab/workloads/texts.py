"""Text to pre-train BERT on: Python's own help texts, or a folder of the user's text files.

Words and punctuation marks are the tokens. The vocabulary holds the most frequent ones; ties are in
alphabetical order, so that every process makes the same vocabulary.

A sample is two pieces of text with some tokens masked, and whether the second piece follows the
first. It depends on the seed and the sample's index only, so a step done again uses the same.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError

SUFFIXES = (".txt", ".md", ".rst", ".py")
PAD, UNKNOWN, CLS, SEP, MASK = range(5)
N_SPECIAL = 5
# Of the tokens of a sample. All samples have equally many masked tokens. So the mean of the chips'
# losses, weighted by samples, is the mean over all masked tokens.
MASKED = 0.15
HELD_OUT_EVERY = 10

Masked = tuple[Any, ...]  # NumPy's arrays and numbers

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, eq=False)
class SentencePairs:
    """Samples `[CLS] first [SEP] second [SEP]`, made from blocks of tokens (samples, tokens).

    A sample is (tokens, segments, masked places, their original tokens, 1 if the second piece is
    from another block). Of the masked tokens 80 % become MASK, 10 % a random token, 10 % stay.
    """

    blocks: NDArray[np.int64]
    n_tokens: int
    seed: int

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Masked:
        random = np.random.default_rng([self.seed, index])
        length = self.blocks.shape[1]
        half = length // 2
        is_random_next = len(self.blocks) > 1 and random.random() < 0.5
        other = (
            (index + random.integers(1, len(self.blocks))) % len(self) if is_random_next else index
        )
        tokens = np.concatenate(
            ([CLS], self.blocks[index, :half], [SEP], self.blocks[other, half:], [SEP])
        )
        masked = np.sort(random.choice(self._places, size=self.n_masked, replace=False))
        originals = tokens[masked]
        tokens[masked] = self._replaced(originals, random)
        segments = (np.arange(len(tokens)) > half + 1).astype(np.int64)
        return tokens, segments, masked, originals, np.int64(is_random_next)

    @property
    def n_masked(self) -> int:
        """How many tokens of every sample are masked."""
        return max(1, round(MASKED * int(self.blocks.shape[1])))

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """The places of a sample that hold text: all but CLS and SEP."""
        length = self.blocks.shape[1]
        return np.delete(np.arange(1, length + 2), length // 2)

    def _replaced(
        self, originals: NDArray[np.int64], random: np.random.Generator
    ) -> NDArray[np.int64]:
        drawn = random.random(len(originals))
        others = random.integers(N_SPECIAL, self.n_tokens, len(originals))
        return np.where(drawn < 0.8, MASK, np.where(drawn < 0.9, others, originals))


@dataclass(frozen=True)
class TextSource:
    """Samples for training, held-out samples for evaluation, and the size of the vocabulary."""

    name: str
    train: SentencePairs
    held_out: SentencePairs
    n_tokens: int


def library_text(*, length: int, max_tokens: int, seed: int = 0) -> TextSource:
    """Return samples of `length` tokens from the help texts that come with Python."""
    texts = library_texts()
    return _source("the help texts of Python", texts, length, max_tokens=max_tokens, seed=seed)


def library_texts() -> list[str]:
    """Return the help texts that come with Python."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def text_folder(folder: Path, *, length: int, max_tokens: int, seed: int = 0) -> TextSource:
    """Return samples of `length` tokens from the text files in and below a folder.

    Raises:
        InputError: the folder does not exist or has no text files, a file is not UTF-8, or there is
            too little text.
    """
    texts = folder_texts(folder)
    return _source(str(folder), texts, length, max_tokens=max_tokens, seed=seed)


def folder_texts(folder: Path) -> list[str]:
    """Return the texts of the text files in and below a folder.

    Raises:
        InputError: the folder does not exist or has no text files, or a file is not UTF-8.
    """
    if not folder.is_dir():
        raise InputError(f"--data needs a folder of text files, but {folder} is not a folder")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    texts = [_text(file) for file in files if file.is_file()]
    if not texts:
        raise InputError(f"--data needs {', '.join(SUFFIXES)} files, but {folder} has none of them")
    return texts


def vocabulary(words: Sequence[str], max_tokens: int) -> dict[str, int]:
    """Return the token of each of the most frequent words; other words are UNKNOWN."""
    by_frequency = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))
    kept = by_frequency[: max_tokens - N_SPECIAL]
    return {word: token for token, (word, _) in enumerate(kept, start=N_SPECIAL)}


def _source(
    name: str, texts: Sequence[str], length: int, *, max_tokens: int, seed: int
) -> TextSource:
    words = [word for text in texts for word in _WORD.findall(text.lower())]
    token_of = vocabulary(words, max_tokens)
    n_text = length - 3  # without [CLS], [SEP], [SEP]
    n_blocks = len(words) // n_text
    if n_blocks < 2:
        raise InputError(
            f"BERT needs text of at least {2 * n_text} words, but {name} has {len(words)}; "
            "add text files"
        )
    tokens = [token_of.get(word, UNKNOWN) for word in words[: n_blocks * n_text]]
    blocks = np.array(tokens, dtype=np.int64).reshape(n_blocks, n_text)
    n_tokens = N_SPECIAL + len(token_of)
    is_held_out = np.arange(n_blocks) % HELD_OUT_EVERY == 1
    return TextSource(
        name,
        SentencePairs(blocks[~is_held_out], n_tokens, seed),
        SentencePairs(blocks[is_held_out], n_tokens, seed),
        n_tokens,
    )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    except OSError as error:
        reason = error.strerror or str(error)
    raise InputError(f"cannot read the text {file}: {reason}; replace or remove it")
