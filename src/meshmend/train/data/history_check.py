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
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshmend.membership.events import Event, GenerationBegan, StepFinished
from meshmend.topology.failures import Chip
from meshmend.train.data.ledger_lines import (
    FILE,
    FOR_EVER,
    GENERATION,
    LINE,
    POSITION,
    STEP,
    STEP_BITS,
    STEP_MASK,
    Gap,
    LedgerLines,
    Numbers,
    gaps_in,
    is_gap_between,
    keys_of,
)
from meshmend.train.data.sample_check import count_samples, other_orders, other_samples

_MOST_FAULTS: Final = 20  # sentences at most, so that a run that is all wrong stays readable


class Restore(NamedTuple):
    """A generation that went back to `step` although step `lost` had been done."""

    generation: int
    step: int
    lost: int


class Members(NamedTuple):
    """The members of a generation, the step after which it began, and the last that it did."""

    chips: tuple[Chip, ...]
    begin: int
    last: int


def members_of(events: Iterable[Event]) -> dict[int, Members]:
    """Return the members of all generations that the events of a job tell of, by number."""
    found: dict[int, Members] = {}
    for event in events:
        if isinstance(event, GenerationBegan):
            found[event.number] = Members(event.chips, event.step, event.step)
        elif isinstance(event, StepFinished) and event.generation in found:
            before = found[event.generation]
            found[event.generation] = before._replace(last=max(before.last, event.step))
    return found


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


class _Span(NamedTuple):
    """The steps that one generation did: those after `before`, up to `last`."""

    generation: int
    before: int
    last: int

    @property
    def begin(self) -> int:
        """The key of its first step, as `keys_of` makes them."""
        return self.generation << STEP_BITS | self.before + 1

    @property
    def end(self) -> int:
        """The key of its last step."""
        return self.generation << STEP_BITS | self.last


def check_history(lines: LedgerLines, members: Mapping[int, Members] | None = None) -> Audit:
    """Return what the lines of all ledgers prove; `members` are those of each generation."""
    members = members or {}
    written = gaps_in(lines)
    absent = _without_ledger(lines, members, written)
    gaps = written + absent
    spans = _spans(lines.dones)
    restores, faults = _generations(spans, lines, gaps)
    faults += _chips_that_went_back(lines)
    faults += _holes(lines.dones, spans, gaps) + _positions(lines.dones)
    faults += other_orders(lines) + other_samples(lines)
    counting = _counting(lines.dones, spans)
    used, lost, repeated = count_samples(lines, counting, gaps)
    hashed, split = _bits(lines, counting)
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
        unchecked=(*_absence_words(absent, members), *(_gap_words(gap) for gap in written)),
        is_incomplete=bool(absent) or any(gap.last == FOR_EVER for gap in written),
        without_ledger=tuple(sorted({gap.chip for gap in absent})),
        resumed=max(lines.resumes[STEP].tolist(), default=0),
    )


def _without_ledger(
    lines: LedgerLines, members: Mapping[int, Members], gaps: Sequence[Gap]
) -> list[Gap]:
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
        first, last = number << STEP_BITS, number << STEP_BITS | STEP_MASK
        for chip in each.chips:
            known = [gap for gap in gaps if gap.chip == chip]
            if (chip, number) not in found and not is_gap_between(known, first, last):
                result.append(Gap(chip, first, last, 0))
    return result


def _absence_words(absent: Sequence[Gap], members: Mapping[int, Members]) -> list[str]:
    """Return a sentence for each generation of which members have no ledger."""
    chips: dict[int, list[Chip]] = {}
    for gap in absent:
        chips.setdefault(gap.first >> STEP_BITS, []).append(gap.chip)
    return [
        f"no ledger tells what chip {', '.join(map(str, each))} did in steps "
        f"{members[number].begin + 1} to {members[number].last}, as a member of generation "
        f"{number}: it could not be made, or is gone; these steps are not checked"
        for number, each in chips.items()
    ]


def _spans(dones: Numbers) -> list[_Span]:
    """Return one span for each generation that finished a step, in order."""
    generations, inverse = np.unique(dones[GENERATION], return_inverse=True)
    first = np.full(len(generations), FOR_EVER)
    last = np.zeros(len(generations), dtype=np.int64)
    np.minimum.at(first, inverse, dones[STEP])
    np.maximum.at(last, inverse, dones[STEP])
    columns = (generations.tolist(), (first - 1).tolist(), last.tolist())
    return [_Span(*row) for row in zip(*columns, strict=True)]


def _generations(
    spans: Sequence[_Span], lines: LedgerLines, gaps: Sequence[Gap]
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
            if span.before not in resumed | back and not is_gap_between(gaps, 0, span.begin):
                faults.append(
                    f"generation {span.generation} begins after step {span.before}, but no ledger "
                    "reports a resume"
                )
        elif span.before in back and span.before <= earlier.last:
            restores.append(Restore(span.generation, span.before, earlier.last))
        elif span.before not in (earlier.last, earlier.last - 1) and not is_gap_between(
            gaps, earlier.end, span.begin
        ):
            faults.append(_jump_words(earlier, span))
        earlier = span
    return restores, faults


def _jump_words(earlier: _Span, span: _Span) -> str:
    if span.before > earlier.last:
        what = "no ledger has the steps between"
    else:
        what = f"{earlier.last - span.before} steps were lost, but no ledger reports a restore"
    return (
        f"generation {span.generation} begins after step {span.before}, but generation "
        f"{earlier.generation} had done step {earlier.last}: {what}"
    )


def _chips_that_went_back(lines: LedgerLines) -> list[str]:
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


def _holes(dones: Numbers, spans: Sequence[_Span], gaps: Sequence[Gap]) -> list[str]:
    """Return a sentence for each generation that lacks a step between its first and its last."""
    numbers, counts = np.unique(np.unique(keys_of(dones)) >> STEP_BITS, return_counts=True)
    n_done = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    return [
        f"generation {span.generation} did steps {span.before + 1} to {span.last}, but the ledgers "
        f"lack {span.last - span.before - n_done[span.generation]} of them"
        for span in spans
        if n_done[span.generation] < span.last - span.before
        and not is_gap_between(gaps, span.begin, span.end)
    ]


def _positions(dones: Numbers) -> list[str]:
    """Return a sentence for each step that ends at different samples on two chips."""
    keys = keys_of(dones)
    order = np.lexsort((dones[POSITION], keys))
    keys, positions = keys[order], dones[POSITION][order]
    differ = np.flatnonzero((keys[1:] == keys[:-1]) & (positions[1:] != positions[:-1]))
    return [
        f"step {keys[at] & STEP_MASK} of generation {keys[at] >> STEP_BITS} ends at sample "
        f"{positions[at]} for one chip, and at {positions[at + 1]} for another"
        for at in differ[:_MOST_FAULTS].tolist()
    ]


def _counting(dones: Numbers, spans: Sequence[_Span]) -> Numbers:
    """Return the lines of the steps that count, one for each step, in order.

    A step counts unless a later generation began with that step or an earlier one.
    """
    limits, limit = np.empty(len(spans), dtype=np.int64), FOR_EVER
    for at in reversed(range(len(spans))):
        limits[at] = limit
        limit = min(limit, spans[at].before)
    numbers = np.array([span.generation for span in spans], dtype=np.int64)
    kept = dones[:, dones[STEP] <= limits[np.searchsorted(numbers, dones[GENERATION])]]
    _, rows = np.unique(kept[STEP], return_index=True)
    return kept[:, rows]


def _bits(lines: LedgerLines, counting: Numbers) -> tuple[int, tuple[int, ...]]:
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
    split = {
        *_with_two(holds[STEP][counts], bits[counts]),
        *(key & STEP_MASK for key in _with_two(keys_of(holds), bits)),
    }
    return len(steps), tuple(sorted(split))


def _with_two(keys: Numbers, values: NDArray[np.int64]) -> list[int]:
    """Return the keys that have two different values."""
    order = np.lexsort((values, keys))
    keys, values = keys[order], values[order]
    differ = (keys[1:] == keys[:-1]) & (values[1:] != values[:-1])
    found: list[int] = np.unique(keys[1:][differ]).tolist()
    return found


def _gap_words(gap: Gap) -> str:
    first = gap.first & STEP_MASK
    if gap.last == FOR_EVER:
        why = os.strerror(gap.error) if gap.error else "writing failed"
        ends = f"the ledger of chip {gap.chip} ends at step {first}"
        return f"{ends}: {why}; later steps are not checked"
    return (
        f"the ledger of chip {gap.chip} lacks lines of steps {first} to {gap.last & STEP_MASK}: "
        "writing failed; these steps are not checked"
    )
