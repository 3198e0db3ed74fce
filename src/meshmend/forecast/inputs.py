"""The inputs of a forecast by name: how each is read, its default, and why that is assumed.

The command line, the file of `--config` and presets use the same names and the same texts. Each
input that nobody gave is told as an assumption.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshmend.errors import InputError, TopologyError, UnitError
from meshmend.forecast.presets import preset_named
from meshmend.forecast.scenario import DALY, KINDS, SPREADS, YOUNG
from meshmend.schedule.algorithm_names import ALGORITHM_NAMES
from meshmend.topology.failures import parse_shape
from meshmend.units import parse_bytes, parse_duration


@dataclass(frozen=True)
class Input:
    """One input: how its text is read, its default if it has one, and words for both."""

    name: str
    read: Callable[[str], Any]
    default: str | None
    words: str
    why: str = "assumed"
    group: str = "machine"


def _number(low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise InputError(f"needs a number, but got {text!r}") from None
        if not low <= value <= high:
            raise InputError(f"needs a number from {low:g} to {high:g}, but got {text}")
        return value

    return read


def _count(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if (
            not text.strip().isascii()
            or not text.strip().isdigit()
            or not (low <= int(text) <= high)
        ):
            raise InputError(f"needs a whole number from {low} to {high}, but got {text!r}")
        return int(text)

    return read


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise InputError(f"needs one of {', '.join(words)}, but got {text!r}")
        return text

    return read


def _shape(text: str) -> tuple[int, ...]:
    try:
        return parse_shape(text)
    except ValueError:
        raise InputError(f"needs extents joined by x, such as 4x2, but got {text!r}") from None


def _interval(text: str) -> float | str:
    return text if text in (YOUNG, DALY) else parse_duration(text)


_RATE = _number(0.0, 1e6)
_ALL = (
    Input("mesh", str, None, "extents of the mesh"),
    Input("wrap", str, "none", "axes that wrap around: none, all, or 0,1"),
    Input("host", _shape, "", "chips of a host", "4x2, as on a TPU v3"),
    Input("board", _shape, "", "chips of a board", "2x2, as on a TPU v3"),
    Input("rack", _shape, "", "chips of a rack or power domain", "the whole mesh"),
    *(
        Input(
            f"failures-per-1000-{kind}-days",
            _RATE,
            "0",
            f"how often one {kind} fails in 1000 days",
            "no such failures",
            "failures",
        )
        for kind in KINDS
    ),
    Input(
        "failure-shape", _number(0.2, 10), "1", "Weibull shape of lives; 1: exponential",
        "exponential lives", "failures",
    ),
    Input("burst", _number(0, 0.9), "0", "share of failures that pull down another soon after",
          "failures are independent", "failures"),
    Input("burst-window", parse_duration, "1h", "how soon after", group="failures"),
    Input("repair", parse_duration, None, "mean time of a repair by hand", group="repair"),
    Input("repair-spread", _one_of(*SPREADS), "lognormal", "fixed, exponential or lognormal",
          "as LANL's repairs were", "repair"),
    Input("repair-sigma", _number(0, 5), "1", "sigma of lognormal repair times", group="repair"),
    Input("automatic-repair", parse_duration, "0s", "time of automatic repair, tried first",
          "no automatic repair", "repair"),
    Input("automatic-success", _number(0, 1), "0", "share of failures that it mends",
          "no automatic repair", "repair"),
    Input("crews", _count(0, 10**6), "0", "repairs by hand at the same time; 0: any number",
          "any number of repairs go on at the same time", "repair"),
    Input("detection", parse_duration, "1min", "time until a failure is noticed", group="job"),
    Input("restart", parse_duration, "20min", "time to start a job from its checkpoint",
          "AIReSim's default", "job"),
    Input("recovery", parse_duration, "10s", "pause of a job that goes on around a hole",
          "our runtime takes 0.2 to 0.6 s for 16 chips on one machine; 10 s allows for a machine "
          "of thousands", "job"),
    Input("checkpoint-every", _interval, YOUNG, "training between checkpoints, young or daly",
          "Young's interval", "job"),
    Input("checkpoint-write", parse_duration, "1min", "pause to write a checkpoint", group="job"),
    Input("spares", _count(0, 10**6), "", "spare units", "2 % of the units, at least one",
          "spares"),
    Input("spare-unit", str, "host", "host, board, rack, row, column, or a shape such as 4x4x4",
          "a spare host replaces any host, as behind an optical switch", "spares"),
    Input("switch-in", parse_duration, "5min", "time to switch in a spare", group="spares"),
    Input("payload", parse_bytes, "100MB", "bytes that each chip sums in a step", group="step"),
    Input("fabric", str, "reference", "the links: 'meshmend fabrics' lists them", group="step"),
    Input("algorithm", _one_of("auto", *ALGORITHM_NAMES), "auto", "how to sum around holes",
          "the fastest that we know", "step"),
    Input("compute", parse_duration, "", "compute time of a step",
          "follows from allreduce-share", "step"),
    Input("allreduce-share", _number(0.001, 0.999), "0.06", "share of a step that the sum takes "
          "on the full mesh", "BERT on 1024 TPU v3 chips, table 2 of the paper", "step"),
    Input("batch", _one_of("kept", "shrunk"), "kept", "the global batch with fewer chips: kept, "
          "or shrunk with them", "the global batch stays as it is", "step"),
)  # fmt: skip
INPUTS: Mapping[str, Input] = {each.name: each for each in _ALL}
# Assumptions that come to nothing unless another input is given.
_QUIET = {
    "wrap", "board", "rack", "burst-window", "automatic-success", "repair-sigma", "compute",
    *(f"failures-per-1000-{kind}-days" for kind in KINDS),
}  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """Values by name, and what is assumed about those that nobody gave."""

    values: Mapping[str, Any]
    assumptions: tuple[str, ...]
    is_given: frozenset[str]


def gathered(
    given: Mapping[str, str],
    from_file: Mapping[str, str] | None = None,
    presets: tuple[str, ...] = (),
) -> Inputs:
    """Return the values of all inputs: those given first, then the file's, then the presets'.

    Raises:
        InputError: an unknown name or preset, a text that cannot be read, or an input that is
            needed and that nobody gave.
    """
    texts: dict[str, str] = {}
    told: list[str] = []
    for name in presets:
        preset = preset_named(name)
        texts.update(preset.values)
        shown = ", ".join(f"{key} {value}" for key, value in preset.values.items())
        told.append(f"preset {name}: {shown} ({preset.source})")
    if from_file:
        texts.update(from_file)
    texts.update(given)
    if unknown := sorted(set(texts) - set(INPUTS)):
        raise InputError(f"forecast knows no input {unknown[0]!r}; see meshmend forecast --example")
    _check_asked(texts)
    values = {}
    for name, each in INPUTS.items():
        text = texts.get(name, each.default)
        values[name] = _read(each, str(text)) if text else None
        if name not in texts and name not in _QUIET:
            told.append(f"{name} {text}: {each.why}" if text else f"{name}: {each.why}")
    return Inputs(values, tuple(told), frozenset(texts))


def _check_asked(texts: Mapping[str, str]) -> None:
    if "mesh" not in texts:
        raise InputError("forecast needs --mesh, such as 32x32, or a preset that has one")
    if not any(f"failures-per-1000-{kind}-days" in texts for kind in KINDS):
        raise InputError(
            "forecast needs to know how often something fails: give "
            "--failures-per-1000-host-days, or a preset with public rates such as meta-rsc-1"
        )
    if "repair" not in texts:
        raise InputError("forecast needs the mean repair time: give --repair, such as 24h")


def _read(each: Input, text: str) -> Any:
    try:
        return each.read(text)
    except (UnitError, TopologyError, InputError) as error:
        raise InputError(f"--{each.name} {error}") from None
