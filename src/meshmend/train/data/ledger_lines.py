"""Reads the lines of all ledgers of a job into tables of numbers.

`ledger` writes the lines; `history_check` knows what they mean together. A million lines take about
two seconds. To be that fast, the tables are NumPy arrays; there is no object per line.
"""

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.topology.failures import Chip

VERSION: Final = 2

Numbers = NDArray[np.int64]

# Where a table holds each value. All tables but `resumes` begin with the first four.
FILE, LINE, STEP, GENERATION, POSITION = range(5)
START, STOP, CHECKSUM = 4, 5, 7

NO_CHECKSUM: Final = -1  # in the column CHECKSUM: the line has none
STEP_BITS: Final = 32
STEP_MASK: Final = (1 << STEP_BITS) - 1
FOR_EVER: Final = 2**62

_HEAD = re.compile(rb"ledger (\d+) (\d+(?:,\d+)*) (\d+) (\d+) (\d{3})\n")
_KEY = rb" \d{1,9} \d{1,10}"  # step and generation
_LINE = (
    rb"(?:try" + _KEY + rb"(?: \d{1,18}){3} (?:\d{1,18}|-)|done" + _KEY + rb" \d{1,18}"
    rb"|hold" + _KEY + rb" \w{1,64}|resume \d{1,9} \d{1,18}|back" + _KEY + rb"|gap)\n"
)
_LINES = re.compile(rb"(?>" + _LINE + rb")*+")  # possessive, never backtracks: linear in the bytes


@dataclass(frozen=True)
class LedgerFile:
    """The first line of one worker's ledger, and where lines are missing.

    `gaps` are the places at which lines are missing. `errno` is not 0 if the last lines are missing
    too: it is the error that writing them failed with.
    """

    chip: Chip
    n_samples: int
    seed: int
    errno: int
    gaps: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LedgerLines:
    """All lines, one table per kind of line; `table[STEP]` is an array of all steps.

    tries: file, line, step, generation, start, stop, batch, checksum.
    dones: file, line, step, generation, position.
    holds: file, line, step, generation; the hashes are in `bits`.
    backs: file, line, step, generation.
    resumes: file, line, step, position.
    """

    files: tuple[LedgerFile, ...]
    tries: Numbers
    dones: Numbers
    holds: Numbers
    bits: NDArray[np.bytes_]
    backs: Numbers
    resumes: Numbers


class Gap(NamedTuple):
    """A chip's ledger may lack lines between two keys, which are those of `keys_of`."""

    chip: Chip
    first: int
    last: int
    error: int


def read_ledgers(folder: Path) -> LedgerLines:
    """Return the lines of all ledgers in a folder.

    Raises:
        InputError: a line cannot be read. An incomplete last line is ignored.
    """
    parts = [_read(path, number) for number, path in enumerate(sorted(folder.glob("*.txt")))]
    tables = {
        name: np.concatenate([part.tables[name] for part in parts] or [_EMPTY[name]])
        for name in _EMPTY
    }
    bits = np.concatenate([part.bits for part in parts] or [np.empty(0, dtype="S1")])
    return LedgerLines(
        files=tuple(part.file for part in parts),
        tries=tables["try"].T,
        dones=tables["done"].T,
        holds=tables["hold"].T,
        bits=bits,
        backs=tables["back"].T,
        resumes=tables["resume"].T,
    )


_EMPTY: Final = {
    "try": np.empty((0, 8), dtype=np.int64),
    "done": np.empty((0, 5), dtype=np.int64),
    "hold": np.empty((0, 4), dtype=np.int64),
    "back": np.empty((0, 4), dtype=np.int64),
    "resume": np.empty((0, 4), dtype=np.int64),
}
_INITIALS: Final = {kind: kind[:1].encode() for kind in _EMPTY}


@dataclass(frozen=True, eq=False)
class _Part:
    """The lines of one file."""

    file: LedgerFile
    tables: dict[str, Numbers]
    bits: NDArray[np.bytes_]


def _read(path: Path, number: int) -> _Part:
    """Return the lines of one ledger; an empty file counts as one whose disk was full.

    One that cannot be read proves nothing, as if nothing had been written to it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        return _Part(
            LedgerFile(_chip_in(path), 0, 0, error.errno or errno.EIO, ()),
            dict(_EMPTY),
            np.empty(0, dtype="S1"),
        )
    data = data[: data.rfind(b"\n") + 1]  # a killed worker may leave half a line
    if not data:
        return _Part(
            LedgerFile(_chip_in(path), 0, 0, errno.ENOSPC, ()),
            dict(_EMPTY),
            np.empty(0, dtype="S1"),
        )
    head = _HEAD.match(data)
    if head is None or int(head[1]) != VERSION:
        first = data.split(b"\n", 1)[0].decode(errors="replace")
        raise InputError(
            f"{path} is not a ledger of version {VERSION}: line 1 reads {first[:80]!r}; read it "
            "with the version of meshmend that wrote it"
        )
    _check_lines(path, data, head.end())
    lines = data[head.end() :].split(b"\n")[:-1]
    places: dict[bytes, list[int]] = {initial: [] for initial in (b"g", *_INITIALS.values())}
    for place, line in enumerate(lines):
        places[line[:1]].append(place)
    tables = {
        kind: _table(number, places[initial], lines, _EMPTY[kind].shape[1] - 2)
        for kind, initial in _INITIALS.items()
    }
    bits = [lines[place].rpartition(b" ")[2] for place in places[b"h"]]
    chip, gaps = tuple(map(int, head[2].split(b","))), tuple(places[b"g"])
    file = LedgerFile(chip, int(head[3]), int(head[4]), int(head[5]), gaps)
    return _Part(file, tables, np.array(bits, dtype="S"))


def _chip_in(path: Path) -> Chip:
    return tuple(int(word) for word in re.findall(r"\d+", path.name.split(".")[0]))


def _check_lines(path: Path, data: bytes, start: int) -> None:
    """Raise InputError for the first line that is not of a known kind."""
    matched = _LINES.match(data, start)
    stop = matched.end() if matched else start
    if stop == len(data):
        return
    line = data[stop:].split(b"\n", 1)[0].decode(errors="replace")
    number = data.count(b"\n", 0, stop) + 1
    raise InputError(f"{path} is not a ledger: line {number} reads {line[:80]!r}")


def _table(number: int, places: Sequence[int], lines: Sequence[bytes], n_numbers: int) -> Numbers:
    """Return one row per line: the file's number, the line's place, and the numbers in it."""
    table = np.empty((len(places), 2 + n_numbers), dtype=np.int64)
    table[:, 0], table[:, 1] = number, places
    if places:
        words = (b" ".join(lines[at].split(b" ")[1 : 1 + n_numbers]) for at in places)
        text = b" ".join(words).replace(b" -", b" %d" % NO_CHECKSUM)
        table[:, 2:] = np.fromstring(text, dtype=np.int64, sep=" ").reshape(-1, n_numbers)
    return table


def keys_of(table: Numbers) -> Numbers:
    """Return one number for the generation and step of each line; a later step has a larger key."""
    keys: Numbers = (table[GENERATION] << STEP_BITS) | table[STEP]
    return keys


def gaps_in(lines: LedgerLines) -> list[Gap]:
    """Return the gaps of all ledgers, at which lines could not be written."""
    found: list[Gap] = []
    for number, file in enumerate(lines.files):
        if not file.gaps and not file.errno:
            continue
        parts = [
            table[:4, table[FILE] == number] for table in (lines.tries, lines.dones, lines.holds)
        ]
        table = np.concatenate(parts, axis=1)
        table = table[:, np.argsort(table[LINE])]
        keys = [0, *keys_of(table).tolist(), FOR_EVER]
        places = [*file.gaps, *([FOR_EVER] if file.errno else [])]
        for place in places:
            at = int(np.searchsorted(table[LINE], place))
            found.append(Gap(file.chip, keys[at], keys[at + 1], file.errno))
    return found


def is_gap_between(gaps: Sequence[Gap], first: int, last: int) -> bool:
    """Whether a ledger may lack lines between two keys, both included."""
    return any(gap.first <= last and first <= gap.last for gap in gaps)
