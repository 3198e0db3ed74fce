"""The end of a run: its last event, which sums it up, and its report."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshmend.files import write_whole
from meshmend.membership.events import RunEnded, SampleCounts, StateRestored
from meshmend.membership.job_view import Recovery
from meshmend.pages.report.training_page import training_page
from meshmend.pages.report.training_run import TrainingRun
from meshmend.train.data.audit import Audit

_log = logging.getLogger(__name__)


def end_event(
    faults: Sequence[Recovery],
    chip_counts: Sequence[int],
    found: Audit,
    so_far: TrainingRun,
    evaluation: Mapping[str, float],
) -> RunEnded:
    """Return the last event of a run, with its figures from its events and its ledgers.

    `chip_counts` has the number of chips of each generation.
    """
    chips = [count for count, _ in itertools.groupby(chip_counts)]
    return RunEnded(
        steps=so_far.n_done,
        first_loss=so_far.first_loss,
        final_loss=so_far.final_loss,
        replicas_equal=found.replicas_equal,
        samples=_sample_counts(found),
        chips=tuple(chips),
        faults=tuple(fault.event() for fault in faults),
        evaluation=evaluation,
        redone=found.redone,
        restores=tuple(StateRestored(each.step, each.lost) for each in found.restores),
        history_faults=found.faults,
        unchecked=found.unchecked,
        missing_checkpoints=so_far.missing_checkpoints,
    )


def _sample_counts(found: Audit) -> SampleCounts | None:
    """Return the counts of samples; None if there is no ledger, and none was counted.

    If a ledger is incomplete and nothing else is wrong, only the used samples are known: the result
    has no counts of lost and repeated samples.
    """
    if found.unchecked and not found.lost and not found.repeated:
        return SampleCounts(found.used) if found.used else None
    return SampleCounts(found.used, found.lost, found.repeated)


def write_report(run: TrainingRun, folder: Path) -> str | None:
    """Write the report and return its path; if it cannot be written, log why and return None."""
    path = folder / "report.html"
    try:
        write_whole(path, training_page(run), is_durable=False)
    except OSError as error:
        _log.error("the report cannot be written to %s: %s", path, error.strerror)
        return None
    return str(path)
