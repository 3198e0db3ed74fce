"""Every event of a job as a sentence for users; also times, rates and chips as text.

Code that needs to know what happened reads the event's fields, never these sentences.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

from meshmend.membership import events
from meshmend.membership.faults.fault import FaultKind
from meshmend.membership.job_status import ChangeCause, FinishedChange
from meshmend.topology.fabric import figures_text
from meshmend.topology.failures import Chip, blocks_of
from meshmend.units import counted, format_time

_MODELS: Final = {"resnet": "ResNet", "bert": "BERT"}
_MANY: Final = 4  # if there are more blocks of chips or links than this, not all are named
_CAUSES: Final = {
    ChangeCause.LEFT: "the first chip left",
    ChangeCause.CONNECTED: "the last chip connected",
    ChangeCause.LINKS: "a link changed",
}
_COORDINATOR: Final = {
    events.CoordinatorState.LOST: "coordinator is lost; training goes on without it",
    events.CoordinatorState.BACK: "coordinator is back and knows the job again",
}
# What stands in the way of a job: whoever shows a job's events shows these.
TROUBLE: Final = (
    events.ConnectionRefused,
    events.WorkerTurnedAway,
    events.ChipsWaiting,
    events.StateLost,
    events.StateRestored,
    events.HistoryDropped,
    events.CoordinatorSuperseded,
    events.JobFailed,
    events.WriteFailed,
    events.NonFiniteSum,
    events.StatesDiffer,
    events.WrongResult,
    events.WrongSum,
    events.LinkSlow,
    events.ChipSlow,
    events.StateMended,
)


def event_words(event: events.Event) -> str:
    """Return one sentence for an event of any kind."""
    match event:
        case events.RunStarted():
            return _started(event)
        case events.WorkerArrived():
            return f"chip {event.chip} is ready"
        case events.WorkerLeft():
            return event.why or f"chip {event.chip} is gone"
        case events.WorkerTurnedAway():
            return f"chip {event.chip} turned away: {event.why}"
        case events.ConnectionRefused():
            return f"refused {event.who}: {event.why}"
        case events.ChipsWaiting():
            return f"{chips_words(event.chips)} waiting: {event.why}"
        case events.GenerationForming():
            n_chips = counted(len(event.chips), "chip")
            return f"generation {event.number} forms with {n_chips}: {event.why}"
        case events.GenerationBegan():
            return _began(event)
        case events.WorkerStepped():
            return f"chip {event.chip} finished step {event.step}"
        case events.StepFinished():
            return _step(event)
        case events.WorkerSaved() | events.CheckpointSaved():
            return f"checkpoint of step {event.step} in {event.path}"
        case events.WriteFailed():
            return f"chip {event.chip} cannot write {event.what}: {event.why}; training goes on"
        case events.NonFiniteSum():
            return _non_finite(event)
        case events.StatesDiffer():
            return _states_differ(event)
        case events.LinkSlow():
            return f"{event.link} has {event.speed:g} of the bandwidth; the job plans anew"
        case events.LinkRestored():
            return f"{event.link} is as fast as the others again; the job plans anew"
        case events.FabricMeasured():
            return f"the chips have measured their fabric: {fabric_words(event)}"
        case events.ChipSlow():
            who, speed = f"chip {event.chip}", f"{event.speed:g}"
            return f"{who} computes at {speed} of the others' speed; it gets a smaller share"
        case events.ChipRestored():
            return f"chip {event.chip} computes as fast as the others again"
        case events.WrongResult():
            return _wrong_result(event)
        case events.WrongSum():
            who = chips_words(event.chips)
            return f"the sum of step {event.step} is wrong on {who}; the step is done again"
        case events.StateMended():
            return _state_mended(event)
        case _:
            return _fault_or_end(event)


def _non_finite(event: events.NonFiniteSum) -> str:
    if not event.parameters:
        return f"the gradients of step {event.step} are finite, but their sum is not"
    names = _names(event.parameters, event.n_parameters)
    is_buffer = all(name.startswith("buffer ") for name in event.parameters)
    what = "buffers" if is_buffer else "gradients"
    return f"chip {event.chip} has {what} in step {event.step} that are not finite: {names}"


def _states_differ(event: events.StatesDiffer) -> str:
    names = _names(event.names, event.n_names)
    who = ", ".join(f"chip {chip}" for chip in event.strange) or "a mirror"
    since = "" if event.equal_after is None else f", equal after step {event.equal_after}"
    return f"the chips differ after step {event.step}{since}: {who} in {names}"


def _wrong_result(event: events.WrongResult) -> str:
    if event.share is None:
        what = f"chip {event.chip} has a wrong state in step {event.step}"
    else:
        first, end = event.share
        what = f"chip {event.chip} computed samples {first} to {end - 1} of step {event.step} wrong"
    if event.parameters:
        what += f" ({_names(event.parameters, event.n_parameters)})"
    if event.right_until is None:
        return f"{what}; no step before it is known to be right"
    if event.right_until >= event.step - 1:
        return f"{what}; all steps before it are known to be right"
    first, last = event.right_until + 1, event.step - 1
    return f"{what}; steps {first} to {last} may be wrong too"


def _state_mended(event: events.StateMended) -> str:
    names = _names(event.names, event.n_names)
    since = "" if event.equal_after is None else f", equal after step {event.equal_after}"
    who = f"chip {event.chip} differed from the others after step {event.step}{since}"
    return f"{who}: it took their state, for {names}"


def _names(names: Sequence[str], n_all: int) -> str:
    """Return the first names, and how many more there are."""
    n_more = n_all - len(names)
    return ", ".join(names) + (f" and {n_more} more" if n_more > 0 else "")


def _fault_or_end(event: events.Event) -> str:
    match event:
        case events.FaultHappened():
            return _fault(event)
        case events.FaultRecovered():
            return _recovered(event)
        case events.FaultMissed():
            return f"{event.fault} was not injected: the job ended before it"
        case events.StateLost():
            return (
                f"no chip has the state after step {event.step} any more; waiting "
                f"{seconds(event.waits_s)} for a chip that has it"
            )
        case events.StateRestored():
            if event.lost <= event.step:  # how far the job was is not known
                return f"no chip has the latest state any more: going back to step {event.step}"
            n_redone = counted(event.lost - event.step, "step")
            lost = event.why or f"the state after step {event.lost} is lost"
            return f"{lost}: going back to step {event.step}, {n_redone} to do again"
        case events.HistoryDropped(term=0):
            part = f"chip {event.chip} holds a part of the state after step {event.step}"
            return f"{part}, and this job went on without the rest: those steps are lost"
        case events.HistoryDropped():
            who = (
                "the coordinator's record names"
                if event.chip is None
                else f"chip {event.chip} holds"
            )
            made = f"{who} steps up to {event.step} that a coordinator of term {event.term} led"
            return f"{made}, and this job went on without: they are lost"
        case events.CoordinatorSuperseded():
            return (
                f"a coordinator of term {event.later} serves this job now; this one, of term "
                f"{event.term}, ends"
            )
        case events.JobFinished():
            return "the job has finished"
        case events.JobFailed():
            return f"the job has failed: {event.why}"
        case events.CoordinatorChanged():
            return _COORDINATOR[event.state]
        case events.RunEnded():
            return _ended(event)
        case _:
            raise AssertionError(f"event_words has no sentence for {event!r}")


def change_words(change: FinishedChange) -> str:
    """Return one sentence for a change of the chips that train, once it is over."""
    done = f"all {change.chips} chips have finished step {change.step}"
    return f"{done}, {seconds(change.took_s)} after {_CAUSES[change.cause]}"


def fabric_words(event: events.FabricMeasured) -> str:
    """Return the figures of a fabric as `--fabric` takes them."""
    return figures_text(
        event.link_bandwidth_bytes_per_s, event.hop_latency_s, event.message_overhead_s
    )


def seconds(time_s: float | None) -> str:
    """Return a time as text: `0.41 s`, `38.20 s`, `12 min 5 s`; `-` if there is none."""
    if time_s is None or not math.isfinite(time_s):
        return "-"
    if time_s >= 99.95:
        minutes, rest = divmod(round(time_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    return format_time(time_s) if 0 < time_s < 0.01 else f"{time_s:.2f} s"


def rate_words(per_s: float) -> str:
    """Return a rate as text: `1,204`, `3.5`, `0.079`; `-` if there is none."""
    if not math.isfinite(per_s):
        return "-"
    return f"{per_s:,.0f}" if per_s >= 9.95 else f"{per_s:.2g}"


def model_words(start: events.RunStarted, *, with_parameters: bool = True) -> str:
    """Return the model as text: `tiny ResNet (19,466 parameters)`."""
    size = start.size if start.size not in start.model else ""
    parts = [size, _MODELS.get(start.model, start.model)]
    if with_parameters and start.parameters:
        parts.append(f"({start.parameters:,} parameters)")
    return " ".join(part for part in parts if part) or "a model"


def restore_words(event: events.StateRestored) -> str:
    """Return what a restore has cost, in the past tense, for reports."""
    if event.lost <= event.step:
        return f"the latest state was lost; the job went back to step {event.step}"
    n_redone = counted(event.lost - event.step, "step")
    were = "was" if event.lost - event.step == 1 else "were"
    lost = event.why or f"the state after step {event.lost} was lost"
    return f"{lost}; {n_redone} {were} done again after step {event.step}"


def chips_words(chips: Iterable[Chip]) -> str:
    """Return chips as blocks, `2x2@0,2`, or their number if there are many blocks."""
    listed = tuple(chips)
    blocks = blocks_of(listed)
    return counted(len(listed), "chip") if len(blocks) > _MANY else ", ".join(map(str, blocks))


def _started(event: events.RunStarted) -> str:
    wrap = "" if event.wrap in {"", "none"} else f" wrap {event.wrap}"
    fail = f" less {', '.join(event.fail)}" if event.fail else ""
    amount = f": {counted(event.steps, 'step')} of {counted(event.batch, 'sample')}"
    known = amount if event.steps else ""  # only the script knows, if it is one's own
    return f"training {model_words(event)} on mesh {event.mesh}{wrap}{fail}{known}"


def _began(event: events.GenerationBegan) -> str:
    n_chips = counted(len(event.chips), "chip")
    parts = [f"generation {event.number}: {n_chips} from step {event.step} on"]
    if event.waiting:
        parts.append(f"{chips_words(event.waiting)} waiting")
    if event.cut:
        parts.append(f"without {', '.join(event.cut[:_MANY])}")
    if event.why:
        parts.append(event.why)
    return "; ".join(parts)


def _step(event: events.StepFinished) -> str:
    return (
        f"step {event.step}: loss {_number(event.loss)}, {counted(event.samples, 'sample')} on "
        f"{counted(event.chips, 'chip')}"
    )


def _fault(event: events.FaultHappened | events.FaultRecovered) -> str:
    return event.fault + (f" at step {event.at_step}" if event.at_step is not None else "")


def _recovered(event: events.FaultRecovered) -> str:
    took = seconds(event.recovered_s)
    if event.kind is FaultKind.REPAIR:
        return f"{_fault(event)} done in {took}"
    return f"recovered from {_fault(event)} in {took} (detected after {seconds(event.detected_s)})"


def _ended(event: events.RunEnded) -> str:
    equal = {True: ", replicas equal", False: ", REPLICAS DIFFER", None: ""}[event.replicas_equal]
    redone = f", {counted(event.redone, 'step')} done again" if event.redone else ""
    wrong = ", HISTORY WRONG" if event.history_faults else ""
    unchecked = ", not all steps checked" if event.unchecked else ""
    return (
        f"done: {counted(event.steps, 'step')}, loss {_number(event.first_loss)} to "
        f"{_number(event.final_loss)}{equal}{redone}{wrong}{unchecked}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
