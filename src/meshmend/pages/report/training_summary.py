"""The summary that a run prints at its end: its figures, and a table of its faults."""

import math
from collections.abc import Sequence

from meshmend.membership.events import FaultMissed
from meshmend.pages.report.event_words import (
    event_words,
    fabric_words,
    model_words,
    rate_words,
    restore_words,
    seconds,
)
from meshmend.pages.report.training_run import RunFault, TrainingRun
from meshmend.units import counted

_MAX_ROWS = 20


def train_summary(run: TrainingRun) -> str:
    """Return the summary as plain lines: steps, loss, samples, replicas, recoveries, faults."""
    of_all = f" of {run.n_steps}" if run.n_steps else ""
    if run.resumed_after:
        of_all += f", resumed after step {run.resumed_after},"
    figures = {
        "trained": f"{model_words(run.start)} on {run.mesh}",
        "steps": f"{run.n_done}{of_all} in {seconds(run.duration_s)}{_rate(run)}",
        "loss": _loss(run),
        "samples": _samples(run),
        "chips": _chips(run),
        "replicas": {True: "equal bit for bit", False: "DIFFER", None: "not checked"}[
            run.replicas_equal
        ],
        "recovery": _recovery(run),
    }
    if run.fabric is not None:
        figures["fabric"] = f"{fabric_words(run.fabric)}, as measured"
    if run.end is None:
        figures["end"] = "none: the run was stopped or still runs"
    lines = [f"{name:<10}{value}" for name, value in figures.items()]
    missed = [timed.event for timed in run.other_events if isinstance(timed.event, FaultMissed)]
    lines += [f"{'missed':<10}{event_words(event)}" for event in missed]
    lines += [f"{'redone':<10}{restore_words(restore)}" for restore in run.restores]
    lines += [f"{'WRONG':<10}{words}" for words in run.history_faults]
    lines += [f"{'unchecked':<10}{words}" for words in run.unchecked[:_MAX_ROWS]]
    if run.missing_checkpoints:
        steps = ", ".join(map(str, run.missing_checkpoints))
        lines.append(f"{'MISSING':<10}checkpoints that could not be written: of steps {steps}")
    return "\n".join([*lines, *_table(run.faults)])


def _rate(run: TrainingRun) -> str:
    rate = run.mean_samples_per_s
    return f", {rate_words(rate)} samples/s" if math.isfinite(rate) else ""


def _loss(run: TrainingRun) -> str:
    if not len(run.steps):
        return "-"
    reached = ", ".join(f"{name} {value:.4g}" for name, value in run.evaluation.items())
    evaluation = f"; on held-out samples: {reached}" if reached else ""
    return f"{run.first_loss:.4g} to {run.final_loss:.4g}{evaluation}"


def _samples(run: TrainingRun) -> str:
    samples = run.samples
    if samples.lost is None:
        return f"{samples.used} used in the finished steps"
    return f"{samples.used} used, {samples.lost} lost, {samples.repeated} repeated"


def _chips(run: TrainingRun) -> str:
    if len(run.chips) > 8:
        return f"{min(run.chips)} to {max(run.chips)}, {counted(len(run.chips) - 1, 'change')}"
    return ", ".join(map(str, run.chips)) or "none"


def _recovery(run: TrainingRun) -> str:
    if not run.recoveries_s:
        return "none: no faults" if not run.faults else "-"
    n_done = counted(len(run.recoveries_s), "fault")
    median, worst = seconds(run.median_recovery_s), seconds(run.worst_recovery_s)
    words = f"median {median}, worst {worst}, of {n_done}"
    if run.repairs_s:
        n_back = counted(len(run.repairs_s), "repair")
        words += f"; {n_back}, back after at most {seconds(max(run.repairs_s))}"
    return words


def _table(faults: Sequence[RunFault]) -> list[str]:
    """Return an aligned table; if there are many faults, those with the slowest recovery."""
    if not faults:
        return []
    # A fault without recovery counts as slowest. A coordinator fault needs no recovery.
    never_recovered = {True: 0.0, False: math.inf}
    slowest = sorted(
        faults,
        key=lambda f: -(f.recovered_s if f.is_recovered else never_recovered[f.is_of_coordinator]),
    )
    shown = sorted(slowest[:_MAX_ROWS], key=lambda fault: fault.at_s)
    rows = [("fault", "at step", "detected", "recovered")]
    rows += [
        (
            fault.fault,
            "-" if fault.at_step is None else str(fault.at_step),
            seconds(fault.detected_s),
            seconds(fault.recovered_s),
        )
        for fault in shown
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"  {row[0]:<{widths[0]}}" + "".join(f"  {row[c]:>{widths[c]}}" for c in (1, 2, 3))
        for row in rows
    ]
    if left_out := len(faults) - len(shown):
        lines.append(f"  and {left_out} more that recovered faster; the report has them all")
    return ["", *lines]
