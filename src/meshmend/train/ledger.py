"""The ledger: every chip writes down which samples it put into which step, and which steps count.

One file per worker, a line before each sum and a line after each step, written through to the
kernel at once: a killed worker's lines stay. `audit` reads all of them and proves that every
sample was used exactly once in the steps that count.

    try STEP GENERATION START STOP BATCH     this chip's share of the step, about to be summed
    done STEP GENERATION POSITION            the step is real here; the next begins at POSITION
    hold STEP GENERATION HASH                the bits of the state after a step

A step counts in the latest generation in which anyone finished it: an earlier one was lost with
the chips that had it.
"""

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meshmend.errors import InputError
from meshmend.topology.failures import Chip
from meshmend.train.samples import Share


class Ledger:
    """The lines of one worker; with no folder, nothing is written."""

    def __init__(self, folder: Path | None, chip: Chip) -> None:
        self._fd = -1
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{'-'.join(map(str, chip))}.{os.getpid()}.txt"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(folder / name, flags, 0o644)

    def tries(self, step: int, generation: int, share: Share) -> None:
        """Note the share that is about to be summed."""
        self._write(f"try {step} {generation} {share.start} {share.stop} {share.batch}")

    def did(self, step: int, generation: int, position: int) -> None:
        """Note that a step is real, and where the next begins."""
        self._write(f"done {step} {generation} {position}")

    def holds(self, step: int, generation: int, bits: str) -> None:
        """Note a hash of the state after a step."""
        self._write(f"hold {step} {generation} {bits}")

    def close(self) -> None:
        """Write no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, line: str) -> None:
        if self._fd >= 0:
            os.write(self._fd, f"{line}\n".encode())


@dataclass(frozen=True)
class Audit:
    """What the ledger of a run says: places of the row used, left out, and used again.

    `steps` counts the steps that count, `hashed` those of them whose bits were noted, `split`
    names those after which two chips held different bits.
    """

    steps: int
    used: int
    lost: int
    repeated: int
    hashed: int
    split: tuple[int, ...]


@dataclass
class _Lines:
    """The lines of all ledgers, by step and generation."""

    shares: dict[tuple[int, int], list[tuple[int, int]]]
    ends: dict[tuple[int, int], int]
    bits: dict[tuple[int, int], set[str]]


def audit(folder: Path) -> Audit:
    """Return what all ledgers in a folder say together.

    Raises:
        InputError: a line that cannot be read, other than a torn last one.
    """
    lines = _read(folder)
    counts: dict[int, int] = {}
    for step, generation in lines.ends:
        counts[step] = max(counts.get(step, 0), generation)
    used = lost = repeated = 0
    at = min((start for key in counts.items() for start, _ in lines.shares[key]), default=0)
    for key in sorted(counts.items()):
        n_used, n_lost, n_repeated = _tiling(lines.shares[key], at, lines.ends[key])
        used, lost, repeated = used + n_used, lost + n_lost, repeated + n_repeated
        at = lines.ends[key]
    held: dict[int, set[str]] = defaultdict(set)
    for (step, generation), bits in lines.bits.items():
        if step in counts and generation >= counts[step]:
            held[step] |= bits
    split = tuple(step for step in sorted(held) if len(held[step]) > 1)
    return Audit(len(counts), used, lost, repeated, len(held), split)


def _read(folder: Path) -> _Lines:
    lines = _Lines(defaultdict(list), {}, defaultdict(set))
    for path in sorted(folder.glob("*.txt")):
        for kind, *words in _words(path):
            key = int(words[0]), int(words[1])
            if kind == "try":
                lines.shares[key].append((int(words[2]), int(words[3])))
            elif kind == "done":
                lines.ends[key] = int(words[2])
            else:
                lines.bits[key].add(words[2])
    return lines


def _tiling(shares: Iterable[tuple[int, int]], start: int, stop: int) -> tuple[int, int, int]:
    """Return how many places from `start` to `stop` shares use, leave out, and use again."""
    used = lost = repeated = 0
    at = start
    for first, last in sorted(shares):
        lost += max(0, first - at)
        repeated += max(0, min(at, last) - first)
        used += max(0, last - max(first, at))
        at = max(at, last)
    return used, lost + max(0, stop - at), repeated + max(0, at - stop)


def _words(path: Path) -> list[list[str]]:
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]  # a killed worker may leave a torn line
    lengths = {"try": 6, "done": 4, "hold": 4}
    result = []
    for number, line in enumerate(whole.splitlines(), start=1):
        words = line.split()
        is_known = bool(words) and lengths.get(words[0]) == len(words)
        n_numbers = 2 if words and words[0] == "hold" else len(words) - 1
        if not is_known or not all(word.isdecimal() for word in words[1 : 1 + n_numbers]):
            raise InputError(f"{path} is no ledger: line {number} reads {line!r}")
        result.append(words)
    return result
