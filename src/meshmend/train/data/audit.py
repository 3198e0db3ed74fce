"""Proves from the ledgers of a job that it has one history, and that every sample was used once.

The proof goes like this:

- A sum needs every member of a generation. So a chip that has finished a step knows that all
  members had finished the step before it.
- So a generation goes on after the last step of the previous generation, or one step earlier. In
  the second case the last step was lost with the chips that had finished it, and is done again.
- Any other beginning needs a line in a ledger: a resume, or a restore of an earlier
  state from a checkpoint or from a chip's memory.

A step counts unless a later generation began with that step or an earlier one. Steps whose lines
could not be written are reported as not checked; nothing is guessed. Who was a member is asked of
the events of the job, not of the files: a member of a generation that finished a step, and that has
no ledger of it, is reported, because the ledgers of the others do not prove what it did.

`ledger.py` has the format. A million lines take about two seconds to read. To be that fast, the
lines are in tables of NumPy arrays; there is no object per line.
"""

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.membership.events import Event, GenerationBegan, StepFinished
from meshmend.topology.failures import Chip
from meshmend.train.data.ledger import VERSION
from meshmend.train.data.samples import LARGEST_CHECKSUM, Order, checksum, scrambled

Numbers = NDArray[np.int64]

# Where a table holds each value. All tables but `resumes` begin with the first four.
FILE, LINE, STEP, GENERATION, POSITION = range(5)
START, STOP, CHECKSUM = 4, 5, 7
_NO_CHECKSUM: Final = -1  # in the column CHECKSUM: the line has none
_STEP_BITS: Final = 32
_STEP_MASK: Final = (1 << _STEP_BITS) - 1
_FOR_EVER: Final = 2**62
_MOST_FAULTS: Final = 20  # sentences at most, so that a run that is all wrong stays readable


class Restore(NamedTuple):
    """A generation that went back to `step` although step `lost` had been done."""

    generation: int
    step: int
    lost: int


@dataclass(frozen=True)
class Audit:
    """What the ledgers of a job prove.

    steps: the number of steps that count.
    used, lost, repeated: places in the row of samples that those steps used, left out, used again.
    hashed: of the steps that count, the number with a hash of the state.
    split: the steps after which two chips had different hashes.
    redone: the number of steps that were done again after a restore.
    restores: the restores that the ledgers report.
    faults: sentences, one for each contradiction to a single history.
    unchecked: sentences, one for each gap in a ledger.
    is_incomplete: whether the last lines of a ledger are missing.
    without_ledger: the chips that were members, but have no ledger of it.
    resumed: the step of the checkpoint that the job began with; 0 if there was none.
    """

    steps: int
    used: int
    lost: int
    repeated: int
    hashed: int
    split: tuple[int, ...]
    redone: int = 0
    restores: tuple[Restore, ...] = ()
    faults: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    is_incomplete: bool = False
    without_ledger: tuple[Chip, ...] = ()
    resumed: int = 0

    @property
    def replicas_equal(self) -> bool | None:
        """Whether all chips had the same state after each step, bit for bit; None: unknown."""
        if self.split:
            return False
        return True if self.hashed and not self.is_incomplete else None

    @property
    def is_wrong(self) -> bool:
        """Whether the ledgers prove that something went wrong."""
        return bool(self.lost or self.repeated or self.split or self.faults)


@dataclass(frozen=True)
class _LedgerFile:
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
class _LedgerLines:
    """All lines, one table per kind of line; `table[STEP]` is an array of all steps.

    tries: file, line, step, generation, start, stop, batch, checksum.
    dones: file, line, step, generation, position.
    holds: file, line, step, generation; the hashes are in `bits`.
    backs: file, line, step, generation.
    resumes: file, line, step, position.
    """

    files: tuple[_LedgerFile, ...]
    tries: Numbers
    dones: Numbers
    holds: Numbers
    bits: NDArray[np.bytes_]
    backs: Numbers
    resumes: Numbers


class _Gap(NamedTuple):
    """A chip's ledger may lack lines between two keys, which are those of `_keys_of`."""

    chip: Chip
    first: int
    last: int
    error: int


class _Members(NamedTuple):
    """The members of a generation, the step after which it began, and the last that it did."""

    chips: tuple[Chip, ...]
    begin: int
    last: int


class _Span(NamedTuple):
    """The steps that one generation did: those after `before`, up to `last`."""

    generation: int
    before: int
    last: int

    @property
    def begin(self) -> int:
        """The key of its first step, as `_keys_of` makes them."""
        return self.generation << _STEP_BITS | self.before + 1

    @property
    def end(self) -> int:
        """The key of its last step."""
        return self.generation << _STEP_BITS | self.last


def audit(folder: Path, events: Iterable[Event] = ()) -> Audit:
    """Return what the ledgers in a folder prove; they must all be of one job.

    The events of the job tell who was a member of which generation: a member without a ledger is
    then found, and its steps are not checked. Without events, only the files that exist count.

    Raises:
        InputError: a line cannot be read. An incomplete last line is ignored.
    """
    lines, members = _read_ledgers(folder), _members_of(events)
    written = _gaps_in(lines)
    absent = _without_ledger(lines, members, written)
    gaps = written + absent
    spans = _spans(lines.dones)
    restores, faults = _beginnings(spans, lines, gaps)
    faults += _chips_that_went_back(lines)
    faults += _missing_steps(lines.dones, spans, gaps) + _different_ends(lines.dones)
    faults += _wrong_orders(lines) + _wrong_samples(lines)
    counting = _counting(lines.dones, spans)
    used, lost, repeated = _count_samples(lines, counting, gaps)
    hashed, split = _hashes(lines, counting)
    return Audit(
        steps=counting.shape[1],
        used=used,
        lost=lost,
        repeated=repeated,
        hashed=hashed,
        split=split,
        redone=sum(restore.lost - restore.step for restore in restores),
        restores=tuple(restores),
        faults=tuple(faults[:_MOST_FAULTS]),
        unchecked=(*_absence_sentences(absent, members), *(_gap_sentence(gap) for gap in written)),
        is_incomplete=bool(absent) or any(gap.last == _FOR_EVER for gap in written),
        without_ledger=tuple(sorted({gap.chip for gap in absent})),
        resumed=max(lines.resumes[STEP].tolist(), default=0),
    )


def _members_of(events: Iterable[Event]) -> dict[int, _Members]:
    """Return the members of all generations that the events of a job tell of, by number."""
    found: dict[int, _Members] = {}
    for event in events:
        if isinstance(event, GenerationBegan):
            found[event.number] = _Members(event.chips, event.step, event.step)
        elif isinstance(event, StepFinished) and event.generation in found:
            before = found[event.generation]
            found[event.generation] = before._replace(last=max(before.last, event.step))
    return found


def _without_ledger(
    lines: _LedgerLines, members: Mapping[int, _Members], gaps: Sequence[_Gap]
) -> list[_Gap]:
    """Return a gap for each member of a generation that did steps and that has no line of it.

    A sum needs every member. A job writes a line before each sum, so one step is enough to miss
    one. A loop without samples writes it after the step: only the next step shows that all have
    done it. A ledger that says itself that lines are missing is no reason for a second sentence.
    """
    n_needed = 1 if lines.tries.shape[1] else 2
    found: set[tuple[Chip, int]] = set()
    for table in (lines.tries, lines.dones):
        pairs = np.unique(table[[FILE, GENERATION]], axis=1).T.tolist()
        found |= {(lines.files[file].chip, number) for file, number in pairs}
    result = []
    for number, each in sorted(members.items()):
        if each.last - each.begin < n_needed:
            continue
        first, last = number << _STEP_BITS, number << _STEP_BITS | _STEP_MASK
        for chip in each.chips:
            known = [gap for gap in gaps if gap.chip == chip]
            if (chip, number) not in found and not _is_gap_between(known, first, last):
                result.append(_Gap(chip, first, last, 0))
    return result


def _absence_sentences(absent: Sequence[_Gap], members: Mapping[int, _Members]) -> list[str]:
    """Return a sentence for each generation of which members have no ledger."""
    chips: dict[int, list[Chip]] = {}
    for gap in absent:
        chips.setdefault(gap.first >> _STEP_BITS, []).append(gap.chip)
    return [
        f"no ledger tells what chip {', '.join(map(str, each))} did in steps "
        f"{members[number].begin + 1} to {members[number].last}, as a member of generation "
        f"{number}: it could not be made, or is gone; these steps are not checked"
        for number, each in chips.items()
    ]


def _gap_sentence(gap: _Gap) -> str:
    first = gap.first & _STEP_MASK
    if gap.last == _FOR_EVER:
        why = os.strerror(gap.error) if gap.error else "writing failed"
        ends = f"the ledger of chip {gap.chip} ends at step {first}"
        return f"{ends}: {why}; later steps are not checked"
    return (
        f"the ledger of chip {gap.chip} lacks lines of steps {first} to {gap.last & _STEP_MASK}: "
        "writing failed; these steps are not checked"
    )


def _spans(dones: Numbers) -> list[_Span]:
    """Return one span for each generation that finished a step, in order."""
    generations, inverse = np.unique(dones[GENERATION], return_inverse=True)
    first = np.full(len(generations), _FOR_EVER)
    last = np.zeros(len(generations), dtype=np.int64)
    np.minimum.at(first, inverse, dones[STEP])
    np.maximum.at(last, inverse, dones[STEP])
    columns = (generations.tolist(), (first - 1).tolist(), last.tolist())
    return [_Span(*row) for row in zip(*columns, strict=True)]


def _beginnings(
    spans: Sequence[_Span], lines: _LedgerLines, gaps: Sequence[_Gap]
) -> tuple[list[Restore], list[str]]:
    """Return the restores, and a sentence for each generation that begins at a wrong step."""
    restored = set(zip(lines.backs[GENERATION].tolist(), lines.backs[STEP].tolist(), strict=True))
    resumed = {0, *lines.resumes[STEP].tolist()}
    restores: list[Restore] = []
    faults: list[str] = []
    earlier: _Span | None = None
    for span in spans:
        since = earlier.generation if earlier else -1
        back = {step for number, step in restored if since < number <= span.generation}
        if earlier is None:
            if span.before not in resumed | back and not _is_gap_between(gaps, 0, span.begin):
                faults.append(
                    f"generation {span.generation} begins after step {span.before}, but no ledger "
                    "reports a resume"
                )
        elif span.before in back and span.before <= earlier.last:
            restores.append(Restore(span.generation, span.before, earlier.last))
        elif span.before not in (earlier.last, earlier.last - 1) and not _is_gap_between(
            gaps, earlier.end, span.begin
        ):
            faults.append(_jump_sentence(earlier, span))
        earlier = span
    return restores, faults


def _jump_sentence(earlier: _Span, span: _Span) -> str:
    if span.before > earlier.last:
        what = "no ledger has the steps between"
    else:
        what = f"{earlier.last - span.before} steps were lost, but no ledger reports a restore"
    return (
        f"generation {span.generation} begins after step {span.before}, but generation "
        f"{earlier.generation} had done step {earlier.last}: {what}"
    )


def _chips_that_went_back(lines: _LedgerLines) -> list[str]:
    """Return a sentence for each chip that went back to an earlier step, or skipped one.

    Within a generation, each step is the one after the step before. A later generation may do the
    last step again.
    """
    dones = lines.dones
    if not dones.shape[1]:
        return []
    before, after = dones[:, :-1], dones[:, 1:]
    same = before[FILE] == after[FILE]
    is_next = after[STEP] == before[STEP] + 1
    within = after[GENERATION] == before[GENERATION]
    later = (after[GENERATION] > before[GENERATION]) & (after[STEP] >= before[STEP])
    suspects = np.flatnonzero(same & ~np.where(within, is_next, later))
    found = []
    for place in suspects[: 10 * _MOST_FAULTS].tolist():
        old, new = before[:, place], after[:, place]
        file = lines.files[int(old[FILE])]
        numbers = lines.backs[GENERATION]
        is_restored = np.any((numbers > old[GENERATION]) & (numbers <= new[GENERATION]))
        if not is_restored and not any(old[LINE] < gap < new[LINE] for gap in file.gaps):
            found.append(
                f"chip {file.chip} did step {new[STEP]} of generation {new[GENERATION]} after "
                f"step {old[STEP]} of generation {old[GENERATION]}"
            )
    return found


def _missing_steps(dones: Numbers, spans: Sequence[_Span], gaps: Sequence[_Gap]) -> list[str]:
    """Return a sentence for each generation that lacks a step between its first and its last."""
    numbers, counts = np.unique(np.unique(_keys_of(dones)) >> _STEP_BITS, return_counts=True)
    n_done = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    return [
        f"generation {span.generation} did steps {span.before + 1} to {span.last}, but the ledgers "
        f"lack {span.last - span.before - n_done[span.generation]} of them"
        for span in spans
        if n_done[span.generation] < span.last - span.before
        and not _is_gap_between(gaps, span.begin, span.end)
    ]


def _different_ends(dones: Numbers) -> list[str]:
    """Return a sentence for each step that ends at different samples on two chips."""
    keys = _keys_of(dones)
    order = np.lexsort((dones[POSITION], keys))
    keys, positions = keys[order], dones[POSITION][order]
    differ = np.flatnonzero((keys[1:] == keys[:-1]) & (positions[1:] != positions[:-1]))
    return [
        f"step {keys[at] & _STEP_MASK} of generation {keys[at] >> _STEP_BITS} ends at sample "
        f"{positions[at]} for one chip, and at {positions[at + 1]} for another"
        for at in differ[:_MOST_FAULTS].tolist()
    ]


def _counting(dones: Numbers, spans: Sequence[_Span]) -> Numbers:
    """Return the lines of the steps that count, one for each step, in order.

    A step counts unless a later generation began with that step or an earlier one.
    """
    limits, limit = np.empty(len(spans), dtype=np.int64), _FOR_EVER
    for at in reversed(range(len(spans))):
        limits[at] = limit
        limit = min(limit, spans[at].before)
    numbers = np.array([span.generation for span in spans], dtype=np.int64)
    kept = dones[:, dones[STEP] <= limits[np.searchsorted(numbers, dones[GENERATION])]]
    _, rows = np.unique(kept[STEP], return_index=True)
    return kept[:, rows]


def _hashes(lines: _LedgerLines, counting: Numbers) -> tuple[int, tuple[int, ...]]:
    """Return the number of hashed steps, and the steps after which two chips had different hashes.

    A hash does not count if its generation is earlier than the one in which the step counts: that
    state was lost.
    """
    holds = lines.holds
    if not counting.shape[1] or not holds.shape[1]:
        return 0, ()
    _, bits = np.unique(lines.bits, return_inverse=True)
    place = np.minimum(np.searchsorted(counting[STEP], holds[STEP]), counting.shape[1] - 1)
    is_step = counting[STEP][place] == holds[STEP]
    counts = is_step & (holds[GENERATION] >= counting[GENERATION][place])
    steps = np.unique(holds[STEP][counts])
    parts = np.char.rpartition(lines.bits, b".")[:, 0]
    split: set[int] = set()
    for part in np.unique(parts):  # only chips with the same part of the state hold the same
        of_it = parts == part
        counts_too = counts & of_it
        split.update(_keys_with_two_values(holds[STEP][counts_too], bits[counts_too]))
        keys = _keys_with_two_values(_keys_of(holds[:, of_it]), bits[of_it])
        split.update(key & _STEP_MASK for key in keys)
    return len(steps), tuple(sorted(split))


def _keys_with_two_values(keys: Numbers, values: NDArray[np.int64]) -> list[int]:
    """Return the keys that have two different values."""
    order = np.lexsort((values, keys))
    keys, values = keys[order], values[order]
    differ = (keys[1:] == keys[:-1]) & (values[1:] != values[:-1])
    found: list[int] = np.unique(keys[1:][differ]).tolist()
    return found


def _count_samples(
    lines: _LedgerLines, counting: Numbers, gaps: Sequence[_Gap]
) -> tuple[int, int, int]:
    """Return how many places of the row the steps that count used, left out, and used again."""
    ends = counting[POSITION]
    begins = np.concatenate([_first_position(lines, counting), ends[:-1]])[: len(ends)]
    number, tries = _tries_that_count(lines.tries, counting)
    starts, stops = tries[START], tries[STOP]
    edges = np.searchsorted(number, np.arange(len(ends) + 1))  # where the tries of a step begin
    is_first = np.zeros(len(number), dtype=bool)
    is_first[edges[:-1][edges[:-1] < edges[1:]]] = True
    reached = np.where(is_first, begins[number], np.roll(stops, 1))
    has_tries = edges[1:] > edges[:-1]
    is_tiled = np.where(has_tries, False, begins == ends)
    is_tiled[has_tries] = stops[edges[1:][has_tries] - 1] == ends[has_tries]
    np.logical_and.at(is_tiled, number, starts == reached)
    used, lost, repeated = int((ends - begins)[is_tiled].sum()), 0, 0
    keys = _keys_of(counting)
    for step in np.flatnonzero(~is_tiled).tolist():
        rows = slice(edges[step], edges[step + 1])
        shares = zip(starts[rows].tolist(), stops[rows].tolist(), strict=True)
        counts = _tiling(list(shares), int(begins[step]), int(ends[step]))
        is_known = not _is_gap_between(gaps, int(keys[step]), int(keys[step]))
        used, repeated = used + counts[0], repeated + counts[2]
        lost += counts[1] if is_known else 0
    return used, lost, repeated


def _tries_that_count(tries: Numbers, counting: Numbers) -> tuple[Numbers, Numbers]:
    """Return the tries of the steps that count, sorted by step and start, as the second value.

    The first value is, for each try, the index of its step in `counting`. Of the tries of one
    worker at one step of a generation only the last counts: a check had made the others void.
    """
    if not counting.shape[1]:
        return np.empty(0, dtype=np.int64), tries[:, :0]
    keys = _keys_of(tries)
    is_void = (tries[FILE, :-1] == tries[FILE, 1:]) & (keys[:-1] == keys[1:])
    tries = tries[:, ~np.append(is_void, False)] if is_void.any() else tries
    place = np.minimum(np.searchsorted(counting[STEP], tries[STEP]), counting.shape[1] - 1)
    counts = _keys_of(counting)[place] == _keys_of(tries)
    place, kept = place[counts], tries[:, counts]
    order = np.lexsort((kept[STOP], kept[START], place))
    return place[order], kept[:, order]


def _first_position(lines: _LedgerLines, counting: Numbers) -> Numbers:
    """Return where the first step that counts begins in the row of samples, as an array of one."""
    if not counting.shape[1] or counting[STEP][0] == 1:
        return np.zeros(1, dtype=np.int64)
    resumed = lines.resumes[3][lines.resumes[STEP] == counting[STEP][0] - 1]
    starts = lines.tries[START][lines.tries[STEP] == counting[STEP][0]]
    return np.append(resumed, min(starts.tolist(), default=0))[:1]


def _tiling(shares: Sequence[tuple[int, int]], start: int, stop: int) -> tuple[int, int, int]:
    """Return how many places from `start` to `stop` the shares use, leave out, and use again."""
    used = lost = repeated = 0
    at = start
    for first, last in sorted(shares):
        lost += max(0, first - at)
        repeated += max(0, min(at, last) - first)
        used += max(0, last - max(first, at))
        at = max(at, last)
    return used, lost + max(0, stop - at), repeated + max(0, at - stop)


def _wrong_orders(lines: _LedgerLines) -> list[str]:
    """Return a sentence for each chip with another order of samples than most chips."""
    usual = _usual_order(lines)
    return [
        f"chip {file.chip} used {file.n_samples} samples in the order of seed {file.seed}, but "
        f"most chips used {usual.n_samples} in that of seed {usual.seed}"
        for file in map(lines.files.__getitem__, _files_with_order(lines))
        if usual is not None and (file.n_samples, file.seed) != (usual.n_samples, usual.seed)
    ]


def _wrong_samples(lines: _LedgerLines) -> list[str]:
    """Return a sentence for each chip whose samples were not those of its share."""
    usual, tries = _usual_order(lines), lines.tries
    if usual is None:
        return []
    known = tries[:, tries[CHECKSUM] != _NO_CHECKSUM]
    wrong = known[:, _checksums(usual, known[START], known[STOP]) != known[CHECKSUM]]
    found = []
    for file in np.unique(wrong[FILE]).tolist():
        steps = np.unique(wrong[STEP][wrong[FILE] == file])
        found.append(
            f"chip {lines.files[file].chip} used other samples than those of its share in "
            f"{len(steps)} steps, first in step {steps[0]}"
        )
    return found


def _files_with_order(lines: _LedgerLines) -> list[int]:
    """Return the files that have a try and name the order of samples."""
    files = np.unique(lines.tries[FILE]).tolist()
    return [file for file in files if lines.files[file].n_samples]


def _usual_order(lines: _LedgerLines) -> Order | None:
    """Return the order of samples that most chips used, or None if no file names one."""
    orders = [
        (lines.files[file].n_samples, lines.files[file].seed) for file in _files_with_order(lines)
    ]
    return Order(*max(sorted(set(orders)), key=orders.count)) if orders else None


def _checksums(order: Order, starts: Numbers, stops: Numbers) -> Numbers:
    """Return the checksum of the samples from each start to before each stop of the row."""
    points, inverse = np.unique(np.concatenate([starts, stops]), return_inverse=True)
    epochs, firsts = np.unique(points // order.n_samples, return_index=True)
    all_samples = checksum(np.arange(order.n_samples))
    totals = np.empty(len(points), dtype=np.uint64)  # from the beginning of the row
    bounds = [*firsts.tolist(), len(points)]
    for epoch, low, high in zip(epochs.tolist(), bounds, bounds[1:], strict=False):
        begin = epoch * order.n_samples
        hashes = scrambled(order.samples(begin, int(points[high - 1])))
        total = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(hashes, dtype=np.uint64)])
        earlier = np.uint64(epoch * all_samples & LARGEST_CHECKSUM)
        totals[low:high] = total[points[low:high] - begin] + earlier
    low, high = totals[inverse[: len(starts)]], totals[inverse[len(starts) :]]
    sums: Numbers = ((high - low) & np.uint64(LARGEST_CHECKSUM)).astype(np.int64)
    return sums


def _gaps_in(lines: _LedgerLines) -> list[_Gap]:
    """Return the gaps of all ledgers, at which lines could not be written."""
    found: list[_Gap] = []
    for number, file in enumerate(lines.files):
        if not file.gaps and not file.errno:
            continue
        parts = [
            table[:4, table[FILE] == number] for table in (lines.tries, lines.dones, lines.holds)
        ]
        table = np.concatenate(parts, axis=1)
        table = table[:, np.argsort(table[LINE])]
        keys = [0, *_keys_of(table).tolist(), _FOR_EVER]
        places = [*file.gaps, *([_FOR_EVER] if file.errno else [])]
        for place in places:
            at = int(np.searchsorted(table[LINE], place))
            found.append(_Gap(file.chip, keys[at], keys[at + 1], file.errno))
    return found


def _is_gap_between(gaps: Sequence[_Gap], first: int, last: int) -> bool:
    """Whether a ledger may lack lines between two keys, both included."""
    return any(gap.first <= last and first <= gap.last for gap in gaps)


def _keys_of(table: Numbers) -> Numbers:
    """Return one number for the generation and step of each line; a later step has a larger key."""
    keys: Numbers = (table[GENERATION] << _STEP_BITS) | table[STEP]
    return keys


_HEAD = re.compile(rb"ledger (\d+) (\d+(?:,\d+)*) (\d+) (\d+) (\d{3})\n")
_KEY = rb" \d{1,9} \d{1,10}"  # step and generation

_LINE = (
    rb"(?:try" + _KEY + rb"(?: \d{1,18}){3} (?:\d{1,18}|-)|done" + _KEY + rb" \d{1,18}"
    rb"|hold" + _KEY + rb" (?:\d{1,9}\.)?\w{1,64}|resume \d{1,9} \d{1,18}|back" + _KEY + rb"|gap)\n"
)

_LINES = re.compile(rb"(?>" + _LINE + rb")*+")  # possessive, never backtracks: linear in the bytes

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

    file: _LedgerFile
    tables: dict[str, Numbers]
    bits: NDArray[np.bytes_]


def _read_ledgers(folder: Path) -> _LedgerLines:
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
    return _LedgerLines(
        files=tuple(part.file for part in parts),
        tries=tables["try"].T,
        dones=tables["done"].T,
        holds=tables["hold"].T,
        bits=bits,
        backs=tables["back"].T,
        resumes=tables["resume"].T,
    )


def _read(path: Path, number: int) -> _Part:
    """Return the lines of one ledger; an empty file counts as one whose disk was full.

    One that cannot be read proves nothing, as if nothing had been written to it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        return _without_lines(path, error.errno or errno.EIO)
    data = data[: data.rfind(b"\n") + 1]  # a killed worker may leave half a line
    if not data:
        return _without_lines(path, errno.ENOSPC)
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
    file = _LedgerFile(chip, int(head[3]), int(head[4]), int(head[5]), gaps)
    return _Part(file, tables, np.array(bits, dtype="S"))


def _without_lines(path: Path, error: int) -> _Part:
    chip = tuple(int(word) for word in re.findall(r"\d+", path.name.split(".")[0]))
    return _Part(_LedgerFile(chip, 0, 0, error, ()), dict(_EMPTY), np.empty(0, dtype="S1"))


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
        text = b" ".join(words).replace(b" -", b" %d" % _NO_CHECKSUM)
        table[:, 2:] = np.fromstring(text, dtype=np.int64, sep=" ").reshape(-1, n_numbers)
    return table
