"""The lines of `events.jsonl`: read one by one, checked field by field, and said in words.

An **event** is one JSON object with its kind under `event` and the seconds since the start of
the run under `t`. Knows single events; what they add up to is `training_run`'s to say.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Final

from meshmend.draw.frame import counted
from meshmend.errors import InputError
from meshmend.topology.failures import Chip, blocks_of
from meshmend.units import format_time

Event = Mapping[str, object]

_MODELS: Final = {"resnet": "ResNet", "bert": "BERT"}
_MANY = 4  # more blocks of chips than this are counted, not named


def read_events(lines: Iterable[str]) -> tuple[Event, ...]:
    """Return the events of all lines; a last line that is torn is left out.

    Raises:
        InputError: any other line is not an event, or the first event is not a start.
    """
    texts = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    events: list[Event] = []
    for number, line in texts:
        try:
            value = json.loads(line)
        except ValueError:
            if number == texts[-1][0] and events:
                break  # the run was killed while it wrote this line
            raise InputError(
                f"events.jsonl needs one JSON object a line, but line {number} is {line[:60]!r}"
            ) from None
        if not isinstance(value, dict) or not isinstance(value.get("event"), str):
            raise InputError(
                f'events.jsonl needs objects with a text under "event", but line {number} is '
                f"{line.strip()[:60]!r}"
            )
        if whole_or_real(value, "t") < 0:
            raise InputError(f"an event needs t of zero or more, but got {value['t']}")
        events.append(value)
    if not events or events[0]["event"] != "start":
        first = repr(events[0]["event"]) if events else "no event at all"
        raise InputError(f"events.jsonl needs to begin with a start event, but got {first}")
    return tuple(events)


def real(event: Event, name: str) -> float:
    """Return a number of an event; one that is absent, or null, is not a number (NaN)."""
    return math.nan if event.get(name) is None else whole_or_real(event, name, finite=False)


def whole_or_real(event: Event, name: str, *, finite: bool = True) -> float:
    """Return a number that an event must have."""
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(event, name, "a number")
    if finite and not math.isfinite(value):
        raise _wrong(event, name, "a finite number")
    return float(value)


def whole(event: Event, name: str) -> int:
    """Return a whole number that an event must have."""
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(event, name, "a whole number")
    return value


def words(event: Event, name: str) -> str:
    """Return a text of an event, empty where absent."""
    value = event.get(name, "")
    if not isinstance(value, str):
        raise _wrong(event, name, "a text")
    return value


def texts_of(event: Event, name: str) -> tuple[str, ...]:
    """Return a list (in memory also a tuple) of texts of an event, empty where absent."""
    value = event.get(name, [])
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise _wrong(event, name, "a list of texts")
    return tuple(value)


def chips_of(event: Event, name: str) -> tuple[Chip, ...]:
    """Return a list (in memory also a tuple) of chips of an event, empty where absent."""
    value = event.get(name, [])
    if not isinstance(value, list | tuple) or not all(map(_is_chip, value)):
        raise _wrong(event, name, "a list of chips such as [0, 2]")
    return tuple(tuple(chip) for chip in value)


def seconds(time_s: float) -> str:
    """Return a time as a person says it: `0.41 s`, `38.2 s`, `12 min 5 s`; `-` for none."""
    if not math.isfinite(time_s):
        return "-"
    if time_s >= 99.95:
        minutes, rest = divmod(round(time_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    return format_time(time_s) if 0 < time_s < 0.01 else f"{time_s:.2f} s"


def rate_words(per_s: float) -> str:
    """Return a rate as a person says it: `1,204`, `3.5`, `0.079`; `-` for none."""
    if not math.isfinite(per_s):
        return "-"
    return f"{per_s:,.0f}" if per_s >= 9.95 else f"{per_s:.2g}"


def model_words(event: Event) -> str:
    """Return what is trained: `tiny ResNet (19,466 parameters)`."""
    name = words(event, "model")
    size = words(event, "size")
    parts = [size if size not in name else "", _MODELS.get(name, name)]
    parameters = event.get("parameters")
    if isinstance(parameters, int) and parameters:
        parts.append(f"({parameters:,} parameters)")
    return " ".join(part for part in parts if part) or "a model"


def chips_words(chips: Iterable[Chip]) -> str:
    """Return chips as blocks, `2x2@0,2`, or their number where they are many blocks."""
    own = tuple(chips)
    blocks = blocks_of(own)
    return counted(len(own), "chip") if len(blocks) > _MANY else ", ".join(map(str, blocks))


def event_words(event: Event) -> str:
    """Return one sentence for an event of any kind; an unknown kind is shown as it is."""
    known = _SENTENCES.get(str(event.get("event")))
    if known is not None:
        return known(event)
    rest = {name: value for name, value in event.items() if name not in {"event", "t"}}
    return f"{event.get('event')} {json.dumps(rest)}" if rest else str(event.get("event"))


def _start(event: Event) -> str:
    mesh = words(event, "mesh")
    if (wrap := words(event, "wrap")) not in {"", "none"}:
        mesh += f" wrap {wrap}"
    if fail := texts_of(event, "fail"):
        mesh += f" less {', '.join(fail)}"
    return (
        f"training {model_words(event)} on mesh {mesh}: {counted(whole(event, 'steps'), 'step')} "
        f"of {counted(whole(event, 'batch'), 'sample')}"
    )


def _generation(event: Event) -> str:
    n_chips = len(chips_of(event, "chips"))
    parts = [
        f"generation {whole(event, 'number')}: {counted(n_chips, 'chip')} from step "
        f"{whole(event, 'step')} on"
    ]
    if waiting := chips_of(event, "waiting"):
        parts.append(f"{chips_words(waiting)} cut off, waiting")
    if cut := texts_of(event, "cut"):
        parts.append(f"without {', '.join(cut[:_MANY])}")
    if why := words(event, "why"):
        parts.append(why)
    return "; ".join(parts)


def _step(event: Event) -> str:
    return (
        f"step {whole(event, 'step')}: loss {real(event, 'loss'):.4g}, "
        f"{counted(whole(event, 'samples'), 'sample')} on {counted(whole(event, 'chips'), 'chip')}"
    )


def _fault(event: Event) -> str:
    step = event.get("at_step")
    return words(event, "fault") + (f" at step {step}" if step is not None else "")


def _recovered(event: Event) -> str:
    detected, recovered = (seconds(real(event, f"{x}_s")) for x in ("detected", "recovered"))
    if words(event, "fault").startswith("repair "):
        return f"{_fault(event)} done in {recovered}"
    return f"recovered from {_fault(event)} in {recovered} (detected after {detected})"


def _coordinator(event: Event) -> str:
    state = words(event, "state")
    tail = {"lost": "lost; training goes on without it", "back": "back, knows the job again"}
    return f"coordinator {tail.get(state, state)}"


def _chip(event: Event) -> Chip:
    (chip,) = chips_of({"event": event["event"], "chip": [event.get("chip")]}, "chip")
    return chip


def _turned_away(event: Event) -> str:
    return f"chip {_chip(event)} turned away: {words(event, 'why')}"


def _waiting(event: Event) -> str:
    return f"{chips_words(chips_of(event, 'chips'))} waits: {words(event, 'why')}"


def _end(event: Event) -> str:
    told = event.get("replicas_equal")
    equal = ", replicas equal" if told is True else ", REPLICAS DIFFER" if told is False else ""
    return (
        f"done: {counted(whole(event, 'steps'), 'step')}, loss {real(event, 'first_loss'):.4g} "
        f"to {real(event, 'final_loss'):.4g}{equal}"
    )


_SENTENCES: Final = {
    "start": _start,
    "generation": _generation,
    "step": _step,
    "fault": _fault,
    "recovered": _recovered,
    "missed": lambda e: f"{words(e, 'fault')} did not come: the job was over before",
    "checkpoint": lambda e: f"checkpoint of step {whole(e, 'step')} in {words(e, 'path')}",
    "coordinator": _coordinator,
    "refused": lambda e: f"refused {words(e, 'who')}: {words(e, 'why')}",
    "turned away": _turned_away,
    "arrived": lambda e: f"chip {_chip(e)} is ready",
    "left": lambda e: words(e, "why") or f"chip {_chip(e)} is gone",
    "waiting": _waiting,
    "end": _end,
}


def _is_chip(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(at, int) and not isinstance(at, bool) and at >= 0 for at in value)
    )


def _wrong(event: Event, name: str, needs: str) -> InputError:
    return InputError(
        f"a {event.get('event')} event needs {needs} under {name!r}, but got {event.get(name)!r}"
    )
