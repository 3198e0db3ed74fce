"""The commands in a page of the documentation, and whether what they print is what it shows.

A command stands in a block of code, after `$` or alone on its line. What the page shows of its
output follows in the same block, or in the next block if only that stands between. A page may leave
lines out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("meshmend", "python", "pip", "make", "torchrun", "sbatch", "export")
_COMMAND = re.compile(rf"(?:\$ )?((?:{'|'.join(PROGRAMS)}) .*)")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_EVENT = re.compile(r"\s*\d+\.\d+ s  ")  # what happened in a job, and when
_MEASURED = re.compile(r"\s*(s|ms|us|samples/s)\b")  # after a number: it depends on the machine
_JOBS = ("meshmend train", "meshmend run", "meshmend checkpoint")
_BENCHMARKS = ("meshmend bench", "meshmend testbed check")  # all that they print is measured
_AMOUNT = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?: ?(?:s|ms|us|%|x|[KM]?B/s)(?!\w))?")
_PLAN_CLOSENESS, _JOB_CLOSENESS = 0.01, 0.3


@dataclass(frozen=True)
class DocumentedCommand:
    """A command of a page, as it stands there, and the lines that the page shows of its output."""

    page: str
    line: str
    shown: tuple[str, ...] = ()

    def missing(self, printed: str) -> list[str]:
        """Return the first shown line that was not printed after the lines before it, if any."""
        left = iter(printed.splitlines())
        for line in self.shown:
            if not any(self._is_same(line, other) for other in left):
                return [line]
        return []

    def _is_same(self, shown: str, printed: str) -> bool:
        """Whether two lines have the same words, and numbers that are close where they can be."""
        if _EVENT.match(shown):
            return _without_amounts(shown.partition(";")[0]) == _without_amounts(
                printed.partition(";")[0]
            )
        if self.line.startswith(_BENCHMARKS) or shown.startswith("took"):
            return _without_amounts(shown) == _without_amounts(printed)
        is_job = self.line.startswith(_JOBS)
        pairs = zip(_NUMBER.finditer(shown), _NUMBER.finditer(printed), strict=False)
        return _words(shown) == _words(printed) and all(
            (is_job and _MEASURED.match(shown, one.end()))
            or (is_job and "loss" in shown[: one.start()])  # depends on when a chip came back
            or shown.endswith("(holder: ", 0, one.start())  # the number of a process
            or _close(one[0], other[0], _JOB_CLOSENESS if is_job else _PLAN_CLOSENESS)
            for one, other in pairs
        )


def _words(line: str) -> list[str]:
    return _NUMBER.sub("0", line).split()


def _without_amounts(line: str) -> list[str]:
    """Return the words of a line; amounts and their units, which go with their size, are equal."""
    return _AMOUNT.sub("0", line).split()


def _close(one: str, other: str, closeness: float) -> bool:
    if one == other:
        return True
    try:
        first, second = (float(each.replace(",", "")) for each in (one, other))
    except ValueError:  # a version, or the coordinates of a chip
        return False
    return abs(first - second) <= closeness * max(first, second)


def documented_commands(path: Path, page: str) -> list[DocumentedCommand]:
    """Return the commands of a page in their order."""
    blocks = list(_blocks(path.read_text(encoding="utf-8").splitlines()))
    found: list[DocumentedCommand] = []
    before = None  # the end of a block whose last command shows no output yet
    for start, end, lines in blocks:
        own = _commands(lines, page)
        if own:
            found += own
        elif before is not None and start - before <= 2:  # only a blank line stands between
            found[-1] = DocumentedCommand(page, found[-1].line, _shown(lines))
        before = end if own and not own[-1].shown else None
    return found


def _blocks(lines: list[str]) -> Iterator[tuple[int, int, list[str]]]:
    """Yield the first and the last line number, and the lines, of each block without a language."""
    place = 0
    while place < len(lines):
        first, fence = place, re.match(r"```(\w*)", lines[place])
        place += 1
        if fence:
            while lines[place] != "```":
                place += 1
            if fence[1] in {"", "text"}:
                yield first, place, lines[first + 1 : place]
            place += 1
        elif lines[first].startswith("    ") and not (first and lines[first - 1].strip()):
            while place < len(lines) and (
                lines[place].startswith("    ") or not lines[place].strip()
            ):
                place += 1
            yield first, place - 1, [line[4:] for line in lines[first:place]]


def _commands(lines: list[str], page: str) -> list[DocumentedCommand]:
    found: list[DocumentedCommand] = []
    output: list[str] = []
    rest = iter(lines)
    for line in rest:
        command = _COMMAND.match(line)
        if command is None:
            output.append(line)
            continue
        text = command[1]
        while text.endswith("\\"):
            text = text[:-1].rstrip() + " " + next(rest).strip()
        if found:
            found[-1] = DocumentedCommand(page, found[-1].line, _shown(output))
        output = []
        found.append(DocumentedCommand(page, text.strip()))
    if found:
        found[-1] = DocumentedCommand(page, found[-1].line, _shown(output))
    return found


def _shown(lines: list[str]) -> tuple[str, ...]:
    return tuple(line for line in lines if line.strip() and line.strip() != "...")
