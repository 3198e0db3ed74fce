"""Checks which samples the steps of a job used: their places in the row, and their checksums.

Reads the lines of all ledgers. `history_check` proves that the steps are one history.
"""

from collections.abc import Sequence

import numpy as np

from meshmend.train.data.ledger_lines import (
    CHECKSUM,
    FILE,
    NO_CHECKSUM,
    POSITION,
    START,
    STEP,
    STOP,
    Gap,
    LedgerLines,
    Numbers,
    is_gap_between,
    keys_of,
)
from meshmend.train.data.samples import LARGEST_CHECKSUM, Order, checksum, scrambled


def count_samples(
    lines: LedgerLines, counting: Numbers, gaps: Sequence[Gap]
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
    keys = keys_of(counting)
    for step in np.flatnonzero(~is_tiled).tolist():
        rows = slice(edges[step], edges[step + 1])
        shares = zip(starts[rows].tolist(), stops[rows].tolist(), strict=True)
        counts = _tiling(list(shares), int(begins[step]), int(ends[step]))
        is_known = not is_gap_between(gaps, int(keys[step]), int(keys[step]))
        used, repeated = used + counts[0], repeated + counts[2]
        lost += counts[1] if is_known else 0
    return used, lost, repeated


def other_orders(lines: LedgerLines) -> list[str]:
    """Return a sentence for each chip with another order of samples than most chips."""
    usual = _usual_order(lines)
    return [
        f"chip {file.chip} used {file.n_samples} samples in the order of seed {file.seed}, but "
        f"most chips used {usual.n_samples} in that of seed {usual.seed}"
        for file in map(lines.files.__getitem__, _files_with_order(lines))
        if usual is not None and (file.n_samples, file.seed) != (usual.n_samples, usual.seed)
    ]


def other_samples(lines: LedgerLines) -> list[str]:
    """Return a sentence for each chip whose samples were not those of its share."""
    usual, tries = _usual_order(lines), lines.tries
    if usual is None:
        return []
    known = tries[:, tries[CHECKSUM] != NO_CHECKSUM]
    wrong = known[:, _checksums(usual, known[START], known[STOP]) != known[CHECKSUM]]
    found = []
    for file in np.unique(wrong[FILE]).tolist():
        steps = np.unique(wrong[STEP][wrong[FILE] == file])
        found.append(
            f"chip {lines.files[file].chip} used other samples than those of its share in "
            f"{len(steps)} steps, first in step {steps[0]}"
        )
    return found


def _tries_that_count(tries: Numbers, counting: Numbers) -> tuple[Numbers, Numbers]:
    """Return the tries of the steps that count, sorted by step and start, as the second value.

    The first value is, for each try, the index of its step in `counting`.
    """
    if not counting.shape[1]:
        return np.empty(0, dtype=np.int64), tries[:, :0]
    place = np.minimum(np.searchsorted(counting[STEP], tries[STEP]), counting.shape[1] - 1)
    counts = keys_of(counting)[place] == keys_of(tries)
    place, kept = place[counts], tries[:, counts]
    order = np.lexsort((kept[STOP], kept[START], place))
    return place[order], kept[:, order]


def _first_position(lines: LedgerLines, counting: Numbers) -> Numbers:
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


def _files_with_order(lines: LedgerLines) -> list[int]:
    """Return the files that have a try and name the order of samples."""
    files = np.unique(lines.tries[FILE]).tolist()
    return [file for file in files if lines.files[file].n_samples]


def _usual_order(lines: LedgerLines) -> Order | None:
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
