"""Public figures of failures and repair, each with its source and how far to trust it.

A preset sets some inputs and leaves the others alone; what it does not know, the forecast asks for
or prints as an assumption.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshmend.errors import InputError


@dataclass(frozen=True)
class Preset:
    """Inputs by name, as they are written on the command line, and where they come from."""

    name: str
    source: str
    values: Mapping[str, str] = field(default_factory=dict)


_HOST_RATE = "failures-per-1000-host-days"
_ALL = (
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
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _ALL}


def preset_named(name: str) -> Preset:
    """Return the preset of this name.

    Raises:
        InputError: there is no such preset; the message lists all.
    """
    if name not in PRESETS:
        raise InputError(f"--preset needs one of {', '.join(PRESETS)}, but got {name!r}")
    return PRESETS[name]
