"""The inputs of a forecast by name, from the command line, files and presets to a scenario.

The command line, the file of `--config` and presets use the same names and the same texts. Each
input that nobody gave is told as an assumption, with its reason. A preset has public figures and
their source; what it does not know, the forecast asks for or prints as an assumption.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshmend.config import read_toml
from meshmend.errors import InputError, TopologyError, UnitError
from meshmend.forecast.scenario import (
    DALY,
    KINDS,
    SLOW_CHIP,
    SLOW_KINDS,
    SLOW_LINK,
    SPREADS,
    WRONG,
    YOUNG,
    FailureModel,
    JobModel,
    RepairModel,
    Scenario,
    Shape,
    SlowModel,
    SpareModel,
    WrongModel,
)
from meshmend.schedule.algorithm_names import SUM_NAMES
from meshmend.topology.fabric import fabric
from meshmend.topology.failures import board_shape, parse_shape
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.units import parse_bytes, parse_duration


@dataclass(frozen=True)
class Input:
    """One input: how its text is read, its default if it has one, and words for both.

    One that `is_option` is an option of the command, the others are given with `--set`. The default
    of one that `is_quiet` is no assumption: it comes to nothing unless another input is given.
    `example` stands in the example file for the default.
    """

    name: str
    read: Callable[[str], Any]
    default: str | None
    words: str
    why: str = "assumed"
    group: str = "machine"
    is_option: bool = False
    is_quiet: bool = False
    example: str = ""


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
        is_number = re.fullmatch(r"\s*[0-9]{1,18}\s*", text) is not None
        if not (is_number and low <= int(text) <= high):
            raise InputError(f"needs a whole number from {low} to {high}, but got {text[:60]!r}")
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


def _rate_input(kind: str) -> str:
    """Return the name of the input that says how often a kind of domain fails."""
    names = {WRONG: "wrong-per-1000-chip-days"}
    names |= {SLOW_CHIP: "slow-per-1000-chip-days", SLOW_LINK: "slow-per-1000-link-days"}
    return names.get(kind, f"failures-per-1000-{kind}-days")


_RATE_WORDS = {
    WRONG: "how often one chip begins to compute wrong numbers",
    SLOW_CHIP: "how often one chip gets slow for a while",
    SLOW_LINK: "how often one link gets slow for a while",
}


_RATE = _number(0.0, 1e6)
_ALL = (
    Input("mesh", str, None, "extents of the mesh", is_option=True, example="32x32"),
    Input("wrap", str, "none", "axes that wrap around: none, all, or 0,1", is_option=True,
          is_quiet=True),
    Input("host", _shape, "", "chips of a host", "4x2, as on a TPU v3", is_option=True,
          example="4x2"),
    Input("board", _shape, "", "chips of a board", "2x2, as on a TPU v3", is_quiet=True,
          example="2x2"),
    Input("rack", _shape, "", "chips of a rack or power domain", "the whole mesh", is_quiet=True,
          example="32x8"),
    *(
        Input(
            _rate_input(kind),
            _RATE,
            "0",
            _RATE_WORDS.get(kind, f"how often one {kind} fails in 1000 days"),
            "no such failures",
            "failures",
            is_option=kind == "host",
            is_quiet=True,
            example="6.5" if kind == "host" else "",
        )
        for kind in KINDS
    ),
    Input("wrong-in", _number(1, 1e6), "5", "a wrong chip is so in one of so many steps",
          "no figure is public; as --inject \"wrong ...\" has it", "failures", is_quiet=True),
    Input("wrong-found", parse_duration, "7d", "mean time until a wrong chip is found without "
          "checks", "no figure is public", "failures", is_quiet=True),
    Input("slow-chip-speed", _number(0.01, 1), "0.33", "the speed of a slow chip, a part of 1",
          "no figure is public", "failures", is_quiet=True),
    Input("slow-link-speed", _number(0.01, 1), "0.25", "the speed of a slow link, a part of 1",
          "one cable of four is left", "failures", is_quiet=True),
    Input("slow-lasts", parse_duration, "1d", "mean time for which a chip or link is slow",
          "no figure is public", "failures", is_quiet=True),
    Input(
        "failure-shape", _number(0.2, 10), "1", "Weibull shape of lives; 1: exponential",
        "exponential lives", "failures",
    ),
    Input("burst", _number(0, 0.9), "0", "share of failures that pull down another soon after",
          "failures are independent", "failures"),
    Input("burst-window", parse_duration, "1h", "how soon after", group="failures",
          is_quiet=True),
    Input("repair", parse_duration, None, "mean time of a repair by hand", group="repair",
          is_option=True, example="24h"),
    Input("repair-spread", _one_of(*SPREADS), "lognormal", "fixed, exponential or lognormal",
          "as LANL's repairs were", "repair"),
    Input("repair-sigma", _number(0, 5), "1", "sigma of lognormal repair times", group="repair",
          is_quiet=True),
    Input("automatic-repair", parse_duration, "0s", "time of automatic repair, tried first",
          "no automatic repair", "repair"),
    Input("automatic-success", _number(0, 1), "0", "share of failures that it mends",
          "no automatic repair", "repair", is_quiet=True),
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
    Input("check-shares", _count(0, 10**9), "0", "one step in so many computes each share twice, "
          "as train --check-shares; 0: none", "wrong chips are not looked for", "job",
          is_quiet=True),
    Input("slow-known", _one_of("no", "yes"), "no", "whether slow chips get smaller shares and "
          "slow links plans of their own, as train --shares speed and watch-links do",
          "a step waits for its slowest chip and link", "job", is_quiet=True),
    Input("spares", _count(0, 10**6), "", "spare units", "2 % of the units, at least one",
          "spares", is_option=True, example="3"),
    Input("spare-unit", str, "host", "host, board, rack, row, column, or a shape such as 4x4x4",
          "a spare host replaces any host, as behind an optical switch", "spares"),
    Input("switch-in", parse_duration, "5min", "time to switch in a spare", group="spares"),
    Input("payload", parse_bytes, "100MB", "bytes that each chip sums in a step", group="step",
          is_option=True),
    Input("fabric", str, "reference", "the links: 'meshmend fabrics' lists them", group="step",
          is_option=True),
    Input("algorithm", _one_of("auto", *SUM_NAMES), "auto", "how to sum around holes",
          "the fastest that we know", "step"),
    Input("compute", parse_duration, "", "compute time of a step",
          "follows from allreduce-share", "step", is_quiet=True, example="90ms"),
    Input("allreduce-share", _number(0.001, 0.999), "0.06", "share of a step that the sum takes "
          "on the full mesh", "BERT on 1024 TPU v3 chips, table 2 of the paper", "step"),
    Input("tile", _shape, "", "chips that hold a replica together, such as 2x2; the payload is a "
          "tile's", "every chip holds a whole replica", "step", is_quiet=True),
    Input("batch", _one_of("kept", "shrunk"), "kept", "the global batch with fewer chips: kept, "
          "or shrunk with them", "the global batch stays as it is", "step"),
)  # fmt: skip
INPUTS: Mapping[str, Input] = {each.name: each for each in _ALL}
_OF_SLOW = ("slow-known", "slow-lasts", "slow-chip-speed", "slow-link-speed")


@dataclass(frozen=True)
class Preset:
    """Inputs by name, as they are written on the command line, and where they come from."""

    name: str
    source: str
    values: Mapping[str, str] = field(default_factory=dict)


_HOST_RATE, _WRONG_RATE = "failures-per-1000-host-days", _rate_input(WRONG)
_ALL_PRESETS = (
    Preset(
        "meta-rsc-1",
        "Meta's research cluster RSC-1, HPCA 2025, quoted second-hand: per node of 8 GPUs",
        {_HOST_RATE: "6.50"},
    ),
    Preset(
        "meta-rsc-2",
        "Meta's research cluster RSC-2, HPCA 2025, quoted second-hand: per node of 8 GPUs",
        {_HOST_RATE: "2.34"},
    ),
    Preset(
        "llama-3",
        "Llama 3 report: 419 unplanned interruptions of 2048 nodes of 8 GPUs in 54 days",
        {_HOST_RATE: "3.79"},
    ),
    Preset(
        "llama-3-wrong",
        "Llama 3 report: 6 unplanned interruptions by silent data corruption, 16,384 GPUs, 54 days",
        {_WRONG_RATE: "0.0068"},
    ),
    Preset(
        "meta-wrong",
        "Silent data corruptions at scale (Meta, 2021): hundreds of CPUs of hundreds of thousands "
        "of machines, in more than 18 months of tests; read as one in a thousand",
        {_WRONG_RATE: "0.0018"},
    ),
    Preset(
        "google-wrong",
        "Cores that don't count (Google, 2021): a few cores per several thousand machines, over an "
        "unknown time; read as one machine in a thousand within three years: low confidence",
        {_WRONG_RATE: "0.0009"},
    ),
    Preset(
        "lanl",
        "LANL 1996-2005, Schroeder and Gibson: 23,000 failures; lives are Weibull with a falling "
        "hazard, repair is lognormal and takes from under 1 h to over a day. Rate, shape and mean "
        "repair are our round figures within that: low confidence",
        {
            _HOST_RATE: "1.5",
            "failure-shape": "0.75",
            "repair": "6h",
            "repair-spread": "lognormal",
            "repair-sigma": "1.9",
        },
    ),
    Preset(
        "airesim",
        "defaults of AIReSim: automatic repair in 2 h, by hand in 2 days, job recovery in 20 min; "
        "the share of automatic successes is our assumption",
        {
            "automatic-repair": "2h",
            "automatic-success": "0.8",
            "repair": "2d",
            "restart": "20min",
        },
    ),
    Preset(
        "tpu-v4",
        "TPU v4, NSDI 2024: cubes of 4x4x4 chips behind optical switches. It prints an "
        "availability of 99.98 % and no failure rate: give one",
        {
            "mesh": "16x16x16",
            "wrap": "all",
            "host": "2x2x1",
            "fabric": "tpu-v4",
            "spare-unit": "4x4x4",
        },
    ),
    Preset(
        "tpu-v3-bert",
        "the paper's machine of 1024 TPU v3 chips; BERT's allreduce takes 6.0 % of a step (table "
        "2). A host holds 4x2 chips, so these are 128 hosts",
        {
            "mesh": "32x32",
            "host": "4x2",
            "board": "2x2",
            "fabric": "tpu-v3",
            "payload": "672MB",
            "allreduce-share": "0.06",
        },
    ),
    Preset(
        "tpu-v3-resnet",
        "the paper's machine of 1024 TPU v3 chips; ResNet-50's allreduce takes 8.8 % of a step "
        "(table 2). A host holds 4x2 chips, so these are 128 hosts",
        {
            "mesh": "32x32",
            "host": "4x2",
            "board": "2x2",
            "fabric": "tpu-v3",
            "payload": "102.4MB",
            "allreduce-share": "0.088",
        },
    ),
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _ALL_PRESETS}


def preset_named(name: str) -> Preset:
    """Return the preset of this name.

    Raises:
        InputError: there is no such preset; the message lists all.
    """
    if name not in PRESETS:
        raise InputError(f"--preset needs one of {', '.join(PRESETS)}, but got {name!r}")
    return PRESETS[name]


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
    for name in sorted(texts):
        _known(name)
    values = {}
    for name, each in INPUTS.items():
        text = texts.get(name, each.default)
        values[name] = _read(each, str(text)) if text else None
        if name not in texts and not each.is_quiet:
            told.append(f"{name} {text}: {each.why}" if text else f"{name}: {each.why}")
    _check_asked(texts)  # after a value that cannot be read, which is the worse mistake
    return Inputs(values, tuple(told), frozenset(texts))


def assigned(assignments: Iterable[str]) -> dict[str, str]:
    """Return the inputs that are given as NAME=VALUE.

    Raises:
        InputError: a text that is no such pair, or an unknown name.
    """
    texts = {}
    for each in assignments:
        name, equals, value = each.partition("=")
        if not equals:
            raise InputError(f"--set needs NAME=VALUE, but got {each[:60]!r}")
        texts[_known(name.strip().replace("_", "-"))] = value.strip()
    return texts


def _known(name: str) -> str:
    if name not in INPUTS:
        raise InputError(f"forecast knows no input {name!r}; see meshmend forecast --example")
    return name


def written(name: str, value: str) -> str:
    """Return an input as it is written on the command line."""
    return f"--{name} {value}" if INPUTS[name].is_option else f"--set {name}={value}"


def _check_asked(texts: Mapping[str, str]) -> None:
    if "mesh" not in texts:
        raise InputError("forecast needs --mesh, such as 32x32, or a preset that has one")
    if not any(_rate_input(kind) in texts for kind in KINDS):
        raise InputError(
            "forecast needs to know how often something fails: give "
            "--failures-per-1000-host-days, which --trace FILE --fit prints for a trace, or a "
            "preset with public rates such as meta-rsc-1"
        )
    if "repair" not in texts:
        raise InputError("forecast needs the mean repair time: give --repair, such as 24h")


def _read(each: Input, text: str) -> Any:
    try:
        return each.read(text)
    except (UnitError, TopologyError, InputError) as error:
        flag = f"--{each.name}" if each.is_option else f"--set {each.name}"
        colon = "" if str(error).startswith("needs ") else ":"
        raise InputError(f"{flag}{colon} {error}") from None


_TITLES = {
    "machine": "The machine.",
    "failures": "Failures: how often one domain of each kind fails.",
    "repair": "Repair. Times need a unit: s, min, h, d.",
    "job": "The job.",
    "spares": "Spares.",
    "step": "A step of the job.",
}


def read_config(path: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the inputs of a file as texts, and the presets that it names.

    Raises:
        InputError: the file cannot be read, or a value is neither a text nor a number.
    """
    document = read_toml(path)
    presets = document.pop("presets", [])
    if not isinstance(presets, list) or not all(isinstance(name, str) for name in presets):
        raise InputError(f"{path}: presets needs a list of names, but got {presets!r}")
    values = {}
    for key, value in document.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise InputError(f"{path}: {key} needs a text or a number, but got {value!r}")
        values[key.replace("_", "-")] = str(value)
    return values, tuple(presets)


def example_config() -> str:
    """Return a file with every input, its default, and what it means."""
    return "\n".join(_example_lines()) + "\n"


def _example_lines() -> Iterator[str]:
    yield "# Inputs of `meshmend forecast --config FILE`. A line that begins with # is a default."
    yield '# presets = ["meta-rsc-1"]  # public rates: `meshmend forecast --list-presets`'
    group = ""
    for each in INPUTS.values():
        if each.group != group:
            group = each.group
            yield f"\n# {_TITLES[group]}"
        text = each.example or each.default or ""
        is_number = text.replace(".", "", 1).isdigit()
        value = text if is_number else f'"{text}"'
        hide = "" if each.is_option and each.example else "# "
        yield f"{hide}{each.name} = {value}  # {each.words}"


_SPARE_SHARE = 0.02
_FEW_SPARES = 1000  # which any machine may have


@dataclass(frozen=True)
class ForecastQuestion:
    """A scenario, and the assumptions that were made to get it."""

    scenario: Scenario
    assumptions: tuple[str, ...]


def question_of(inputs: Inputs) -> ForecastQuestion:
    """Return the scenario of these inputs.

    Raises:
        InputError: values that do not fit together.
    """
    values = inputs.values
    mesh = parse_mesh(values["mesh"], wrap=values["wrap"])
    n_axes = len(mesh.shape)
    if n_axes > 3:
        raise InputError(f"forecast needs a mesh of at most 3 axes, but got {mesh}")
    host = values["host"] or board_shape(n_axes, "host")
    board = values["board"] or board_shape(n_axes, "board")
    rack = values["rack"] or mesh.shape
    unit = _unit(values["spare-unit"], mesh, {"host": host, "board": board, "rack": rack})
    n_units = mesh.n_chips / math.prod(unit)
    n_spares = _n_spares(values["spares"], n_units)
    assumptions = [
        f"spares {n_spares}: 2 % of the units, at least one" if each.startswith("spares:") else each
        for each in inputs.assumptions
    ]
    scenario = Scenario(
        mesh,
        _failures(values),
        _repair(values),
        _job(values),
        SpareModel(n_spares, unit, values["switch-in"]),
        host,
        board,
        rack,
        WrongModel(values["wrong-found"], values["wrong-in"], values["check-shares"]),
        SlowModel(
            values["slow-chip-speed"],
            values["slow-link-speed"],
            values["slow-lasts"],
            values["slow-known"] == "yes",
        ),
    )
    more = (*_of_wrong(inputs), *_of_slow(inputs), *_of_the_model(scenario))
    return ForecastQuestion(scenario, (*assumptions, *more))


def _n_spares(given: int | None, n_units: float) -> int:
    """Return the number of spares, or the default share; more than ten machines are refused."""
    if given is None:
        return max(1, math.ceil(_SPARE_SHARE * n_units))
    most = max(_FEW_SPARES, round(10 * n_units))
    if given > most:
        raise InputError(
            f"--spares needs at most {most} for the {n_units:g} units of this mesh, but got {given}"
        )
    return given


def _of_wrong(inputs: Inputs) -> Iterator[str]:
    """Yield what is assumed about wrong chips, where there are any."""
    if not inputs.values[_WRONG_RATE]:
        return
    for name in ("check-shares", "wrong-in", "wrong-found"):
        if name not in inputs.is_given:
            yield f"{name} {INPUTS[name].default}: {INPUTS[name].why}"
    yield "what was trained since a chip went wrong is lost: checkpoints reach back that far"


def _of_slow(inputs: Inputs) -> Iterator[str]:
    """Yield what is assumed about slow chips and links, where there are any."""
    slow = [kind for kind in SLOW_KINDS if inputs.values[_rate_input(kind)]]
    for name in _OF_SLOW if slow else ():
        is_of_other = name in ("slow-chip-speed", "slow-link-speed") and name[:9] not in slow
        if name not in inputs.is_given and not is_of_other:
            yield f"{name} {INPUTS[name].default}: {INPUTS[name].why}"
    if SLOW_LINK in slow:
        yield "a sum that does not know of a slow link takes as much longer as the link does"


def _of_the_model(scenario: Scenario) -> Iterator[str]:
    yield "what the job does changes no failure and no repair"
    yield "spares fail as often as what they replace"
    if scenario.job.tile:
        yield "no failure takes away the state of a job that goes on: twins in other tiles hold it"
        yield "tiles are boxes as they are written, in bands across the mesh; what fits none waits"
    else:
        yield "no failure takes away the state of a job that goes on: every live chip holds it"


def _unit(word: str, mesh: Mesh, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of a spare unit: of a kind, a row or column of hosts, or as written."""
    if word in shapes:
        return shapes[word]
    host = shapes["host"]
    if word == "row":
        return (host[0], *mesh.shape[1:])
    if word == "column":
        return (*mesh.shape[:-1], host[-1])
    try:
        return parse_shape(word)
    except ValueError:
        raise InputError(
            "--set spare-unit needs host, board, rack, row, column or a shape such as 4x4x4, but "
            f"got {word!r}"
        ) from None


def _failures(values: Mapping[str, Any]) -> FailureModel:
    rates = {kind: values[_rate_input(kind)] for kind in KINDS}
    return FailureModel(
        {kind: rate for kind, rate in rates.items() if rate},
        values["failure-shape"],
        values["burst"],
        values["burst-window"],
    )


def _repair(values: Mapping[str, Any]) -> RepairModel:
    return RepairModel(
        values["repair"],
        values["repair-spread"],
        values["repair-sigma"],
        values["automatic-repair"],
        values["automatic-success"],
        values["crews"],
    )


def _job(values: Mapping[str, Any]) -> JobModel:
    return JobModel(
        payload_bytes=values["payload"],
        fabric=fabric(values["fabric"]),
        tile=values["tile"] or (),
        algorithm=values["algorithm"],
        compute_s=values["compute"],
        allreduce_share=values["allreduce-share"],
        keeps_batch=values["batch"] == "kept",
        detection_s=values["detection"],
        restart_s=values["restart"],
        recovery_s=values["recovery"],
        checkpoint_every=values["checkpoint-every"],
        checkpoint_write_s=values["checkpoint-write"],
    )
